//! The host: who has the budget, how far it is to each threshold, and what goes on.

use ballast_api::{HostSharing, HostView, StateName};
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::{bar, panel, traffic};
use crate::figures::{pages_rate, short_count, short_size, vms};
use crate::table;
use crate::top::app::App;
use crate::top::palette::Palette;

pub fn draw(frame: &mut Frame, area: Rect, app: &App, palette: Palette) {
    let Some(host) = &app.host else {
        return frame.render_widget(panel(vec![Span::raw(" host ")]), area);
    };
    let block = panel(title(host, palette));
    let inner = block.inner(area);
    let width = usize::from(inner.width);
    let lines = vec![
        budget_bar(app, host, width, palette),
        marks(host, width, palette),
        usage(host),
        Line::from(traffic::host(&app.host_rates, width)),
        Line::from(sharing(&host.sharing)),
    ];
    frame.render_widget(block, area);
    frame.render_widget(Paragraph::new(lines), inner);
}

fn title(host: &HostView, palette: Palette) -> Vec<Span<'static>> {
    let state = host.state.to_string().to_uppercase();
    vec![
        Span::raw(" host ─ state "),
        Span::styled(format!(" {state} "), palette.state(host.state)),
        Span::raw(format!(
            " ─ overcommit {:.2} (peak {:.2}) ─ {} ─ tax {} ",
            host.overcommit,
            host.overcommit_peak,
            vms(host.vms),
            host.tax
        )),
    ]
}

/// One part per VM, then overhead, then what is free, each with its name as far as it fits.
fn budget_bar(app: &App, host: &HostView, width: usize, palette: Palette) -> Line<'static> {
    let mut parts: Vec<(u64, String, Style)> = app
        .rows
        .iter()
        .enumerate()
        .map(|(i, row)| (row.view.memory.consumed, row.view.name.clone(), palette.part(i)))
        .collect();
    parts.push((host.overhead, "overhead".to_owned(), palette.overhead()));
    let sizes: Vec<u64> = parts.iter().map(|p| p.0).collect();
    let mut spans = Vec::new();
    let mut from = 0;
    for (end, (size, name, style)) in bar::ends(&sizes, host.budget, width).into_iter().zip(parts) {
        if end > from {
            let label = format!("▏{name} {}", short_size(size));
            spans.push(Span::styled(cut(&label, end - from), style));
        }
        from = end.max(from);
    }
    let free = format!(" free {}", short_size(host.free));
    spans.push(Span::raw(cut(&free, width - from)));
    Line::from(spans)
}

/// Unlike [`text::left`] without a mark: a part of a bar is often narrower than its name.
fn cut(label: &str, width: usize) -> String {
    format!("{:<width$}", label.chars().take(width).collect::<String>())
}

/// The letter that stands for a state's threshold.
fn letter(state: StateName) -> char {
    match state {
        StateName::High => 'H',
        StateName::Soft => 'S',
        StateName::Hard => 'D',
        StateName::Low => 'L',
    }
}

/// The thresholds: the free memory at which the host is back in high, and below which each other
/// state begins.
fn thresholds(host: &HostView) -> Vec<(StateName, u64, char)> {
    let edges = table::edges(host);
    let back = edges.get(1).and_then(|e| e.ends_at.map(|v| (StateName::High, v, '≥')));
    let begins = edges.iter().filter_map(|e| e.begins_below.map(|v| (e.state, v, '<')));
    back.into_iter().chain(begins).collect()
}

