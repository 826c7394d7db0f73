//! A plan as text, CSV, and a plot.

use std::fmt::Write as _;

use ballast_chart::COLOURS;
use ballast_units::Bytes;
use plotters::prelude::*;

use crate::curve::{Curve, Point};
use crate::{Fit, HostPlan, Plan, PlanError};

/// For people: what was recorded, the answer, the curve.
pub fn text(plan: &Plan) -> String {
    let mut text = String::new();
    for host in &plan.hosts {
        let _ = writeln!(text, "{}", facts(host));
        text += &answer(plan, &host.curve);
        text += &fit(&host.fit, plan.question.risk);
        text += &table(&host.curve);
        text.push('\n');
    }
    if let Some(curve) = &plan.together {
        let _ = writeln!(text, "all {} hosts as one record", plan.hosts.len());
        text += &answer(plan, curve);
        text += &table(curve);
        text.push('\n');
    }
    text += "Assumed: the future is like the record; peaks within one slice of time come together; a VM's\n\
             need is what was measured, sharing and compression save nothing. See docs/planner.md.\n";
    text
}

fn facts(host: &HostPlan) -> String {
    let f = &host.facts;
    let name = if f.host.is_empty() { "a host" } else { &f.host };
    let mut text = format!(
        "{name}: {} slices of {} s with VMs in {}, {:.1} VMs of {} on {}; overcommitted {:.2} times\n  \
         a VM needed {} on average; the host was short in {} of the slices",
        f.slots,
        f.slot_s,
        span(f.span_s),
        f.vms_mean,
        Bytes(f.size_mean),
        Bytes(f.budget),
        f.factor_mean,
        Bytes(f.need_mean),
        percent(f.was_short),
    );
    for note in &f.notes {
        let _ = write!(text, "\n  not read: {note}");
    }
    text
}

fn answer(plan: &Plan, curve: &Curve) -> String {
    let (q, asked) = (&plan.question, &curve.asked);
    let mut text = format!(
        "  at a risk of {}: overcommit {} times (these VMs on less memory)\n",
        asked_for(q.risk),
        no_more(asked.factor)
    );
    let confidence = asked_for(q.confidence);
    let _ = match asked.low {
        Some(low) => writeln!(
            text,
            "  with {confidence} confidence: {} times at least, {:.2} at most",
            no_more(low),
            asked.high
        ),
        None => writeln!(
            text,
            "  THE RECORD IS TOO SHORT to vouch for that with {confidence} confidence: its slices are \
             worth {:.0} independent looks\n  (what happens goes on having influence for {}), and so \
             many vouch for risks of {} and above",
            curve.looks,
            span(curve.correlation_s),
            // What is asked for by this figure is vouched for.
            percent_by(f64::ceil, curve.least_risk),
        ),
    };
    text
}

fn fit(fit: &Fit, risk: f64) -> String {
    let least = if fit.at_least { "at least " } else { "" };
    let more = match fit.vms.cmp(&fit.now) {
        std::cmp::Ordering::Greater => format!("{} more than now", fit.vms - fit.now),
        std::cmp::Ordering::Equal => "as many as now".to_owned(),
        std::cmp::Ordering::Less => format!("{} FEWER than now", fit.now - fit.vms),
    };
    let band = match fit.low {
        Some(low) => format!("{low} to {}", fit.high),
        None => format!("at most {}, and at least nobody can say", fit.high),
    };
    let step = match fit.correlation {
        Some(r) => format!(
            "correlation between VMs {r:.2}: an added one is in step with the others with probability {:.2}",
            fit.in_step
        ),
        None => "no two VMs whose needs move: an added one is taken to be in step with the others"
            .to_owned(),
    };
    format!(
        "  its memory holds {least}{} VMs like these at {}: {more} ({band}; factor {})\n  {step}\n",
        fit.vms,
        asked_for(risk),
        no_more(fit.factor),
    )
}

fn table(curve: &Curve) -> String {
    let mut text =
        format!("  {:>9}  {:>7}  {:>8}  {:>8}\n", "RISK", "FACTOR", "AT LEAST", "AT MOST");
    for p in &curve.points {
        let low = p.low.map_or("-".to_owned(), no_more);
        let here = if p.risk == curve.asked.risk { "  <- asked for" } else { "" };
        let _ = writeln!(
            text,
            "  {:>9}  {:>7}  {low:>8}  {:>8.2}{here}",
            asked_for(p.risk),
            no_more(p.factor),
            p.high
        );
    }
    text
}

/// `host,risk,factor,factor_low,factor_high`; an empty `factor_low`: the record cannot tell. The
/// host `*` is all of them.
pub fn csv(plan: &Plan) -> String {
    let mut text = "host,risk,factor,factor_low,factor_high\n".to_owned();
    for (name, curve) in curves(plan) {
        for p in &curve.points {
            let low = p.low.map_or(String::new(), |low| low.to_string());
            let quoted = if name.contains([',', '"', '\n']) {
                format!("\"{}\"", name.replace('"', "\"\""))
            } else {
                name.to_owned()
            };
            let _ = writeln!(text, "{quoted},{},{},{low},{}", p.risk, p.factor, p.high);
        }
    }
    text
}

