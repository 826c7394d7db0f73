//! From state to cells. Nothing here changes the state, and no size of screen is too small to be
//! drawn on: whatever does not fit is left out.

mod bar;
mod budget;
mod detail;
mod footer;
mod overlay;
mod text;
mod traffic;
mod vms;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph};

use super::app::{App, Overlay};
use super::palette::Palette;
use crate::failure::one_line;
use crate::figures::age;

/// Below this there is only a list of lines.
const SMALLEST: (u16, u16) = (40, 10);
/// The detail pane with its border: six lines of text and one of history.
const DETAIL_LEAST: u16 = 9;
const DETAIL_MOST: u16 = 22;
/// The list of VMs with its border, heading and one VM.
const VMS_LEAST: u16 = 4;

pub fn screen(frame: &mut Frame, app: &App, palette: Palette) {
    let area = frame.area();
    if area.width < SMALLEST.0 || area.height < SMALLEST.1 {
        return cramped(frame, area, app, palette);
    }
    let prompt = matches!(app.overlay, Overlay::Edit(_));
    let footer_height = if prompt { 2 } else { 1 };
    let host_height = match area.height {
        24.. => 7,
        16..24 => 6,
        _ => 3,
    };
    let [title, host, middle, footer] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(host_height),
        Constraint::Min(0),
        Constraint::Length(footer_height),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(title_line(app, title.width, palette)), title);
    budget::draw(frame, host, app, palette);
    let detail_height = detail_height(middle.height, app.rows.len());
    let [list, detail] =
        Layout::vertical([Constraint::Min(0), Constraint::Length(detail_height)]).areas(middle);
    vms::draw(frame, list, app, palette);
    if detail.height > 2 {
        detail::draw(frame, detail, app, palette);
    }
    footer::draw(frame, footer, app, palette);
    overlay::draw(frame, area, app, palette);
}

/// Rows for the detail pane; 0 where the list of VMs needs them all.
fn detail_height(available: u16, vms: usize) -> u16 {
    let wanted =
        u16::try_from(vms).unwrap_or(u16::MAX).saturating_add(VMS_LEAST - 1).max(VMS_LEAST);
    let rest = available.saturating_sub(wanted);
    if vms == 0 || available < VMS_LEAST + DETAIL_LEAST {
        0
    } else {
        rest.clamp(DETAIL_LEAST, DETAIL_MOST)
    }
}

fn title_line(app: &App, width: u16, palette: Palette) -> Line<'static> {
    if let Some(away) = &app.away {
        let text = away_text(&away.reason, away.for_s);
        return Line::styled(text, palette.selected().patch(palette.error()));
    }
    let Some(host) = &app.host else { return Line::from(" ballast") };
    let right = format!("up {} ", age(host.uptime_s));
    let room = usize::from(width).saturating_sub(right.len() + 8);
    Line::from(vec![
        Span::styled(" ballast", palette.strong()),
        Span::raw(" ".repeat(room)),
        Span::styled(right, palette.quiet()),
    ])
}

fn away_text(reason: &str, for_s: f64) -> String {
    format!(" ballastd is away, retrying (last answer {} ago): {} ", age(for_s), one_line(reason))
}

/// State and names, one line each, as far as they go.
fn cramped(frame: &mut Frame, area: Rect, app: &App, palette: Palette) {
    let mut lines = Vec::new();
    if let Overlay::Edit(edit) = &app.overlay {
        lines.push(Line::from(format!("{} {}: {}", edit.vm, edit.field.name(), edit.text)));
        lines.extend(edit.error.as_deref().map(|e| Line::styled(one_line(e), palette.error())));
    }
    if app.away.is_some() {
        lines.push(Line::styled("ballastd is away, retrying", palette.error()));
    }
    if let Some(host) = &app.host {
        let state = host.state.to_string().to_uppercase();
        lines.push(Line::styled(state, palette.state(host.state)));
    }
    for (i, row) in app.rows.iter().enumerate() {
        let style = if i == app.selected { palette.selected() } else { Default::default() };
        lines.push(Line::styled(row.view.name.clone(), style));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// A box with a title of parts.
fn panel(title: Vec<Span<'_>>) -> Block<'_> {
    Block::bordered().title(Line::from(title))
}
