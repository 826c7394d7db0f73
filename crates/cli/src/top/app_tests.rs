use ballast_api::{VmChange, VmView};
use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::app::{Action, App, Event, Overlay};
use super::samples::{host, seen, vm, why};

fn key(code: KeyCode) -> Event {
    Event::Key(KeyEvent::new(code, KeyModifiers::NONE))
}

fn press(app: &mut App, keys: &str) -> Vec<Action> {
    keys.chars()
        .flat_map(|c| match c {
            '\n' => app.update(key(KeyCode::Enter)),
            c => app.update(key(KeyCode::Char(c))),
        })
        .collect()
}

fn app() -> App {
    let mut app = App::default();
    app.update(seen(1.0, host(), vec![vm("web"), vm("db"), vm("idle")]));
    app
}

fn none() -> VmChange {
    VmChange::default()
}

/// What ballastd says to a change of the VM "web".
fn answered(change: VmChange, answer: Result<Box<VmView>, String>) -> Event {
    Event::Changed { vm: "web".to_owned(), change, answer }
}

fn change(vm: &str, change: VmChange) -> Vec<Action> {
    vec![Action::Change { vm: vm.to_owned(), change }]
}

#[test]
fn each_edit_key_sends_the_change_of_its_field_for_the_selected_vm() {
    let none = VmChange::default;
    for (keys, expected) in [
        ("s5000\n", VmChange { shares: Some(5000), ..none() }),
        ("m32M\n", VmChange { min: Some(32 << 20), ..none() }),
        ("x192M\n", VmChange { max: Some(192 << 20), ..none() }),
        ("t0.5\n", VmChange { tax: Some(0.5), ..none() }),
    ] {
        let mut app = app();
        press(&mut app, "j");
        assert_eq!(press(&mut app, keys), change("db", expected), "{keys}");
    }
}

#[test]
fn bad_input_is_not_sent_and_says_why() {
    let mut app = app();
    assert_eq!(press(&mut app, "m12Q\n"), []);
    let Overlay::Edit(edit) = &app.overlay else { panic!("the prompt has closed") };
    assert!(edit.error.as_deref().unwrap().contains("'12Q' is not a size"));
    app.update(key(KeyCode::Backspace));
    assert_eq!(
        press(&mut app, "M\n"),
        change("web", VmChange { min: Some(12 << 20), ..Default::default() })
    );
}

#[test]
fn the_managers_refusal_stays_in_the_prompt_and_its_consent_closes_it() {
    let mut app = app();
    press(&mut app, "s666\n");
    // A second Enter while the first is under way sends nothing.
    assert_eq!(press(&mut app, "\n"), []);
    app.update(answered(VmChange { shares: Some(666), ..none() }, Err("shares: no".to_owned())));
    let Overlay::Edit(edit) = &app.overlay else { panic!("the prompt has closed") };
    assert_eq!((edit.error.as_deref(), &edit.sent), (Some("shares: no"), &None));
    press(&mut app, "7\n");
    let mut changed = vm("web");
    changed.params.shares = 6667;
    app.update(answered(VmChange { shares: Some(6667), ..none() }, Ok(Box::new(changed))));
    assert!(matches!(app.overlay, Overlay::None));
    assert_eq!(app.note.as_deref(), Some("web: shares is now 6667"));
    assert_eq!(app.rows[0].view.params.shares, 6667);
}

#[test]
fn what_comes_after_its_prompt_was_left_closes_no_other() {
    let mut app = app();
    press(&mut app, "s5000\n");
    app.update(key(KeyCode::Esc));
    press(&mut app, "m64M\n");
    let mut first = vm("web");
    first.params.shares = 5000;
    app.update(answered(VmChange { shares: Some(5000), ..none() }, Ok(Box::new(first))));
    assert_eq!(app.rows[0].view.params.shares, 5000);
    let min = VmChange { min: Some(64 << 20), ..none() };
    let Overlay::Edit(edit) = &app.overlay else { panic!("the prompt has closed") };
    assert_eq!((&edit.error, &edit.sent), (&None, &Some(min.clone())));
    app.update(answered(min, Err("min: no".to_owned())));
    let Overlay::Edit(edit) = &app.overlay else { panic!("the prompt has closed") };
    assert_eq!(edit.error.as_deref(), Some("min: no"));
}

