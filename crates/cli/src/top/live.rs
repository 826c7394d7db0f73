//! The shell of the live view: terminal, keys, signals, looks and requests, around the pure [`App`].

use std::io;
use std::time::{Duration, Instant};

use ballast_api::client::{Client, ClientError};
use crossterm::event::Event as Input;
use ratatui::DefaultTerminal;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::time::MissedTickBehavior;

use super::app::{Action, App, Event};
use super::draw;
use super::palette::Palette;
use super::source::look;
use crate::failure::{Failure, manager_message};

/// Events that may wait to be drawn; senders wait beyond.
const QUEUE: usize = 64;
/// How long a change may take; admission may have to reclaim first.
const CHANGE_PATIENCE: Duration = Duration::from_secs(60);

type Message = Result<Event, io::Error>;

pub async fn run(client: Client, interval: Duration) -> Result<(), Failure> {
    let start = Instant::now();
    let mut app = App::default();
    let first = app.update(Event::Seen(Box::new(look(&client, start).await?)));
    let (sender, mut events) = mpsc::channel(QUEUE);
    let mut signals = Signals::new().map_err(Failure::terminal)?;
    // Installs a panic hook that restores the terminal, too.
    let mut terminal = ratatui::try_init().map_err(Failure::terminal)?;
    let _restore = Restore;
    read_keys(sender.clone());
    tokio::spawn(keep_looking(client.clone(), start, interval, sender.clone()));
    let shell = Shell { client, sender };
    shell.act(first);
    let ended = shell.serve(&mut terminal, &mut app, &mut events, &mut signals).await;
    ended.map_err(Failure::terminal)
}

/// Gives the terminal back however `run` ends.
struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        // On a panic the hook has done it, before the message; once more would put the cursor on
        // top of that message.
        if !std::thread::panicking() {
            ratatui::restore();
        }
    }
}

struct Shell {
    client: Client,
    sender: Sender<Message>,
}

impl Shell {
    async fn serve(
        &self,
        terminal: &mut DefaultTerminal,
        app: &mut App,
        events: &mut Receiver<Message>,
        signals: &mut Signals,
    ) -> io::Result<()> {
        let palette = Palette::from_env();
        loop {
            terminal.draw(|frame| draw::screen(frame, app, palette))?;
            let mut message = tokio::select! {
                message = events.recv() => message,
                () = signals.any() => return Ok(()),
            };
            // All that is there already, before the next drawing.
            while let Some(event) = message {
                if self.act(app.update(event?)) {
                    return Ok(());
                }
                message = events.try_recv().ok();
            }
        }
    }

    /// Starts what the view asked for; true if that is to end.
    fn act(&self, actions: Vec<Action>) -> bool {
        let mut quit = false;
        for action in actions {
            let (client, sender) = (self.client.clone(), self.sender.clone());
            match action {
                Action::Quit => quit = true,
                Action::Change { vm, change } => {
                    tokio::spawn(async move {
                        let client = client.with_timeout(CHANGE_PATIENCE);
                        let answer = client.change(&vm, &change).await;
                        let answer = answer.map(Box::new).map_err(reason);
                        let _ = sender.send(Ok(Event::Changed { vm, change, answer })).await;
                    });
                }
                Action::AskWhy { vm } => {
                    tokio::spawn(async move {
                        let answer = client.why(&vm).await.map_err(reason);
                        let _ = sender.send(Ok(Event::Explained { vm, answer })).await;
                    });
                }
            }
        }
        quit
    }
}

fn reason(e: ClientError) -> String {
    manager_message(&e)
}

async fn keep_looking(client: Client, start: Instant, interval: Duration, to: Sender<Message>) {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    loop {
        ticks.tick().await;
        let event = match look(&client, start).await {
            Ok(snapshot) => Event::Seen(Box::new(snapshot)),
            Err(e) => Event::Away { at: start.elapsed().as_secs_f64(), reason: reason(e) },
        };
        if to.send(Ok(event)).await.is_err() {
            return;
        }
    }
}

/// Reading the terminal blocks, so it has a thread, which the end of the process ends.
fn read_keys(to: Sender<Message>) {
    std::thread::spawn(move || {
        loop {
            let message = match crossterm::event::read() {
                Ok(Input::Key(key)) => Ok(Event::Key(key)),
                Ok(Input::Resize(..)) => Ok(Event::Resized),
                Ok(_) => continue,
                Err(e) => Err(e),
            };
            let failed = message.is_err();
            if to.blocking_send(message).is_err() || failed {
                return;
            }
        }
    });
}

/// The signals that ask for an orderly end.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    quit: Signal,
}

impl Signals {
    fn new() -> io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
            quit: signal(SignalKind::quit())?,
        })
    }

    async fn any(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.hang_up.recv() => {}
            _ = self.quit.recv() => {}
        }
    }
}
