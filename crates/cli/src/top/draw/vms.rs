//! The list of VMs.

use ballast_api::{BalloonHealth, RunState};
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::bar;
use super::{panel, text};
use crate::figures::{short_count, short_size};
use crate::table;
use crate::top::app::{App, VmRow};
use crate::top::palette::Palette;

const LEGEND: &str =
    " █ resident ▒ compressed ▓ swapped ░ ballooned · untouched ┃ target ◆ active ";
const BAR_LEAST: usize = 10;
const NAME_LEAST: usize = 8;
const NAME_MOST: usize = 24;

/// A column of numbers, with the width it needs.
struct Column {
    heading: &'static str,
    width: usize,
    value: fn(&VmRow) -> String,
}

const COLUMNS: [Column; 13] = [
    Column { heading: "USED", width: 5, value: |r| short_size(r.view.memory.consumed) },
    Column { heading: "TGT", width: 5, value: |r| short_size(r.view.memory.target) },
    Column { heading: "ACT", width: 5, value: active },
    Column { heading: "SHARES", width: 6, value: |r| shares(r.view.params.shares) },
    Column { heading: "MIN", width: 5, value: |r| short_size(r.view.params.min) },
    Column { heading: "MAX", width: 5, value: |r| short_size(r.view.params.max) },
    Column { heading: "TAX", width: 4, value: |r| tax(r.view.params.tax) },
    Column { heading: "BALLN", width: 5, value: |r| health(r.view.balloon.health) },
    Column { heading: "WT/BL", width: 5, value: waits },
    Column { heading: "SHARED", width: 6, value: |r| short_size(r.view.sharing.shared) },
    Column { heading: "SAVED", width: 5, value: |r| short_size(r.view.sharing.saved) },
    Column { heading: "ZERO", width: 5, value: |r| short_size(r.view.counters.zero_dropped) },
    Column { heading: "BRK/s", width: 5, value: |r| short_count(r.view.sharing.breaks_per_s) },
];
const BALLOON_COLUMN: usize = 7;

fn active(row: &VmRow) -> String {
    table::estimate(&row.view).map_or("-".to_owned(), short_size)
}

/// Up to six characters.
fn shares(n: u32) -> String {
    if n < 1_000_000 { n.to_string() } else { short_count(f64::from(n)) }
}

/// Four characters: ".995" rather than a rounded 1.00.
fn tax(t: f64) -> String {
    let two = format!("{t:.2}");
    if (two.parse::<f64>().unwrap_or(t) - t).abs() < 1e-9 {
        two
    } else {
        format!("{:.3}", t.clamp(0.0, 0.999)).trim_start_matches('0').to_owned()
    }
}

fn health(health: BalloonHealth) -> String {
    match health {
        BalloonHealth::Healthy => "ok".to_owned(),
        BalloonHealth::Missing => "none".to_owned(),
        sick => sick.to_string(),
    }
}

/// Allocations per second that waited, and that were blocked.
fn waits(row: &VmRow) -> String {
    let per_s = |r: Option<f64>| r.map_or("-".to_owned(), |r| short_count(r.ceil().min(99e9)));
    format!("{}/{}", per_s(row.rates.waits), per_s(row.rates.blocks))
}

pub fn draw(frame: &mut Frame, area: Rect, app: &App, palette: Palette) {
    let mut block = panel(vec![Span::raw(" VMs ")]);
    if area.width >= 79 {
        block = block.title_bottom(Line::from(LEGEND));
    }
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let widths = Widths::of(app, usize::from(inner.width));
    let mut lines = vec![heading(&widths, palette)];
    if app.rows.is_empty() {
        lines.push(Line::from("no VMs yet: ballast vm run NAME --max 256M --kernel FILE"));
    }
    let room = usize::from(inner.height).saturating_sub(1);
    let first = (app.selected + 1).saturating_sub(room);
    let shown = app.rows.iter().enumerate().skip(first).take(room);
    lines.extend(shown.map(|(i, row)| line(row, i == app.selected, &widths, palette)));
    frame.render_widget(Paragraph::new(lines), inner);
}

/// How the width of a line is spent. Columns that do not fit are left out, last ones first.
struct Widths {
    name: usize,
    bar: usize,
    columns: usize,
}

impl Widths {
    fn of(app: &App, width: usize) -> Widths {
        let longest = app.rows.iter().map(|r| r.view.name.chars().count()).max().unwrap_or(0);
        let mut rest = width.saturating_sub(1 + NAME_LEAST + 1 + BAR_LEAST);
        let mut columns = 0;
        for column in &COLUMNS {
            match rest.checked_sub(column.width + 1) {
                Some(r) => rest = r,
                None => break,
            }
            columns += 1;
        }
        // What is left goes to the name as far as it needs it, then to the bar.
        let name = longest.clamp(NAME_LEAST, NAME_MOST).min(NAME_LEAST + rest / 2);
        Widths { name, bar: BAR_LEAST + rest - (name - NAME_LEAST), columns }
    }
}

fn heading(widths: &Widths, palette: Palette) -> Line<'static> {
    let mut text =
        format!(" {} {}", text::left("NAME", widths.name), text::left("MEMORY", widths.bar));
    for column in COLUMNS.iter().take(widths.columns) {
        text.push(' ');
        text.push_str(&text::right(column.heading, column.width));
    }
    Line::styled(text, palette.strong())
}

fn line(row: &VmRow, selected: bool, widths: &Widths, palette: Palette) -> Line<'static> {
    let mark = if selected { ">" } else { " " };
    let name = text::left(&row.view.name, widths.name);
    let style = if selected { palette.selected() } else { Default::default() };
    let mut spans = vec![Span::styled(format!("{mark}{name}"), style), Span::raw(" ")];
    if matches!(row.view.state, RunState::Running) {
        spans.extend(bar::of_vm(&row.view, widths.bar, palette));
    } else {
        let state = format!("({})", row.view.state);
        spans.push(Span::styled(text::left(&state, widths.bar), palette.quiet()));
    }
    for (i, column) in COLUMNS.iter().take(widths.columns).enumerate() {
        let value = format!(" {}", text::right(&(column.value)(row), column.width));
        spans.push(if i == BALLOON_COLUMN {
            Span::styled(value, palette.health(row.view.balloon.health))
        } else {
            Span::raw(value)
        });
    }
    Line::from(spans)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taxes_and_shares_fit_and_are_not_rounded_to_one() {
        assert_eq!(tax(0.75), "0.75");
        assert_eq!(tax(0.0), "0.00");
        assert_eq!(tax(0.995), ".995");
        assert_eq!(tax(0.99999), ".999");
        assert_eq!(shares(999_999), "999999");
        assert!(shares(u32::MAX).len() <= 6);
    }
}
