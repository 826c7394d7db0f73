//! Colours, and what stands for them where NO_COLOR is set (<https://no-color.org>). Every colour
//! doubles a text or a glyph, so nothing is lost without it.

use ballast_api::{BalloonHealth, StateName};
use ratatui::style::{Color, Modifier, Style};

#[derive(Clone, Copy, Debug)]
pub struct Palette {
    color: bool,
}

/// Parts of the budget bar, told apart from their neighbours.
const PARTS: [Color; 6] =
    [Color::Cyan, Color::Blue, Color::Magenta, Color::LightBlue, Color::LightCyan, Color::Gray];

impl Palette {
    pub const fn new(color: bool) -> Palette {
        Palette { color }
    }

    /// In colour unless NO_COLOR is set and not empty.
    pub fn from_env() -> Palette {
        Palette::new(std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()))
    }

    fn fg(self, color: Color) -> Style {
        if self.color { Style::new().fg(color) } else { Style::new() }
    }

    pub fn state(self, state: StateName) -> Style {
        let style = match state {
            StateName::High => self.fg(Color::Green),
            StateName::Soft => self.fg(Color::Yellow),
            StateName::Hard => self.fg(Color::LightRed),
            StateName::Low => self.fg(Color::Red).add_modifier(Modifier::REVERSED),
        };
        style.add_modifier(Modifier::BOLD)
    }

    pub fn health(self, health: BalloonHealth) -> Style {
        match health {
            BalloonHealth::Healthy => self.fg(Color::Green),
            BalloonHealth::Slow => self.fg(Color::Yellow),
            BalloonHealth::Stuck => self.fg(Color::Red),
            BalloonHealth::Missing => self.quiet(),
        }
    }

    /// The `index`-th VM's part of the budget bar.
    pub fn part(self, index: usize) -> Style {
        if self.color {
            let background = PARTS.get(index % PARTS.len()).copied().unwrap_or(Color::Cyan);
            Style::new().fg(Color::Black).bg(background)
        } else {
            Style::new().add_modifier(Modifier::REVERSED)
        }
    }

    pub fn overhead(self) -> Style {
        if self.color { Style::new().fg(Color::White).bg(Color::DarkGray) } else { self.part(0) }
    }

    pub fn resident(self) -> Style {
        self.fg(Color::Cyan)
    }
    pub fn compressed(self) -> Style {
        self.fg(Color::Magenta)
    }
    pub fn swapped(self) -> Style {
        self.fg(Color::LightRed)
    }
    pub fn ballooned(self) -> Style {
        self.fg(Color::Blue)
    }
    pub fn target(self) -> Style {
        self.fg(Color::Yellow).add_modifier(Modifier::BOLD)
    }
    pub fn active(self) -> Style {
        self.fg(Color::Green).add_modifier(Modifier::BOLD)
    }
    pub fn error(self) -> Style {
        self.fg(Color::Red).add_modifier(Modifier::BOLD)
    }
    /// Secondary text. Without colour it stays plain: DIM is hard to read on many terminals.
    pub fn quiet(self) -> Style {
        self.fg(Color::DarkGray)
    }
    pub fn strong(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }
    pub fn selected(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }
}