#[test]
fn the_prompt_of_a_vm_that_vanished_closes() {
    let mut app = app();
    press(&mut app, "s12");
    app.update(seen(2.0, host(), vec![vm("db")]));
    assert!(matches!(app.overlay, Overlay::None));
    assert_eq!(app.note.as_deref(), Some("web is gone"));
}

#[test]
fn the_selection_follows_the_vm_not_the_row() {
    let mut app = app();
    press(&mut app, "j");
    app.update(seen(2.0, host(), vec![vm("new"), vm("web"), vm("db")]));
    assert_eq!(app.selected().unwrap().view.name, "db");
    app.update(seen(3.0, host(), vec![vm("web")]));
    assert_eq!(app.selected().unwrap().view.name, "web");
    app.update(seen(4.0, host(), vec![]));
    assert!(app.selected().is_none());
    assert_eq!(press(&mut app, "jkGgsw"), []);
    app.update(seen(5.0, host(), vec![vm("web"), vm("db")]));
    press(&mut app, "jjjj");
    assert_eq!(app.selected().unwrap().view.name, "db");
}

#[test]
fn a_manager_that_vanishes_is_waited_for_with_what_was_seen() {
    let mut app = app();
    app.update(Event::Away { at: 13.0, reason: "no ballastd".to_owned() });
    assert_eq!(app.away.as_ref().unwrap().for_s, 12.0);
    assert_eq!(app.rows.len(), 3);
    app.update(seen(14.0, host(), vec![vm("web")]));
    assert!(app.away.is_none());
}

#[test]
fn why_is_asked_once_at_a_time_and_kept_for_the_selected_vm_only() {
    let mut app = App::default();
    let ask = |vm: &str| vec![Action::AskWhy { vm: vm.to_owned() }];
    let explained = |vm: &str| Event::Explained { vm: vm.to_owned(), answer: Ok(why(vm)) };
    assert_eq!(app.update(seen(1.0, host(), vec![vm("web"), vm("db")])), ask("web"));
    assert_eq!(app.update(seen(2.0, host(), vec![vm("web"), vm("db")])), []);
    press(&mut app, "j");
    // The answer about web comes too late: ask about db.
    assert_eq!(app.update(explained("web")), ask("db"));
    assert!(app.selected_why().is_none());
    assert_eq!(app.update(explained("db")), []);
    assert_eq!(app.selected_why().unwrap().as_ref().unwrap().vm, "db");
    press(&mut app, "k");
    assert!(app.selected_why().is_none());
}

#[test]
fn rates_come_from_two_looks_at_one_process() {
    let mut app = app();
    let (mut later, mut restarted) = (vm("web"), vm("db"));
    later.counters.faults += 500;
    restarted.counters.faults += 500;
    restarted.pid = Some(1);
    app.update(seen(3.0, host(), vec![later, restarted]));
    assert_eq!(app.rows[0].rates.faults, Some(250.0));
    assert_eq!(app.rows[1].rates.faults, None);
    assert_eq!(app.rows[0].history.last(9, |s| s.consumed).len(), 2);
    assert_eq!(app.rows[1].history.last(9, |s| s.consumed).len(), 1);
}

#[test]
fn leaving_keys_close_what_is_open_before_they_quit() {
    let mut app = app();
    for open in ["w", "?", "s"] {
        press(&mut app, open);
        assert_eq!(app.update(key(KeyCode::Esc)), [], "{open}");
        assert!(matches!(app.overlay, Overlay::None), "{open}");
    }
    // In the prompt, q is text.
    press(&mut app, "sq");
    assert!(matches!(&app.overlay, Overlay::Edit(e) if e.text == "q"));
    let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(app.update(Event::Key(control_c)), [Action::Quit]);
    app.update(key(KeyCode::Esc));
    assert_eq!(press(&mut app, "q"), [Action::Quit]);
}
