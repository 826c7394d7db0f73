//! Agents that work, that are not there, and that lie.

use std::time::Instant;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::UnixListener;

use super::*;

const SOON: Duration = Duration::from_millis(300);
const PATIENT: Duration = Duration::from_secs(30);
/// "some avg10=1.50 avg60=0 avg300=0 total=1\nfull avg10=0.50 avg60=0 avg300=0 total=1\n"
const FILE_B64: &str = "c29tZSBhdmcxMD0xLjUwIGF2ZzYwPTAgYXZnMzAwPTAgdG90YWw9MQpmdWxsIGF2ZzEwPTAu\
                        NTAgYXZnNjA9MCBhdmczMDA9MCB0b3RhbD0xCg==";

/// An agent that says what `reply` makes of each line; the first is told without its delimiter.
fn agent(reply: impl Fn(&Value) -> Vec<u8> + Send + 'static) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (reader, mut writer) = stream.into_split();
            let mut reader = BufReader::new(reader);
            let mut line = Vec::new();
            while reader.read_until(b'\n', &mut line).await.is_ok_and(|n| n > 0) {
                let text = line.strip_prefix(&[0xff]).unwrap_or(&line);
                let out = reply(&serde_json::from_slice(text).unwrap());
                if writer.write_all(&out).await.is_err() {
                    break;
                }
                line.clear();
            }
        }
    });
    (dir, socket)
}

fn ok(value: &Value) -> Vec<u8> {
    format!("{}\n", json!({ "return": value })).into_bytes()
}

/// As a good agent answers.
fn good(request: &Value) -> Vec<u8> {
    match request["execute"].as_str().unwrap() {
        "guest-sync-delimited" => {
            let mut out = b"{\"return\": 7}\n\xff".to_vec();
            out.extend(ok(&request["arguments"]["id"]));
            out
        }
        "guest-file-open" => {
            assert_eq!(request["arguments"]["path"], FILE);
            ok(&json!(1000))
        }
        "guest-file-read" => ok(&json!({ "count": 84, "buf-b64": FILE_B64, "eof": true })),
        "guest-file-close" => {
            assert_eq!(request["arguments"]["handle"], 1000);
            ok(&json!({}))
        }
        other => panic!("{other}"),
    }
}

/// A good one, but for one command.
fn but(command: &'static str, says: &'static [u8]) -> impl Fn(&Value) -> Vec<u8> + Send {
    move |request| if request["execute"] == command { says.to_vec() } else { good(request) }
}

#[tokio::test]
async fn pressure_is_read_again_and_again_over_one_connection() {
    let (_dir, socket) = agent(good);
    let mut agent = GuestAgent::connect(&socket, PATIENT).await.unwrap();
    for _ in 0..3 {
        let read = agent.memory_pressure(PATIENT).await.unwrap();
        assert_eq!(read, MemoryPressure { some: 0.015, full: 0.005 });
    }
}

#[tokio::test]
async fn who_is_not_there_is_waited_for_no_longer_than_allowed() {
    let missing = GuestAgent::connect(Path::new("/nonexistent/agent"), PATIENT).await.unwrap_err();
    assert!(missing.to_string().contains("/nonexistent/agent"), "{missing}");
    for silent in ["guest-sync-delimited", "guest-file-open", "guest-file-read", "guest-file-close"]
    {
        let (_dir, socket) = agent(but(silent, b""));
        let begin = Instant::now();
        let error = match GuestAgent::connect(&socket, SOON).await {
            Ok(mut agent) => agent.memory_pressure(SOON).await.unwrap_err(),
            Err(e) => e,
        };
        assert!(matches!(error, AgentError::Deadline(_)), "{silent}: {error}");
        assert!(begin.elapsed() < PATIENT);
    }
}

#[tokio::test]
async fn a_refusal_is_told_and_the_connection_goes_on() {
    let says = b"{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"it is disabled\"}}\n";
    let (_dir, socket) = agent(but("guest-file-open", says));
    let mut agent = GuestAgent::connect(&socket, PATIENT).await.unwrap();
    for _ in 0..2 {
        let error = agent.memory_pressure(PATIENT).await.unwrap_err();
        assert!(error.is_refusal(), "{error}");
        let text = error.to_string();
        assert!(text.contains("guest-file-open") && text.contains("it is disabled"), "{text}");
    }
}

#[tokio::test]
async fn a_guest_that_lies_gets_no_further_than_an_error() {
    const ENDLESS: &[u8] = &[b'x'; 4 * MAX_LINE];
    for (command, says) in [
        ("guest-file-open", &b"{\"return\": \"one\"}\n"[..]),
        ("guest-file-open", b"[]\n"),
        ("guest-file-open", b"\xff\xfe\n"),
        ("guest-file-open", ENDLESS),
        ("guest-file-read", b"{\"return\": {\"buf-b64\": 3}}\n"),
        ("guest-file-read", b"{\"return\": {\"buf-b64\": \"!!!!\"}}\n"),
        ("guest-file-read", b"{\"return\": {\"count\": 3, \"buf-b64\": \"Zm9v\"}}\n"),
        ("guest-file-close", b"{}\n"),
    ] {
        let (_dir, socket) = agent(but(command, says));
        let mut agent = GuestAgent::connect(&socket, PATIENT).await.unwrap();
        let error = agent.memory_pressure(PATIENT).await.unwrap_err();
        assert!(matches!(error, AgentError::Unexpected { .. }), "{command}: {error}");
        let text = error.to_string();
        assert!(text.len() < 500 && text.is_ascii() && !text.contains('\n'), "{text}");
    }
}

#[tokio::test]
async fn what_comes_before_the_delimiter_is_bounded() {
    // Delimited or not.
    for noise in [&b"xxxx"[..], b"\xff\n", b"\xff{\"return\": 1}\n"] {
        let (_dir, socket) = agent(move |_| noise.repeat(2 * MAX_STALE / noise.len()));
        let error = GuestAgent::connect(&socket, PATIENT).await.unwrap_err();
        let AgentError::Noise { bytes, source } = &error else { panic!("{error}") };
        assert!(matches!(**source, AgentError::Unexpected { .. }), "{error}");
        assert!((MAX_STALE..MAX_STALE + 3 * MAX_LINE).contains(bytes), "{error}");
    }
}

#[tokio::test]
async fn who_says_something_and_no_answer_is_told_from_who_says_nothing() {
    // An answer to another's synchronisation is none.
    let (_dir, socket) = agent(|_| b"\xff{\"return\": 1}\n".to_vec());
    let error = GuestAgent::connect(&socket, SOON).await.unwrap_err();
    let AgentError::Noise { bytes: 15, source } = &error else { panic!("{error}") };
    assert!(matches!(**source, AgentError::Deadline(_)), "{error}");
    assert!(error.to_string().contains("of 15 bytes that came"), "{error}");
}
