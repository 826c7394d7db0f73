//! The last lines: keys, the outcome of the last change, or the prompt.

use ratatui::Frame;
use ratatui::layout::{Position, Rect};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::text;
use crate::failure::one_line;
use crate::top::app::{App, Overlay};
use crate::top::edit::Edit;
use crate::top::palette::Palette;

const KEYS: &str = " q quit  ↑↓ select  s shares  m min  x max  t tax  w why  ? help";

pub fn draw(frame: &mut Frame, area: Rect, app: &App, palette: Palette) {
    match (&app.overlay, &app.note) {
        (Overlay::Edit(edit), _) => prompt(frame, area, app, edit, palette),
        (_, Some(note)) => {
            let text = format!(" {}", one_line(note));
            frame.render_widget(Paragraph::new(Line::styled(text, palette.strong())), area);
        }
        _ => frame.render_widget(Paragraph::new(Line::styled(KEYS, palette.quiet())), area),
    }
}

fn prompt(frame: &mut Frame, area: Rect, app: &App, edit: &Edit, palette: Palette) {
    let params = app.rows.iter().find(|r| r.view.name == edit.vm).map(|r| &r.view.params);
    let now = params.map(|p| edit.field.current(p)).unwrap_or_default();
    // The value must stay visible: the name gives way.
    let room = usize::from(area.width).saturating_sub(edit.text.chars().count() + 45).max(4);
    let name = text::left(&edit.vm, edit.vm.chars().count().min(room));
    let example = edit.field.example();
    let question = format!(" {} of {name} (now {now}, as in {example}): ", edit.field.name());
    let cursor = question.chars().count() + edit.text.chars().count();
    let below = match (&edit.error, edit.sent.is_some()) {
        (Some(error), _) => Line::styled(format!(" {}", one_line(error)), palette.error()),
        (None, true) => Line::from(" asking ballastd..."),
        (None, false) => Line::styled(" Enter applies, Esc cancels", palette.quiet()),
    };
    let first =
        Line::from(vec![Span::styled(question, palette.strong()), Span::raw(edit.text.clone())]);
    frame.render_widget(Paragraph::new(vec![first, below]), area);
    let x = area.x.saturating_add(u16::try_from(cursor).unwrap_or(u16::MAX));
    if x < area.right() && area.height > 0 {
        frame.set_cursor_position(Position::new(x, area.y));
    }
}
