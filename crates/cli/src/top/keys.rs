//! Which key means what, outside the prompt.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::edit::Field;

/// Keys and what they do, for the help and the documentation.
pub const HELP: [(&str, &str); 9] = [
    ("q, Esc, Ctrl-C", "quit; q and Esc first close what is open"),
    ("Up/Down, k/j", "select a VM; scroll where text is open"),
    ("Home/End, g/G", "first and last VM"),
    ("s", "change the shares of the selected VM"),
    ("m", "change its min (guaranteed memory)"),
    ("x", "change its max (limit)"),
    ("t", "change its tax on idle memory"),
    ("w", "why it has the memory it has"),
    ("?, h", "this help"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// Leave at once, whatever is open.
    Quit,
    /// Close what is open, else leave.
    Back,
    Up,
    Down,
    First,
    Last,
    Edit(Field),
    Why,
    Help,
}

/// None: the key means nothing.
pub fn meaning(key: KeyEvent) -> Option<Key> {
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return (key.code == KeyCode::Char('c')).then_some(Key::Quit);
    }
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => Some(Key::Back),
        KeyCode::Up | KeyCode::Char('k') => Some(Key::Up),
        KeyCode::Down | KeyCode::Char('j') => Some(Key::Down),
        KeyCode::Home | KeyCode::Char('g') => Some(Key::First),
        KeyCode::End | KeyCode::Char('G') => Some(Key::Last),
        KeyCode::Char('s') => Some(Key::Edit(Field::Shares)),
        KeyCode::Char('m') => Some(Key::Edit(Field::Min)),
        KeyCode::Char('x') => Some(Key::Edit(Field::Max)),
        KeyCode::Char('t') => Some(Key::Edit(Field::Tax)),
        KeyCode::Char('w') => Some(Key::Why),
        KeyCode::Char('?' | 'h') => Some(Key::Help),
        _ => None,
    }
}