/// The thresholds in words, and below the budget bar where they lie: the state begins where the
/// used part reaches its mark. Marks that fall on one cell move apart to the left.
fn marks(host: &HostView, width: usize, palette: Palette) -> Line<'static> {
    let thresholds = thresholds(host);
    let mut cells = vec![(' ', Style::new()); width];
    let mut limit = width;
    for (state, free, _) in thresholds.iter().rev() {
        let Some(last) = limit.checked_sub(1) else { break };
        let used = host.budget.saturating_sub(*free);
        let at = bar::position(used, host.budget, width).min(last);
        if let Some(cell) = cells.get_mut(at) {
            *cell = (letter(*state), palette.state(*state));
        }
        limit = at;
    }
    let mut spans = Vec::new();
    let mut length = 0;
    for (state, free, sign) in thresholds {
        let name = format!("{} {state}", letter(state));
        let value = format!(" {sign}{}  ", short_size(free));
        let more = name.chars().count() + value.chars().count();
        if length + more > limit {
            break;
        }
        length += more;
        let style = if state == host.state { palette.state(state) } else { Style::new() };
        spans.push(Span::styled(name, style));
        spans.push(Span::raw(value));
    }
    let rest = cells.into_iter().skip(length);
    spans.extend(rest.map(|(c, style)| Span::styled(c.to_string(), style)));
    Line::from(spans)
}

fn usage(h: &HostView) -> Line<'static> {
    Line::from(format!(
        "used {} free {} of {}, peak {}  measured {}, peak {}  swap {}/{}",
        short_size(table::used(h)),
        short_size(h.free),
        short_size(h.budget),
        short_size(h.peak_used),
        short_size(h.measured_used),
        short_size(h.measured_peak),
        short_size(h.swap_used),
        short_size(h.swap_reserved)
    ))
}

/// Fits 78 columns with any numbers.
fn sharing(s: &HostSharing) -> String {
    let scan = match s.enabled {
        true => format!("scan {} {:.1}%", pages_rate(s.scan_rate), s.cpu_percent),
        false => "scan off".to_owned(),
    };
    format!(
        "shared {} common {} saved {} zero {}  broken {} {}/s  {scan}",
        short_size(s.shared),
        short_size(s.common),
        short_size(s.saved),
        short_size(s.zero_dropped),
        short_size(s.broken),
        short_count(s.breaks_per_s),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::samples;

    fn content(line: &Line) -> String {
        line.spans.iter().map(|s| s.content.to_string()).collect()
    }

    #[test]
    fn marks_lie_where_their_threshold_is_met_and_never_on_one_another() {
        let host = samples::host();
        let wide = content(&marks(&host, 200, Palette::new(false)));
        // 6, 4, 2 and 1% of free memory on 200 cells.
        let tail: String = wide.chars().skip(180).collect();
        assert_eq!(tail, "        H   S   D L ");
        for width in 0..60 {
            let narrow = content(&marks(&host, width, Palette::new(false)));
            assert_eq!(narrow.chars().count(), width);
        }
        let tight = content(&marks(&host, 10, Palette::new(false)));
        assert!(tight.contains("HSDL"), "{tight}");
    }

    #[test]
    fn parts_are_named_and_fill_the_bar() {
        let mut app = App::default();
        app.update(samples::seen(
            1.0,
            samples::host(),
            vec![samples::vm("web"), samples::vm("db")],
        ));
        let line = content(&budget_bar(&app, &samples::host(), 76, Palette::new(false)));
        assert_eq!(line.chars().count(), 76);
        assert!(line.contains("web 128M") && line.contains("db 128M"), "{line}");
        assert!(line.contains("free 104M"), "{line}");
    }

    #[test]
    fn sharing_fits_a_screen_of_80_columns() {
        let large = 1023 << 50;
        let line = sharing(&HostSharing {
            enabled: true,
            shared: large,
            common: large,
            saved: large,
            zero_dropped: large,
            broken: large,
            breaks_per_s: 999_949.0,
            scan_rate: 9999.0e6 / 4096.0,
            cpu_percent: 100.0,
            ..samples::host().sharing
        });
        assert!(line.chars().count() <= 78, "{line}");
        assert_eq!(
            sharing(&samples::host().sharing),
            "shared 120M common 20M saved 100M zero 50M  broken 3M 12/s  scan 41 MB/s 3.2%"
        );
    }

    #[test]
    fn names_that_are_cut_keep_their_width() {
        assert_eq!(cut("abc", 2), "ab");
        assert_eq!(cut("abc", 5), "abc  ");
    }
}
