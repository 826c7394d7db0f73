//! The state of the live view, and how events change it. No I/O, no clock, no terminal.

use std::cell::Cell;
use std::collections::HashMap;

use ballast_api::{HostView, VmChange, VmView, Why};
use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::edit::{Edit, Field};
use super::history::{History, Sample};
use super::keys::{self, Key};
use super::rates::Rates;
use super::source::Snapshot;

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// A look that succeeded.
    Seen(Box<Snapshot>),
    /// A look that did not, at `at` seconds since the start.
    Away {
        at: f64,
        reason: String,
    },
    /// The answer to [`Action::Change`].
    Changed {
        vm: String,
        change: VmChange,
        answer: Result<Box<VmView>, String>,
    },
    /// The answer to [`Action::AskWhy`].
    Explained {
        vm: String,
        answer: Result<Why, String>,
    },
    Key(KeyEvent),
    /// The terminal has another size: draw again.
    Resized,
}

/// What the shell has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    Quit,
    Change { vm: String, change: VmChange },
    AskWhy { vm: String },
}

/// What lies over, or instead of, the plain view.
#[derive(Debug, Default)]
pub enum Overlay {
    #[default]
    None,
    Edit(Edit),
    /// First line shown.
    Why(u16),
    Help(u16),
}

/// One VM, with what was derived from earlier looks.
#[derive(Debug)]
pub struct VmRow {
    pub view: VmView,
    pub rates: Rates,
    pub history: History,
}

/// The manager did not answer.
#[derive(Debug)]
pub struct Away {
    pub reason: String,
    /// Seconds since it last did.
    pub for_s: f64,
}

#[derive(Debug, Default)]
pub struct App {
    pub host: Option<HostView>,
    pub host_rates: Rates,
    pub rows: Vec<VmRow>,
    pub selected: usize,
    pub overlay: Overlay,
    pub away: Option<Away>,
    /// The answer for the selected VM; an older one stays until the next comes.
    pub why: Option<(String, Result<Why, String>)>,
    /// What the last change brought, until the next key.
    pub note: Option<String>,
    /// The last line to which the open text can be scrolled, as found when it was drawn.
    pub scroll_limit: Cell<u16>,
    seen_at: f64,
    why_asked: bool,
}

impl App {
    pub fn update(&mut self, event: Event) -> Vec<Action> {
        match event {
            Event::Seen(snapshot) => self.seen(*snapshot),
            Event::Away { at, reason } => {
                self.away = Some(Away { reason, for_s: (at - self.seen_at).max(0.0) });
                Vec::new()
            }
            Event::Changed { vm, change, answer } => {
                self.changed(&vm, &change, answer);
                Vec::new()
            }
            Event::Explained { vm, answer } => {
                self.why_asked = false;
                if self.selected().is_some_and(|row| row.view.name == vm) {
                    self.why = Some((vm, answer));
                    Vec::new()
                } else {
                    self.ask_why()
                }
            }
            Event::Key(key) if key.kind != KeyEventKind::Release => self.key(key),
            Event::Key(_) | Event::Resized => Vec::new(),
        }
    }

    pub fn selected(&self) -> Option<&VmRow> {
        self.rows.get(self.selected)
    }

    /// The answer to "why", if it is about the selected VM.
    pub fn selected_why(&self) -> Option<&Result<Why, String>> {
        let name = &self.selected()?.view.name;
        self.why.as_ref().filter(|(vm, _)| vm == name).map(|(_, answer)| answer)
    }

    fn seen(&mut self, snapshot: Snapshot) -> Vec<Action> {
        let seconds = snapshot.at - self.seen_at;
        self.host_rates = match &self.host {
            Some(before) if before.pid == snapshot.host.pid => {
                Rates::between((&before.counters).into(), (&snapshot.host.counters).into(), seconds)
            }
            _ => Rates::default(),
        };
        let name = self.selected().map(|row| row.view.name.clone());
        let mut old: HashMap<String, VmRow> =
            self.rows.drain(..).map(|row| (row.view.name.clone(), row)).collect();
        self.rows = snapshot
            .vms
            .into_iter()
            .map(|view| VmRow::next(old.remove(&view.name), view, seconds))
            .collect();
        let same = name.and_then(|n| self.rows.iter().position(|row| row.view.name == n));
        self.selected = same.unwrap_or(self.selected).min(self.rows.len().saturating_sub(1));
        self.host = Some(snapshot.host);
        self.seen_at = snapshot.at;
        if self.away.take().is_some() {
            // An answer that was under way when the manager vanished will not come.
            self.why_asked = false;
        }
        self.close_prompt_of_the_gone();
        self.ask_why()
    }

    fn close_prompt_of_the_gone(&mut self) {
        if let Overlay::Edit(edit) = &self.overlay
            && !self.rows.iter().any(|row| row.view.name == edit.vm)
        {
            self.note = Some(format!("{} is gone", edit.vm));
            self.overlay = Overlay::None;
        }
    }

