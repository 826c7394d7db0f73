//! Against QMP servers that are broken or hostile: errors in time, never a hang, never a wrong
//! answer.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;

use ballast_qemu::{MAX_LINE, Monitor, Qmp, QmpError};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::broadcast::error::RecvError;

const PATIENT: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(200);

struct Peer {
    stream: BufReader<UnixStream>,
}

impl Peer {
    async fn send(&mut self, text: &str) {
        // The client may be gone: that is what some tests are about.
        let _ = self.stream.get_mut().write_all(text.as_bytes()).await;
    }
    async fn say(&mut self, message: Value) {
        self.send(&format!("{message}\r\n")).await;
    }
    async fn hear(&mut self) -> Option<Value> {
        let mut line = String::new();
        self.stream.read_line(&mut line).await.ok().filter(|&n| n > 0)?;
        Some(serde_json::from_str(&line).unwrap())
    }
    async fn greet(&mut self) {
        self.say(json!({ "QMP": { "version": {}, "capabilities": ["oob"] } })).await;
        let first = self.hear().await.unwrap();
        assert_eq!(first["execute"], "qmp_capabilities");
        self.say(json!({ "return": {}, "id": first["id"] })).await;
    }
}

/// Serves one client with `script`; the folder holds the socket.
fn serve<F, T>(script: F) -> (PathBuf, tempfile::TempDir)
where
    F: FnOnce(Peer) -> T + Send + 'static,
    T: Future<Output = ()> + Send,
{
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("qmp");
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        script(Peer { stream: BufReader::new(stream) }).await;
    });
    (socket, dir)
}

async fn connected<F, T>(script: F) -> (Qmp, tempfile::TempDir)
where
    F: FnOnce(Peer) -> T + Send + 'static,
    T: Future<Output = ()> + Send,
{
    let (socket, dir) = serve(async move |mut peer: Peer| {
        peer.greet().await;
        script(peer).await;
    });
    (Qmp::connect(&socket, PATIENT).await.unwrap(), dir)
}

async fn ask(qmp: &Qmp, deadline: Duration) -> Result<Value, QmpError> {
    qmp.execute("query-status", Value::Null, deadline).await
}

