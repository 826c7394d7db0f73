//! Line and bar plots as SVG: axes with units, a legend, a source's values dashed.

#![warn(missing_docs)]

use anyhow::{Result, anyhow};
use plotters::prelude::*;

/// One line, or one set of bars.
#[derive(Clone, Debug)]
pub struct Series {
    /// In the legend.
    pub label: String,
    /// x and y.
    pub points: Vec<(f64, f64)>,
    /// A source's values: dashed.
    pub reference: bool,
    /// Measured on the right axis.
    pub right: bool,
}

impl Series {
    /// A solid line, measured on the left axis.
    pub fn new(label: &str, points: Vec<(f64, f64)>) -> Series {
        Series { label: label.to_owned(), points, reference: false, right: false }
    }
    /// Makes it a source's values.
    #[must_use]
    pub fn reference(mut self) -> Series {
        self.reference = true;
        self
    }
    /// Measures it on the right axis.
    #[must_use]
    pub fn right(mut self) -> Series {
        self.right = true;
        self
    }
}

/// One diagram; several are drawn above one another.
#[derive(Clone, Debug, Default)]
pub struct Chart {
    /// Above it.
    pub title: String,
    /// Label of the horizontal axis, with the unit.
    pub x: String,
    /// Label of the left axis, with the unit.
    pub y: String,
    /// Label of the right axis, if there is one.
    pub y_right: Option<String>,
    /// What is drawn.
    pub series: Vec<Series>,
    /// Bars beside one another at each x, instead of lines.
    pub bars: bool,
}

const WIDTH: u32 = 900;
const HEIGHT: u32 = 420;
/// Distinguishable also by readers who do not tell red from green (Okabe and Ito).
pub const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];

/// Draws the charts into one SVG document.
///
/// # Errors
/// Nothing is to be drawn, or it cannot be.
pub fn svg(charts: &[Chart]) -> Result<String> {
    let mut text = String::new();
    {
        let height = HEIGHT * charts.len().max(1) as u32;
        let root = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
        root.fill(&WHITE).map_err(|e| anyhow!("plot: {e}"))?;
        for (chart, area) in charts.iter().zip(root.split_evenly((charts.len().max(1), 1))) {
            draw(chart, &area).map_err(|e| anyhow!("plot '{}': {e}", chart.title))?;
        }
        root.present().map_err(|e| anyhow!("plot: {e}"))?;
    }
    Ok(text)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type DrawError<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

fn draw<'a>(chart: &Chart, area: &Area<'a>) -> Result<(), DrawError<'a>> {
    let (x0, x1) = extent(chart.series.iter().flat_map(|s| s.points.iter().map(|p| p.0)));
    let tallest = |right: bool| {
        let values = chart.series.iter().filter(|s| s.right == right);
        let (_, top) = extent(values.flat_map(|s| s.points.iter().map(|p| p.1)));
        top.max(0.0) * 1.12 + 1e-9
    };
    let lowest = |right: bool| {
        let values = chart.series.iter().filter(|s| s.right == right);
        let (low, _) = extent(values.flat_map(|s| s.points.iter().map(|p| p.1)));
        low.min(0.0) * 1.12
    };
    let margin = if chart.bars { step(chart) * 0.6 } else { 0.0 };
    let xs = x0 - margin..(x1 + margin).max(x0 - margin + 1e-9);
    let mut ctx = ChartBuilder::on(area)
        .caption(&chart.title, ("sans-serif", 20))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .right_y_label_area_size(if chart.y_right.is_some() { 64 } else { 0 })
        .build_cartesian_2d(xs.clone(), lowest(false)..tallest(false))?
        .set_secondary_coord(xs, lowest(true)..tallest(true));
    ctx.configure_mesh()
        .x_desc(&chart.x)
        .y_desc(&chart.y)
        .light_line_style(WHITE)
        .label_style(("sans-serif", 14))
        .axis_desc_style(("sans-serif", 15))
        .draw()?;
    if let Some(label) = &chart.y_right {
        ctx.configure_secondary_axes().y_desc(label).label_style(("sans-serif", 14)).draw()?;
    }
    for (n, series) in chart.series.iter().enumerate() {
        let colour = COLOURS[n % COLOURS.len()];
        let points = series.points.clone();
        let line = ShapeStyle::from(colour).stroke_width(2);
        let annotated = if chart.bars && !series.reference {
            let bars: Vec<&Series> = chart.series.iter().filter(|s| !s.reference).collect();
            let place = bars.iter().position(|s| s.label == series.label).unwrap_or(0);
            let width = step(chart) * 0.7 / bars.len().max(1) as f64;
            let left = -width * bars.len() as f64 / 2.0 + width * place as f64;
            ctx.draw_series(points.into_iter().map(move |(x, y)| {
                Rectangle::new([(x + left, 0.0), (x + left + width * 0.92, y)], colour.filled())
            }))?
        } else if series.reference {
            ctx.draw_series(DashedLineSeries::new(points, 7, 5, line))?
        } else if series.right {
            ctx.draw_secondary_series(LineSeries::new(points, line))?
        } else {
            ctx.draw_series(LineSeries::new(points, line))?
        };
        annotated.label(&series.label).legend(move |(x, y)| {
            PathElement::new(vec![(x, y), (x + 22, y)], ShapeStyle::from(colour).stroke_width(3))
        });
    }
    ctx.configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.4))
        .label_font(("sans-serif", 14))
        .draw()
}

