//! The screen by its content, at several sizes, in colour and without.

use ballast_api::{ActiveView, Management, Mode, RunState, StateName, VmView};
use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::Color;

use super::app::{App, Event};
use super::draw;
use super::palette::Palette;
use super::samples::{host, seen, vm, why};

fn render(app: &App, width: u16, height: u16, color: bool) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw::screen(frame, app, Palette::new(color))).unwrap();
    terminal
}

fn text(app: &App, width: u16, height: u16) -> String {
    let terminal = render(app, width, height, true);
    let buffer = terminal.backend().buffer();
    let rows = buffer.content().chunks(usize::from(width.max(1)));
    rows.map(|row| row.iter().map(|c| c.symbol()).collect::<String>() + "\n").collect()
}

fn press(app: &mut App, keys: &str) {
    for c in keys.chars() {
        let code = if c == '\n' { KeyCode::Enter } else { KeyCode::Char(c) };
        app.update(Event::Key(KeyEvent::new(code, KeyModifiers::NONE)));
    }
}

fn app(state: StateName) -> App {
    let mut app = App::default();
    let mut h = host();
    h.state = state;
    app.update(seen(1.0, h.clone(), vec![vm("web"), vm("db"), vm("idle")]));
    app.update(Event::Explained { vm: "web".to_owned(), answer: Ok(why("web")) });
    h.counters.faults = 1200;
    h.counters.swapped_in = 3_000_000;
    app.update(seen(2.0, h, vec![vm("web"), vm("db"), vm("idle")]));
    app
}

#[test]
fn the_state_the_vms_and_the_numbers_are_on_small_and_large_screens() {
    for (state, name) in [
        (StateName::High, "HIGH"),
        (StateName::Soft, "SOFT"),
        (StateName::Hard, "HARD"),
        (StateName::Low, "LOW"),
    ] {
        for (width, height) in [(80, 24), (200, 50)] {
            let screen = text(&app(state), width, height);
            for expected in [
                name,
                "web",
                "db",
                "idle",
                "overcommit 2.00",
                "used 280M free 104M of 384M",
                "H high ≥23M",
                "L low <3.8M",
                "swap in 3.0",
                "faults 1.2k",
                " ballast ",
                "up 3m12s",
                "resident 128M",
                "swapped 64M",
                "96M, the largest of slow 90M",
                "healthy, asked 64M",
                "shared 120M common 20M saved 100M zero 50M  broken 3M 12/s  scan 41 MB/s 3.2%",
                "own: shared 40M saved 33M broken 1M 4/s  scan 12 MB/s 1.1%",
                "available 80M",
                "target 160 MiB, 32 MiB more than consumed",
                "2560",
                "0.75",
                "? help",
            ] {
                assert!(screen.contains(expected), "{expected} at {width}x{height}:\n{screen}");
            }
            // What the last VM that was started runs on says nothing of the others.
            assert!(!screen.contains("no stock kernel boots"), "{screen}");
            assert!(screen.contains('◆') && screen.contains('┃') && screen.contains('▓'));
        }
    }
}

#[test]
fn columns_of_sharing_come_with_the_room_for_them() {
    let heading = |width| {
        let screen = text(&app(StateName::High), width, 30);
        let lines: Vec<&str> = screen.lines().collect();
        let at = lines.iter().position(|l| l.contains("MEMORY")).unwrap();
        (lines[at].to_owned(), lines[at + 1].to_owned())
    };
    assert!(!heading(80).0.contains("SHARED") && heading(80).0.contains("WT/BL"));
    assert!(heading(96).0.contains("SHARED SAVED  ZERO") && !heading(96).0.contains("BRK/s"));
    let (heading, web) = heading(104);
    assert!(heading.ends_with("WT/BL SHARED SAVED  ZERO BRK/s│"), "{heading}");
    assert!(web.ends_with("   40M   33M     0     4│"), "{web}");
}

#[test]
fn a_vm_that_shares_nothing_keeps_its_history_on_a_small_screen() {
    let quiet = |name| VmView { sharing: Default::default(), ..vm(name) };
    let mut app = App::default();
    app.update(seen(1.0, host(), vec![quiet("web"), quiet("db"), quiet("idle")]));
    let screen = text(&app, 80, 24);
    assert!(!screen.contains("sharing ") && screen.contains("used "), "{screen}");
    assert!(text(&app, 80, 40).contains("none, since it is not paged"));
}