#[track_caller]
fn assert_closed(result: Result<Value, QmpError>, part: &str) {
    match result {
        Err(QmpError::Closed { why, .. }) => assert!(why.contains(part), "{why}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn answers_to_other_questions_are_not_taken() {
    let (qmp, _dir) = connected(async |mut peer: Peer| {
        let question = peer.hear().await.unwrap();
        for id in [json!(0), json!(999), json!(-1), json!("1"), json!(null), json!([1])] {
            peer.say(json!({ "return": "wrong", "id": id })).await;
        }
        peer.say(json!({ "return": "wrong" })).await;
        peer.say(json!({ "return": "right", "id": question["id"] })).await;
        peer.say(json!({ "return": "again", "id": question["id"] })).await;
        let next = peer.hear().await.unwrap();
        assert_ne!(next["id"], question["id"]);
        peer.say(json!({ "return": "next", "id": next["id"] })).await;
    })
    .await;
    assert_eq!(ask(&qmp, PATIENT).await.unwrap(), "right");
    assert_eq!(ask(&qmp, PATIENT).await.unwrap(), "next");
}

#[tokio::test]
async fn what_was_said_before_it_broke_is_heard_though_something_is_asked_just_then() {
    for round in 0..64 {
        let (release, released) = tokio::sync::oneshot::channel::<()>();
        let (left, gone) = tokio::sync::oneshot::channel::<()>();
        let (qmp, _dir) = connected(async move |mut peer: Peer| {
            released.await.unwrap();
            peer.say(json!({ "event": "SHUTDOWN", "data": { "reason": "guest-reset" } })).await;
            drop(peer);
            left.send(()).unwrap();
        })
        .await;
        let mut events = qmp.events();
        release.send(()).unwrap();
        // Its words are mostly not read yet.
        gone.await.unwrap();
        assert_closed(ask(&qmp, PATIENT).await, "");
        let event = events.recv().await.unwrap_or_else(|e| panic!("round {round}: {e}"));
        assert_eq!(event.reason.as_deref(), Some("guest-reset"));
    }
}

#[tokio::test]
async fn one_that_hears_no_more_and_stays_is_left() {
    let (qmp, _dir) = connected(async |peer: Peer| {
        let stream = peer.stream.into_inner().into_std().unwrap();
        stream.shutdown(std::net::Shutdown::Read).unwrap();
        std::future::pending::<()>().await;
    })
    .await;
    assert!(ask(&qmp, PATIENT).await.is_err());
    qmp.closed().await;
}

#[tokio::test]
async fn a_late_answer_is_dropped_and_the_next_is_right() {
    let (release, released) = tokio::sync::oneshot::channel::<()>();
    let (qmp, _dir) = connected(async move |mut peer: Peer| {
        let late = peer.hear().await.unwrap();
        released.await.unwrap();
        peer.say(json!({ "return": "late", "id": late["id"] })).await;
        let next = peer.hear().await.unwrap();
        peer.say(json!({ "return": "in time", "id": next["id"] })).await;
    })
    .await;
    let error = ask(&qmp, SHORT).await.unwrap_err();
    assert!(error.to_string().contains("query-status within 200 ms"), "{error}");
    release.send(()).unwrap();
    assert_eq!(ask(&qmp, PATIENT).await.unwrap(), "in time");
}

#[tokio::test]
async fn a_silent_qemu_gets_a_bounded_number_of_commands() {
    let (release, released) = tokio::sync::oneshot::channel::<()>();
    let (qmp, _dir) = connected(async move |mut peer: Peer| {
        released.await.unwrap();
        for n in 0.. {
            let Some(question) = peer.hear().await else { break };
            if question["execute"] == "last" {
                // The count proves that abandoned commands were not sent after all.
                peer.say(json!({ "return": n, "id": question["id"] })).await;
            } else {
                peer.say(json!({ "return": {}, "id": question["id"] })).await;
            }
        }
    })
    .await;
    for _ in 0..30 {
        let error = ask(&qmp, Duration::from_millis(10)).await.unwrap_err();
        assert!(matches!(error, QmpError::Deadline { .. }), "{error}");
    }
    release.send(()).unwrap();
    let before = qmp.execute("last", Value::Null, PATIENT).await.unwrap();
    assert_eq!(before, 8, "the window, and none of the other 22");
}

#[tokio::test]
async fn garbage_ends_the_connection_with_its_beginning_quoted() {
    let long = "x".repeat(100);
    for (garbage, part) in [
        ("hello\n", "not QMP: 'hello'"),
        ("[1]\n", "not QMP: '[1]'"),
        ("\u{1b}[2J\n", "not QMP: '\\u{1b}"),
        ("{}\n", "neither answer nor event"),
        ("{\"event\": 7}\n", "neither answer nor event"),
        ("{\"return\": 1, \"id\"\n", "not QMP"),
        (&format!("{long}\n"), "..."),
    ] {
        let garbage = garbage.to_owned();
        let (qmp, _dir) = connected(async move |mut peer: Peer| {
            peer.hear().await;
            peer.send(&garbage).await;
            peer.hear().await;
        })
        .await;
        assert_closed(ask(&qmp, PATIENT).await, part);
        assert_closed(ask(&qmp, PATIENT).await, part);
        assert!(qmp.is_closed());
    }
}

#[tokio::test]
async fn deeply_nested_json_does_not_exhaust_the_stack() {
    let (qmp, _dir) = connected(async |mut peer: Peer| {
        peer.send(&format!("{{\"return\":{}\n", "[".repeat(500_000))).await;
        peer.hear().await;
    })
    .await;
    assert_closed(ask(&qmp, PATIENT).await, "not QMP");
}

#[tokio::test]
async fn a_line_without_end_is_cut_off() {
    for newline in ["", "\n"] {
        let (qmp, _dir) = connected(async move |mut peer: Peer| {
            peer.send(&format!("{}{newline}", "x".repeat(MAX_LINE + 1))).await;
            peer.hear().await;
        })
        .await;
        assert_closed(ask(&qmp, PATIENT).await, "more than 1048576 bytes");
    }
}

#[tokio::test]
async fn a_long_line_within_the_limit_in_pieces_is_an_answer() {
    let (qmp, _dir) = connected(async |mut peer: Peer| {
        let id = peer.hear().await.unwrap()["id"].clone();
        let answer = format!("{}\n", json!({ "return": "y".repeat(900_000), "id": id }));
        for piece in answer.as_bytes().chunks(9_973) {
            peer.send(std::str::from_utf8(piece).unwrap()).await;
            tokio::task::yield_now().await;
        }
        peer.hear().await;
    })
    .await;
    let answer = ask(&qmp, PATIENT).await.unwrap();
    assert_eq!(answer.as_str().unwrap().len(), 900_000);
}

#[tokio::test]
async fn a_connection_that_closes_fails_what_waits() {
    let (qmp, _dir) = connected(async |mut peer: Peer| {
        peer.hear().await;
        peer.send("{\"return\": {\"sta").await;
    })
    .await;
    let mut events = qmp.events();
    assert_closed(ask(&qmp, PATIENT).await, "middle of a line");
    for mut receiver in [events.resubscribe(), qmp.events()] {
        let end = tokio::time::timeout(PATIENT, receiver.recv()).await.unwrap();
        assert_eq!(end, Err(RecvError::Closed));
    }
    assert_eq!(events.recv().await, Err(RecvError::Closed));
    let (qmp, _dir) = connected(async |mut peer: Peer| drop(peer.hear().await)).await;
    assert_closed(ask(&qmp, PATIENT).await, "closed");
    assert!(qmp.closed().await.contains("closed"));
}

#[tokio::test]
async fn unknown_events_arrive_and_floods_cost_only_the_oldest() {
    const FLOOD: usize = 3_000;
    let (qmp, _dir) = connected(async |mut peer: Peer| {
        let id = peer.hear().await.unwrap()["id"].clone();
        let data = json!({ "x": [1], "reason": "none" });
        let event = json!({ "event": "NEW_IN_QEMU_99", "data": data, "timestamp": {} });
        let flood = format!("{event}\r\n").repeat(FLOOD);
        peer.send(&flood).await;
        peer.say(json!({ "return": "after the flood", "id": id })).await;
        peer.hear().await;
    })
    .await;
    let mut events = qmp.events();
    assert_eq!(ask(&qmp, PATIENT).await.unwrap(), "after the flood");
    let lost = match events.recv().await {
        Err(RecvError::Lagged(lost)) => usize::try_from(lost).unwrap(),
        other => panic!("{other:?}"),
    };
    let mut kept = 0;
    while let Ok(event) = events.try_recv() {
        assert_eq!((&*event.name, event.reason.as_deref()), ("NEW_IN_QEMU_99", Some("none")));
        kept += 1;
    }
    assert_eq!(lost + kept, FLOOD);
}

#[tokio::test]
async fn who_talks_without_end_is_hung_up_on() {
    let event = json!({ "event": "BALLOON_CHANGE", "data": { "actual": 0 } });
    let part = "more than 4096 lines in a second";
    for line in ["\n".to_owned(), format!("{event}\n")] {
        let (qmp, _dir) = connected(async move |mut peer: Peer| {
            peer.hear().await;
            let flood = line.repeat((1 << 20) / line.len());
            while peer.stream.get_mut().write_all(flood.as_bytes()).await.is_ok() {}
        })
        .await;
        assert_closed(ask(&qmp, PATIENT).await, part);
        assert!(qmp.is_closed());
    }
}

#[tokio::test]
async fn a_server_that_does_not_greet_is_given_up() {
    let (socket, _dir) = serve(async |mut peer: Peer| drop(peer.hear().await));
    let error = Qmp::connect(&socket, SHORT).await.unwrap_err();
    assert!(matches!(error, QmpError::NoGreeting { .. }), "{error}");
    let (socket, _dir) = serve(async |mut peer: Peer| {
        peer.send("220 mail.example.org ESMTP\r\n").await;
        peer.hear().await;
    });
    let error = Qmp::connect(&socket, PATIENT).await.unwrap_err();
    assert!(error.to_string().contains("220 mail"), "{error}");
    let (socket, _dir) = serve(async |mut peer: Peer| {
        peer.say(json!({ "QMP": {} })).await;
        let id = peer.hear().await.unwrap()["id"].clone();
        peer.say(json!({ "error": { "class": "GenericError", "desc": "no" }, "id": id })).await;
        peer.hear().await;
    });
    let error = Qmp::connect(&socket, PATIENT).await.unwrap_err();
    assert!(error.to_string().contains("refused qmp_capabilities: no"), "{error}");
    let error = Qmp::connect("/nonexistent/qmp".as_ref(), PATIENT).await.unwrap_err();
    assert!(error.to_string().contains("/nonexistent/qmp"), "{error}");
}

#[tokio::test]
async fn typed_commands_refuse_answers_of_another_type() {
    let (qmp, _dir) = connected(async |mut peer: Peer| {
        while let Some(question) = peer.hear().await {
            let lie = match question["execute"].as_str().unwrap() {
                "qom-list" => json!([]),
                _ => json!({ "actual": "much" }),
            };
            peer.say(json!({ "return": lie, "id": question["id"] })).await;
        }
    })
    .await;
    let monitor = Monitor::new(qmp, PATIENT).await.unwrap();
    let errors = [
        monitor.query_balloon().await.unwrap_err(),
        monitor.query_status().await.map(drop).unwrap_err(),
        monitor.memdevs().await.map(drop).unwrap_err(),
        monitor.ram_blocks().await.map(drop).unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, QmpError::Unexpected { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_client_that_gave_up_leaves_qemus_only_place_to_others() {
    // QEMU serves one client: a connection that lingers would lock the next one out.
    let (told, heard) = tokio::sync::oneshot::channel();
    let (socket, _dir) = serve(async move |mut peer: Peer| {
        told.send(peer.hear().await).unwrap();
    });
    Qmp::connect(&socket, SHORT).await.unwrap_err();
    assert_eq!(tokio::time::timeout(PATIENT, heard).await.unwrap().unwrap(), None);

    // Nor does one whose commands were never answered.
    let (told, heard) = tokio::sync::oneshot::channel();
    let (qmp, _dir) = connected(async move |mut peer: Peer| {
        let mut commands = 0;
        while peer.hear().await.is_some() {
            commands += 1;
        }
        told.send(commands).unwrap();
    })
    .await;
    for _ in 0..10 {
        ask(&qmp, Duration::from_millis(10)).await.unwrap_err();
    }
    drop(qmp);
    assert_eq!(tokio::time::timeout(PATIENT, heard).await.unwrap().unwrap(), 8);
}

#[tokio::test]
async fn a_dropped_client_closes_the_connection() {
    let (told, heard) = tokio::sync::oneshot::channel();
    let (qmp, _dir) = connected(async move |mut peer: Peer| {
        told.send(peer.hear().await).unwrap();
    })
    .await;
    let clone = qmp.clone();
    drop(qmp);
    assert!(!clone.is_closed());
    drop(clone);
    assert_eq!(heard.await.unwrap(), None);
}

/// By which a manager knows that a socket of that path is of the VMM that it means.
#[tokio::test]
async fn who_is_at_the_other_end_is_told_by_the_kernel() {
    let (qmp, _dir) = connected(async |_| {}).await;
    assert_eq!(qmp.pid(), Some(std::process::id()));
}
