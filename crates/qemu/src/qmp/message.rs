//! A line of QMP, of which no more is made than is read: as values of JSON, a line may take a hundred times its length.

use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

use super::QmpEvent;
use crate::shown::shown;

/// The longest name of an event, or reason, that is taken for one. QEMU's have up to 30 bytes.
const MAX_WORD: usize = 64;
/// Lists and objects in an answer, each of which may take 700 bytes here and 3 there. A disk's statistics are some ten.
const MAX_NESTS: usize = 1 << 15;

/// The fields that are read, each as it came.
#[derive(Deserialize)]
pub(super) struct Message<'a> {
    #[serde(borrow, default, deserialize_with = "present")]
    event: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    data: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present", rename = "QMP")]
    pub greeting: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present", rename = "return")]
    pub answer: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    pub error: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    id: Option<&'a RawValue>,
}

/// Why QEMU did not do it; empty where it does not say.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Refusal {
    pub class: String,
    #[serde(rename = "desc")]
    pub description: String,
}

impl<'a> Message<'a> {
    /// None: the line is no object.
    pub fn parse(line: &'a [u8]) -> Option<Message<'a>> {
        // A list of its fields would do, too.
        serde_json::from_slice(line).ok().filter(|_| line.first() == Some(&b'{'))
    }

    /// What it tells unasked.
    pub fn event(&self) -> Option<QmpEvent> {
        #[derive(Deserialize)]
        struct Data<'a> {
            #[serde(borrow, default)]
            reason: Option<&'a RawValue>,
        }
        let name = word(self.event?)?;
        let data = self.data.and_then(|data| serde_json::from_str::<Data<'_>>(data.get()).ok());
        let reason = data.and_then(|data| data.reason).and_then(word);
        Some(QmpEvent { name, reason })
    }

    /// Which question it answers.
    pub fn id(&self) -> Option<u64> {
        self.id?.get().parse().ok()
    }
}

/// Makes values of an answer. None: they are nested too deeply, or too many.
pub(super) fn value(answer: &RawValue) -> Option<Value> {
    let text = answer.get();
    let nests = text.bytes().filter(|b| matches!(b, b'{' | b'[')).count();
    if nests > MAX_NESTS { None } else { serde_json::from_str(text).ok() }
}

/// In one line each, of which QEMU's own are well below the limits.
pub(super) fn refusal(error: &RawValue) -> Refusal {
    let Refusal { class, description } = serde_json::from_str(error.get()).unwrap_or_default();
    Refusal { class: shown(class.as_bytes(), 80), description: shown(description.as_bytes(), 400) }
}

/// A null is there, too.
fn present<'de, D: Deserializer<'de>>(field: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(field).map(Some)
}

fn word(text: &RawValue) -> Option<String> {
    let text = text.get();
    if text.len() > MAX_WORD { None } else { serde_json::from_str(text).ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(line: &str) -> Option<QmpEvent> {
        Message::parse(line.as_bytes()).unwrap().event()
    }

    #[test]
    fn of_an_event_its_name_and_reason_are_kept_and_no_more() {
        let name = "SHUTDOWN".to_owned();
        for (data, reason) in [
            ("", None),
            (r#","data":null"#, None),
            (r#","data":{"guest":true}"#, None),
            (r#","data":{"guest":true,"reason":"guest-reset"}"#, Some("guest-reset")),
            (r#","data":{"reason":7}"#, None),
            (r#","data":{"reason":null}"#, None),
            (r#","data":[{"":0}]"#, None),
        ] {
            let reason = reason.map(str::to_owned);
            let told = event(&format!(r#"{{"event":"SHUTDOWN"{data},"timestamp":{{}}}}"#));
            assert_eq!(told, Some(QmpEvent { name: name.clone(), reason }), "{data}");
        }
        let long = "x".repeat(MAX_WORD);
        assert_eq!(event(&format!(r#"{{"event":"{long}"}}"#)), None);
        let told = event(&format!(r#"{{"event":"STOP","data":{{"reason":"{long}"}}}}"#));
        assert_eq!(told.unwrap().reason, None);
    }

    #[test]
    fn an_answer_of_more_values_than_any_is_none() {
        let list = |n: usize| format!("[{}]", vec![r#"{"":0}"#; n].join(","));
        for (n, is_one) in [(1, true), (MAX_NESTS - 1, true), (MAX_NESTS, false)] {
            let line = format!(r#"{{"return":{},"id":1}}"#, list(n));
            let message = Message::parse(line.as_bytes()).unwrap();
            assert_eq!(value(message.answer.unwrap()).is_some(), is_one, "{n}");
        }
    }

    #[test]
    fn a_null_is_an_answer_and_a_list_is_no_message() {
        let message = Message::parse(br#"{"return":null,"id":3}"#).unwrap();
        assert_eq!(message.answer.and_then(value), Some(Value::Null));
        assert_eq!(message.id(), Some(3));
        assert!(Message::parse(br#"["STOP"]"#).is_none());
        for odd in ["-1", "\"1\"", "null", "[1]", "1.0"] {
            let line = format!(r#"{{"id":{odd}}}"#);
            assert_eq!(Message::parse(line.as_bytes()).unwrap().id(), None, "{odd}");
        }
    }
}
