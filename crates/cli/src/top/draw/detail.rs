//! The selected VM.

use ballast_api::VmView;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Sparkline};

use super::{bar, panel, text, traffic};
use crate::failure::one_line;
use crate::figures::{age, pages_rate, short_count, short_size};
use crate::table;
use crate::top::app::{App, VmRow};
use crate::top::history::Sample;
use crate::top::palette::Palette;

/// Width of the words before the values.
const LABEL: usize = 9;
/// From here on the history stands to the right of the text.
const WIDE: u16 = 130;

pub fn draw(frame: &mut Frame, area: Rect, app: &App, palette: Palette) {
    let Some(row) = app.selected() else { return };
    let block = panel(title(&row.view, palette));
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let verdict = verdict(app);
    if inner.width >= WIDE {
        let [words, charts] = Layout::horizontal([Constraint::Percentage(60), Constraint::Min(0)])
            .spacing(2)
            .areas(inner);
        let all = lines(row, &verdict, words.width, usize::from(words.height), true, palette);
        frame.render_widget(Paragraph::new(all), words);
        history_stacked(frame, charts, row, palette);
        return;
    }
    // Six lines of text and one of history; then the bar, a longer verdict, a higher history.
    let with_bar = inner.height >= 8;
    let room = usize::from(inner.height.saturating_sub(1));
    let all = lines(row, &verdict, inner.width, room, with_bar, palette);
    let used = u16::try_from(all.len()).unwrap_or(inner.height).min(inner.height);
    let [words, charts] =
        Layout::vertical([Constraint::Length(used), Constraint::Min(0)]).areas(inner);
    frame.render_widget(Paragraph::new(all), words);
    let charts = Rect { height: charts.height.min(5), ..charts };
    history_in_a_row(frame, charts, row, palette);
}

fn title(vm: &VmView, palette: Palette) -> Vec<Span<'static>> {
    let mut text = format!(
        " ─ {} ─ {} ─ {}",
        vm.state,
        vm.management.mode,
        text::left(&one_line(&vm.accel), 20).trim_end()
    );
    if let Some(pid) = vm.pid {
        text.push_str(&format!(" ─ pid {pid}"));
    }
    text.push_str(&match vm.vmm_uptime_s {
        Some(up) => format!(" ─ up {} ", age(up)),
        None => format!(" ─ managed for {} ", age(vm.uptime_s)),
    });
    vec![Span::raw(" "), Span::styled(vm.name.clone(), palette.strong()), Span::raw(text)]
}

fn verdict(app: &App) -> String {
    match app.selected_why() {
        Some(Ok(why)) => one_line(&format!("{} ({})", why.verdict, why.trigger)),
        Some(Err(message)) => message.clone(),
        None => "...".to_owned(),
    }
}

/// At most `room` lines; the verdict takes what the others leave, at least one.
fn lines(
    row: &VmRow,
    verdict: &str,
    width: u16,
    room: usize,
    with_bar: bool,
    palette: Palette,
) -> Vec<Line<'static>> {
    let width = usize::from(width);
    let vm = &row.view;
    let mut all = Vec::new();
    if with_bar {
        let mut spans = vec![label("pages", palette)];
        spans.extend(bar::of_vm(vm, width.saturating_sub(LABEL), palette));
        all.push(Line::from(spans));
    }
    let mut say = |name: &'static str, value: String| {
        all.push(Line::from(vec![label(name, palette), Span::raw(value)]));
    };
    if let Some(reason) = table::unpaged_reason(&vm.management) {
        say("unpaged", reason);
    }
    if let Some(trouble) = &vm.trouble {
        say("trouble", one_line(trouble));
    }
    say("memory", memory(vm));
    say("active", active(vm));
    say("balloon", balloon(vm));
    // A line that says nothing needs room that nothing else wants.
    let s = &vm.sharing;
    if room > 7 || s.shared > 0 || s.broken > 0 || s.note.is_some() {
        say("sharing", sharing(vm));
    }
    say("guest", guest(vm));
    say("traffic", traffic::vm(&row.rates, width.saturating_sub(LABEL)));
    let left = room.saturating_sub(all.len()).clamp(1, 4);
    let mut wrapped = text::wrap(verdict, width.saturating_sub(LABEL), "");
    if wrapped.len() > left {
        wrapped.truncate(left);
        if let Some(last) = wrapped.last_mut() {
            *last = text::left(&format!("{last} …"), width.saturating_sub(LABEL));
        }
    }
    for (i, part) in wrapped.into_iter().enumerate() {
        let name = if i == 0 { "why" } else { "" };
        all.push(Line::from(vec![label(name, palette), Span::raw(part)]));
    }
    all
}