fn curves(plan: &Plan) -> impl Iterator<Item = (&str, &Curve)> {
    let hosts = plan.hosts.iter().map(|h| (h.facts.host.as_str(), &h.curve));
    hosts.chain(plan.together.iter().map(|curve| ("*", curve)))
}

/// Risk over factor, with the bands, as an SVG document.
///
/// # Errors
/// What the plotting library cannot do.
pub fn svg(plan: &Plan) -> Result<String, PlanError> {
    let mut text = String::new();
    draw(plan, &mut text).map_err(|e| PlanError::Plot(e.to_string()))?;
    Ok(text)
}

fn draw(plan: &Plan, text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let all = || curves(plan).flat_map(|(_, curve)| &curve.points);
    let of = |p: &Point| [p.factor, p.high, p.low.unwrap_or(p.factor)];
    let least = all().flat_map(of).fold(f64::INFINITY, f64::min).min(1.0);
    let most = all().flat_map(of).fold(1.0, f64::max);
    let (x0, x1) = (least * 0.95, most * 1.05);
    let (y0, y1) = (
        all().map(|p| p.risk).fold(f64::INFINITY, f64::min) * 100.0,
        all().map(|p| p.risk).fold(0.0, f64::max) * 100.0,
    );
    let root = SVGBackend::with_string(text, (900, 480)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption("Risk of swapping in, by overcommitment", ("sans-serif", 20))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d(x0..x1, (y0..y1).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("sum of configured sizes / machine memory")
        .y_desc("part of the time with too little memory, %")
        .light_line_style(WHITE)
        .y_label_formatter(&|y| format!("{y}"))
        .draw()?;
    for (n, (name, curve)) in curves(plan).enumerate() {
        let colour = COLOURS[n % COLOURS.len()];
        let points = &curve.points;
        let lower = points.iter().filter_map(|p| Some((p.low?, p.risk * 100.0)));
        let upper = points.iter().filter(|p| p.low.is_some()).map(|p| (p.high, p.risk * 100.0));
        let band: Vec<(f64, f64)> = lower.chain(upper.rev()).collect();
        if band.len() > 2 {
            chart.draw_series(std::iter::once(Polygon::new(band, colour.mix(0.18))))?;
        }
        let line = points.iter().map(|p| (p.factor, p.risk * 100.0));
        let name = match name {
            "" => "a host".to_owned(),
            "*" => "all hosts".to_owned(),
            name => name.to_owned(),
        };
        chart
            .draw_series(LineSeries::new(line, colour.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    let risk = plan.question.risk * 100.0;
    chart.draw_series(DashedLineSeries::new(
        [(x0, risk), (x1, risk)],
        6,
        5,
        BLACK.mix(0.5).stroke_width(1),
    ))?;
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.2))
        .draw()?;
    root.present()?;
    Ok(())
}

/// A factor to two digits behind the point, which is no larger: 2.386 is "2.38". What rounding took of a whole hundredth is
/// given back.
fn no_more(factor: f64) -> String {
    format!("{:.2}", (factor * 100.0 + 1e-9).floor() / 100.0)
}

/// What was measured, to two figures: "1%", "0.01%".
fn percent(part: f64) -> String {
    percent_by(f64::round, part)
}

fn percent_by(whole: fn(f64) -> f64, part: f64) -> String {
    let percent = part * 100.0;
    let digits = if percent == 0.0 { 0 } else { (1 - percent.log10().floor() as i32).clamp(0, 6) };
    let last = 10f64.powi(digits);
    trimmed(whole(percent * last) / last, digits as usize)
}

/// What was asked for, as it was: "99.9%". Up to six digits behind the point.
fn asked_for(part: f64) -> String {
    trimmed(part * 100.0, 6)
}

fn trimmed(percent: f64, digits: usize) -> String {
    let text = format!("{percent:.digits$}");
    let text =
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}%")
}

fn span(s: f64) -> String {
    match s as u64 {
        0..120 => format!("{s:.0} s"),
        120..7200 => format!("{:.0} min", s / 60.0),
        7200..172_800 => format!("{:.1} h", s / 3600.0),
        _ => format!("{:.1} days", s / 86_400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_spans_are_short() {
        for (part, text) in [
            (0.01, "1%"),
            (0.0001, "0.01%"),
            (0.1234, "12%"),
            (0.0, "0%"),
            (1.0, "100%"),
            (0.95, "95%"),
        ] {
            assert_eq!(percent(part), text);
        }
        for (part, text) in [(0.010_28, "1.1%"), (0.000_101, "0.011%"), (1.0, "100%")] {
            assert_eq!(percent_by(f64::ceil, part), text);
        }
        let factors = [2.386, 2.384, 1.28, 0.29, 2.0].map(no_more);
        assert_eq!(factors, ["2.38", "2.38", "1.28", "0.29", "2.00"]);
        for (part, text) in [
            (0.999, "99.9%"),
            (0.0125, "1.25%"),
            (1e-6, "0.0001%"),
            (0.29, "29%"),
            (0.01, "1%"),
            (0.5, "50%"),
        ] {
            assert_eq!(asked_for(part), text);
        }
        assert_eq!(
            (span(59.0), span(600.0), span(1e5)),
            ("59 s".into(), "10 min".into(), "27.8 h".into())
        );
    }
}