fn extent(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values
        .filter(|v| v.is_finite())
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    if low > high { (0.0, 1.0) } else { (low, high) }
}

/// The smallest distance between two bars' places.
fn step(chart: &Chart) -> f64 {
    let mut xs: Vec<f64> = chart.series.iter().flat_map(|s| s.points.iter().map(|p| p.0)).collect();
    xs.sort_by(f64::total_cmp);
    let gaps = xs.windows(2).map(|w| w[1] - w[0]).filter(|g| *g > 0.0);
    let smallest = gaps.fold(f64::INFINITY, f64::min);
    if smallest.is_finite() { smallest } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines() -> Chart {
        Chart {
            title: "Memory & time".to_owned(),
            x: "time (s)".to_owned(),
            y: "memory (MiB)".to_owned(),
            y_right: Some("swap-in (MiB)".to_owned()),
            series: vec![
                Series::new("ours", vec![(0.0, 1.0), (10.0, 250.0)]),
                Series::new("paper", vec![(0.0, 50.0), (10.0, 50.0)]).reference(),
                Series::new("swap-in", vec![(0.0, 0.0), (10.0, 5.0)]).right(),
            ],
            bars: false,
        }
    }

    /// Every element that is opened is closed, in order.
    fn well_formed(svg: &str) -> bool {
        let mut open = Vec::new();
        for tag in svg.split('<').skip(1) {
            let tag = tag.split('>').next().unwrap();
            let name = tag.trim_start_matches('/').split([' ', '\n', '/']).next().unwrap();
            match tag {
                t if t.starts_with('?') || t.starts_with('!') || t.ends_with('/') => {}
                t if t.starts_with('/') => {
                    if open.pop() != Some(name) {
                        return false;
                    }
                }
                _ => open.push(name),
            }
        }
        open.is_empty() && !svg.contains("NaN")
    }

    #[test]
    fn lines_and_bars_are_valid_svg_with_labels_and_legend() {
        let mut bars = lines();
        bars.bars = true;
        bars.y_right = None;
        bars.series.pop();
        let text = svg(&[lines(), bars]).unwrap();
        assert!(text.starts_with("<svg") && well_formed(&text));
        for label in
            ["time (s)", "memory (MiB)", "swap-in (MiB)", "ours", "paper", "Memory &amp; time"]
        {
            assert!(text.contains(label), "{label}");
        }
        assert!(text.contains("height=\"840\""));
    }

    #[test]
    fn a_chart_without_points_is_still_valid() {
        assert!(well_formed(&svg(&[Chart::default()]).unwrap()));
        assert!(well_formed(&svg(&[]).unwrap()));
        let mut one = lines();
        one.series = vec![Series::new("one", vec![(3.0, 0.0)])];
        assert!(well_formed(&svg(&[one]).unwrap()));
    }
}