fn label(name: &str, palette: Palette) -> Span<'static> {
    Span::styled(text::left(name, LABEL), palette.strong())
}

fn memory(vm: &VmView) -> String {
    let m = &vm.memory;
    let mut text = format!("resident {}", short_size(m.resident));
    for (name, bytes) in [
        ("swapped", m.swapped),
        ("ballooned", m.ballooned),
        ("untouched", m.untouched),
        ("staged", m.staged),
        ("evicting", m.swap_target),
        ("compressed", m.compressed),
        ("filled", m.filled),
    ] {
        // The first three are always of interest; the others when there are any.
        if bytes > 0 || matches!(name, "swapped" | "ballooned" | "untouched") {
            text.push_str(&format!("  {name} {}", short_size(bytes)));
        }
    }
    if m.compressed > 0 {
        text.push_str(&format!("  cache {}", short_size(vm.compression.cache)));
    }
    text.push_str(&format!("  overhead {}", short_size(m.overhead)));
    text
}

fn active(vm: &VmView) -> String {
    let Some(estimate) = table::estimate(vm) else { return "- (0 periods)".to_owned() };
    let a = &vm.active;
    format!(
        "{}, the largest of slow {}, fast {}, now {} ({} periods)",
        short_size(estimate),
        short_size(a.slow),
        short_size(a.fast),
        short_size(a.current),
        a.periods
    )
}

fn balloon(vm: &VmView) -> String {
    let b = &vm.balloon;
    format!(
        "{}, asked {}, reported {}, at most {}",
        b.health,
        short_size(b.target),
        short_size(b.reported),
        short_size(b.limit)
    )
}

fn sharing(vm: &VmView) -> String {
    let s = &vm.sharing;
    if s.domain.is_empty() {
        return "none, since it is not paged".to_owned();
    }
    let text = format!(
        "{}: shared {} saved {} broken {} {}/s  scan {} {:.1}%",
        s.domain,
        short_size(s.shared),
        short_size(s.saved),
        short_size(s.broken),
        short_count(s.breaks_per_s),
        pages_rate(s.scan_rate),
        s.cpu_percent
    );
    match &s.note {
        Some(note) => format!("{text}  {}", one_line(note)),
        None => text,
    }
}

fn guest(vm: &VmView) -> String {
    let Some(g) = &vm.guest else { return "sends no statistics".to_owned() };
    let mut parts = Vec::new();
    for (name, bytes) in [
        ("free", g.free),
        ("available", g.available),
        ("caches", g.disk_caches),
        ("swap in", g.swap_in),
        ("swap out", g.swap_out),
    ] {
        // That a guest does not swap needs no room.
        let told = bytes.filter(|b| *b > 0 || !matches!(name, "swap in" | "swap out"));
        parts.extend(told.map(|b| format!("{name} {}", short_size(b))));
    }
    parts.extend(g.major_faults.map(|n| format!("faults {}", short_count(n as f64))));
    parts.push(format!("({} s old)", g.age_s));
    parts.join("  ")
}

/// One chart's name, values and style.
type Chart = (&'static str, fn(&Sample) -> Option<u64>, Style);

fn charts(palette: Palette) -> [Chart; 3] {
    [
        ("used", |s| Some(s.consumed), palette.resident()),
        ("target", |s| Some(s.target), palette.target()),
        ("active", |s| s.active, palette.active()),
    ]
}

fn history_in_a_row(frame: &mut Frame, area: Rect, row: &VmRow, palette: Palette) {
    let columns: [Rect; 3] = Layout::horizontal([Constraint::Fill(1); 3]).spacing(2).areas(area);
    for (chart, column) in charts(palette).into_iter().zip(columns) {
        history(frame, column, row, chart, palette);
    }
}

fn history_stacked(frame: &mut Frame, area: Rect, row: &VmRow, palette: Palette) {
    let rows: [Rect; 3] = Layout::vertical([Constraint::Fill(1); 3]).areas(area);
    for (chart, area) in charts(palette).into_iter().zip(rows) {
        history(frame, area, row, chart, palette);
    }
}

/// The newest samples, on the scale of the VM's size.
fn history(frame: &mut Frame, area: Rect, row: &VmRow, chart: Chart, palette: Palette) {
    let (name, value, style) = chart;
    let [label, plot] = Layout::horizontal([Constraint::Length(7), Constraint::Min(0)]).areas(area);
    frame.render_widget(Paragraph::new(Span::styled(name, palette.strong())), label);
    let data = row.history.last(usize::from(plot.width), value);
    let scale = row.view.params.size.max(1);
    frame.render_widget(Sparkline::default().data(&data).max(scale).style(style), plot);
}