    fn ask_why(&mut self) -> Vec<Action> {
        match self.selected() {
            Some(row) if !self.why_asked => {
                let vm = row.view.name.clone();
                self.why_asked = true;
                vec![Action::AskWhy { vm }]
            }
            _ => Vec::new(),
        }
    }

    fn changed(&mut self, vm: &str, change: &VmChange, answer: Result<Box<VmView>, String>) {
        // Not that to a prompt that was left before its answer came.
        let mine = matches!(&self.overlay, Overlay::Edit(e) if e.vm == vm && e.sent.as_ref() == Some(change));
        match answer {
            Ok(view) => {
                if let (Overlay::Edit(edit), true) = (&self.overlay, mine) {
                    let value = edit.field.current(&view.params);
                    self.note = Some(format!("{vm}: {} is now {value}", edit.field.name()));
                    self.overlay = Overlay::None;
                }
                if let Some(row) = self.rows.iter_mut().find(|row| row.view.name == vm) {
                    row.view.params = view.params;
                }
            }
            Err(message) => match &mut self.overlay {
                Overlay::Edit(edit) if mine => {
                    edit.sent = None;
                    edit.error = Some(message);
                }
                _ => self.note = Some(format!("{vm}: {message}")),
            },
        }
    }

    fn key(&mut self, key: KeyEvent) -> Vec<Action> {
        self.note = None;
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && key.code == KeyCode::Char('c') {
            return vec![Action::Quit];
        }
        if matches!(self.overlay, Overlay::Edit(_)) {
            return self.prompt_key(key, control);
        }
        let Some(meaning) = keys::meaning(key) else { return Vec::new() };
        match (&mut self.overlay, meaning) {
            (_, Key::Quit) | (Overlay::None, Key::Back) => return vec![Action::Quit],
            (Overlay::Why(top) | Overlay::Help(top), Key::Up) => *top = top.saturating_sub(1),
            (Overlay::Why(top) | Overlay::Help(top), Key::Down) => {
                *top = top.saturating_add(1).min(self.scroll_limit.get());
            }
            (Overlay::Why(top) | Overlay::Help(top), Key::First) => *top = 0,
            (Overlay::Why(top) | Overlay::Help(top), Key::Last) => *top = self.scroll_limit.get(),
            (Overlay::Why(_), Key::Back | Key::Why) | (Overlay::Help(_), Key::Back | Key::Help) => {
                self.overlay = Overlay::None;
            }
            (Overlay::None, Key::Up) => return self.select(self.selected.saturating_sub(1)),
            (Overlay::None, Key::Down) => return self.select(self.selected.saturating_add(1)),
            (Overlay::None, Key::First) => return self.select(0),
            (Overlay::None, Key::Last) => return self.select(usize::MAX),
            (_, Key::Edit(field)) => self.open_prompt(field),
            (_, Key::Why) if !self.rows.is_empty() => self.overlay = Overlay::Why(0),
            (_, Key::Help) => self.overlay = Overlay::Help(0),
            _ => {}
        }
        Vec::new()
    }

    fn select(&mut self, index: usize) -> Vec<Action> {
        let index = index.min(self.rows.len().saturating_sub(1));
        if index == self.selected {
            return Vec::new();
        }
        self.selected = index;
        self.ask_why()
    }

    fn open_prompt(&mut self, field: Field) {
        match self.selected() {
            Some(row) => {
                self.overlay = Overlay::Edit(Edit::new(row.view.name.clone(), field));
            }
            None => self.note = Some("no VM to change".to_owned()),
        }
    }

    fn prompt_key(&mut self, key: KeyEvent, control: bool) -> Vec<Action> {
        let Overlay::Edit(edit) = &mut self.overlay else { return Vec::new() };
        match key.code {
            KeyCode::Esc => self.overlay = Overlay::None,
            _ if edit.sent.is_some() => {}
            KeyCode::Char('u') if control => edit.clear(),
            KeyCode::Char(c) if !control => edit.type_char(c),
            KeyCode::Backspace => edit.backspace(),
            KeyCode::Enter if edit.text.trim().is_empty() => self.overlay = Overlay::None,
            KeyCode::Enter => {
                let row = self.rows.iter().find(|row| row.view.name == edit.vm);
                let Some(row) = row else { return Vec::new() };
                match edit.change(&row.view.params) {
                    Ok(change) => {
                        edit.sent = Some(change.clone());
                        edit.error = None;
                        return vec![Action::Change { vm: edit.vm.clone(), change }];
                    }
                    Err(message) => edit.error = Some(message),
                }
            }
            _ => {}
        }
        Vec::new()
    }
}

impl VmRow {
    fn next(before: Option<VmRow>, view: VmView, seconds: f64) -> VmRow {
        let (rates, mut history) = match before {
            Some(row) if row.view.pid == view.pid => {
                let totals = (&row.view.counters).into();
                (Rates::between(totals, (&view.counters).into(), seconds), row.history)
            }
            _ => (Rates::default(), History::default()),
        };
        history.push(Sample::of(&view));
        VmRow { view, rates, history }
    }
}