#[test]
fn no_size_of_screen_panics_in_any_mode() {
    let mut many = App::default();
    many.update(seen(1.0, host(), (0..100).map(|i| vm(&format!("vm{i}"))).collect()));
    press(&mut many, "G");
    let mut editing = app(StateName::Low);
    press(&mut editing, "m12Q\n");
    let mut asking = app(StateName::Low);
    press(&mut asking, "w");
    let mut helped = app(StateName::Low);
    press(&mut helped, "?");
    for app in [&App::default(), &many, &editing, &asking, &helped] {
        for width in (0..=10).chain([20, 39, 40, 41, 60, 71, 72, 79, 80, 129, 132, 200]) {
            for height in (0..=18).chain([22, 23, 24, 50]) {
                render(app, width, height, true);
            }
        }
    }
    let tiny = text(&app(StateName::Soft), 10, 3);
    assert!(tiny.contains("SOFT") && tiny.contains("web"), "{tiny}");
}

#[test]
fn without_colour_there_is_none_and_nothing_is_lost() {
    let app = app(StateName::Low);
    let terminal = render(&app, 80, 24, false);
    for cell in terminal.backend().buffer().content() {
        assert_eq!((cell.fg, cell.bg), (Color::Reset, Color::Reset), "{cell:?}");
    }
    let symbols = |t: &Terminal<TestBackend>| -> String {
        t.backend().buffer().content().iter().map(|c| c.symbol()).collect()
    };
    assert_eq!(symbols(&terminal), symbols(&render(&app, 80, 24, true)));
}

#[test]
fn the_selected_vm_stays_on_the_screen() {
    let mut app = App::default();
    app.update(seen(1.0, host(), (0..100).map(|i| vm(&format!("vm{i}"))).collect()));
    press(&mut app, "G");
    assert!(text(&app, 80, 24).contains(">vm99"));
    press(&mut app, "g");
    assert!(text(&app, 80, 24).contains(">vm0 "));
}

#[test]
fn the_prompt_shows_the_value_the_text_and_the_error() {
    let mut app = app(StateName::High);
    press(&mut app, "jm12Q\n");
    let screen = text(&app, 80, 24);
    assert!(screen.contains("min of db (now 64 MiB, as in 64M): 12Q"), "{screen}");
    assert!(screen.contains("'12Q' is not a size"), "{screen}");
}

#[test]
fn an_absent_manager_is_announced_over_what_was_seen_last() {
    let mut app = app(StateName::High);
    app.update(Event::Away { at: 14.0, reason: "no ballastd at /run/x".to_owned() });
    for (width, height) in [(80, 24), (200, 50), (30, 8)] {
        let screen = text(&app, width, height);
        assert!(screen.contains("ballastd is away, retrying"), "{screen}");
        assert!(screen.contains("web"), "{screen}");
    }
    assert!(text(&app, 200, 50).contains("last answer 12s ago): no ballastd at /run/x"));
}

#[test]
fn the_why_pane_shows_the_steps_and_scrolls_to_the_last() {
    let mut app = App::default();
    app.update(seen(1.0, host(), vec![vm("web")]));
    let mut answer = why("web");
    answer.steps = (1..=60).map(|i| format!("this is step {i}")).collect();
    app.update(Event::Explained { vm: "web".to_owned(), answer: Ok(answer) });
    press(&mut app, "w");
    let screen = text(&app, 80, 24);
    assert!(screen.contains("why web has") && screen.contains("because: period"), "{screen}");
    assert!(screen.contains("1. this is step 1") && !screen.contains("step 60"), "{screen}");
    press(&mut app, "G");
    let screen = text(&app, 80, 24);
    assert!(screen.contains("60. this is step 60"), "{screen}");
}

#[test]
fn vms_that_are_not_paged_or_not_running_say_so() {
    let unpaged = VmView {
        management: Management {
            mode: Mode::BalloonOnly,
            reason: Some("private RAM: start it with share=on".to_owned()),
        },
        guest: None,
        active: ActiveView { estimate: 256 << 20, periods: 0, ..vm("old").active },
        ..vm("old")
    };
    let stopping = VmView { state: RunState::Stopping, pid: None, ..vm("gone") };
    let mut app = App::default();
    app.update(seen(1.0, host(), vec![unpaged, stopping]));
    let screen = text(&app, 80, 24);
    for expected in [
        "balloon-only",
        "private RAM: start it",
        "sends no statistics",
        "(stopping",
        "active   - (0 periods)",
    ] {
        assert!(screen.contains(expected), "{expected}:\n{screen}");
    }
}
