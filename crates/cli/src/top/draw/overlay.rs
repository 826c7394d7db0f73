//! What opens over the view: the reasons of a decision, and the help.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Clear, Paragraph};

use super::{panel, text};
use crate::failure::one_line;
use crate::figures::age;
use crate::top::app::{App, Overlay};
use crate::top::keys;
use crate::top::palette::Palette;

const WIDEST: u16 = 110;

pub fn draw(frame: &mut Frame, area: Rect, app: &App, palette: Palette) {
    let width = area.width.saturating_sub(4).min(WIDEST);
    let text_width = usize::from(width.saturating_sub(4));
    match &app.overlay {
        Overlay::None | Overlay::Edit(_) => {}
        Overlay::Why(top) => {
            let title = app.selected().map_or("", |row| row.view.name.as_str());
            let title = format!(" why {title} has what it has ");
            window(frame, area, width, &title, why(app, text_width), *top, app, palette);
        }
        Overlay::Help(top) => {
            window(frame, area, width, " help ", help(text_width), *top, app, palette);
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "one caller per kind of window, all of them above")]
fn window(
    frame: &mut Frame,
    area: Rect,
    width: u16,
    title: &str,
    lines: Vec<String>,
    top: u16,
    app: &App,
    palette: Palette,
) {
    let count = u16::try_from(lines.len()).unwrap_or(u16::MAX);
    let height = count.saturating_add(2).min(area.height.saturating_sub(2));
    let place = Rect {
        x: area.x + area.width.saturating_sub(width) / 2,
        y: area.y + area.height.saturating_sub(height) / 2,
        width,
        height,
    };
    let limit = count.saturating_sub(height.saturating_sub(2));
    app.scroll_limit.set(limit);
    let more = if limit > 0 { " ↑↓ scroll, Esc closes " } else { " Esc closes " };
    let block = panel(vec![Span::styled(title.to_owned(), palette.strong())])
        .title_bottom(Line::from(more));
    let inner = block.inner(place);
    let lines: Vec<Line> = lines.into_iter().map(|l| Line::from(format!(" {l}"))).collect();
    frame.render_widget(Clear, place);
    frame.render_widget(block, place);
    frame.render_widget(Paragraph::new(lines).scroll((top.min(limit), 0)), inner);
}

fn why(app: &App, width: usize) -> Vec<String> {
    let why = match app.selected_why() {
        Some(Ok(why)) => why,
        Some(Err(message)) => return text::wrap(message, width, ""),
        None => return vec!["asking ballastd...".to_owned()],
    };
    let mut lines = text::wrap(&one_line(&why.verdict), width, "");
    let cause = format!("decided {} ago, because: {}", age(why.age_s), one_line(&why.trigger));
    lines.extend(text::wrap(&cause, width, ""));
    lines.push(String::new());
    for (i, step) in why.steps.iter().enumerate() {
        lines.extend(text::wrap(&format!("{}. {}", i + 1, one_line(step)), width, "   "));
    }
    for outcome in &why.outcomes {
        lines.extend(text::wrap(&format!("-> {}", one_line(outcome)), width, "   "));
    }
    lines
}

fn help(width: usize) -> Vec<String> {
    let mut lines: Vec<String> =
        keys::HELP.iter().map(|(key, what)| format!("{key:<17}{what}")).collect();
    lines.push(String::new());
    for note in [
        "Budget bar: machine memory by VM, overhead, free. S soft, D hard, L low: the state begins \
         where the used part reaches the mark. H high: below it, the host is back in high.",
        "A VM's bar: █ resident, ▒ compressed, ▓ swapped, ░ ballooned, · untouched, of its size. \
         ┃ is its target, ◆ its active memory.",
        "USED, TGT, ACT, MIN, MAX in bytes (K, M, G: powers of 1,024). WT/BL: allocations per \
         second that waited for memory, and that were blocked because the VM is above its target.",
        "SHARED: backed by common pages. SAVED: that, less the VM's part of the common pages. ZERO: \
         zero pages dropped so far. BRK/s: shared pages written per second. The cost of scanning is \
         in per cent of one core.",
    ] {
        lines.extend(text::wrap(note, width, "  "));
    }
    lines
}
