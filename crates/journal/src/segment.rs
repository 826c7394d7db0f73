//! A segment: one file of the journal.
//!
//! ```text
//! header   "ballastj" | version u32 | length u32 | check u32 | JSON: Header
//! frame    length u32 | raw u32 | check u32 | bytes
//! frame    ...
//! ```
//!
//! Numbers are little-endian. The bytes of all frames are one zstd stream, flushed at the end of each
//! frame: what did not change since the turn before is a reference of a few bytes, and every frame
//! can be read as soon as it is there. `raw` is the length that a frame's bytes decompress to.
//! Checks are the low half of XXH3-64: of the JSON, and of `length`, `raw` and the bytes.
//!
//! | raw bytes of a frame | |
//! | --- | --- |
//! | 1, length u32, [`Head`], decision | a turn; head and decision in MessagePack with names of fields |
//! | 2, `[Step]` | turns that were the one before again, in all but their moments |
//!
//! A reader stops at a frame that is not whole. At the end of a file that is what a killed manager
//! was writing; anywhere else it is damage, and what comes after it in the file cannot be read.

use std::io::{Read, Write};

use ballast_policy::Decision;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation as _, OutBuffer};

use crate::turn::{Head, Moment, encode};

/// Of the format. Grows by one whenever an older reader could not understand a file; fields that
/// are added with a default do not count.
pub const VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"ballastj";
const PREFIX: usize = 20;
const FRAME: usize = 12;
/// The largest frame, decompressed: a turn of a quarter of a million VMs.
pub const MAX_RAW: usize = 256 << 20;
/// So many turns at most are one frame of repeats; none was ever written with more.
pub(crate) const MOST_REPEATS: usize = 600;
/// The largest of a [`Step`], encoded: an array of three numbers of 9 bytes and another one.
const MAX_STEP: usize = 1 + 4 * 9;
const MAX_HEADER: usize = 64 << 10;
const TURN: u8 = 1;
const AGAIN: u8 = 2;
/// zstd's fastest of its ordinary levels: references to the turn before are found at any level.
const LEVEL: i32 = 1;
/// 2 to this is how far back matches are found without a search for distant ones.
const NEAR: u32 = 17;
/// Windows of 64 KiB to 32 MiB.
const WINDOWS: std::ops::RangeInclusive<u32> = 16..=25;

/// Who wrote a segment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// Version of Ballast.
    pub ballast: String,
    /// Name of the host.
    pub host: String,
    /// Process of the manager.
    pub pid: u32,
    /// Tells runs of managers apart: milliseconds since 1970 of its start.
    pub manager_ms: u64,
    /// Milliseconds since 1970.
    pub begun_ms: u64,
    /// How far back references go: 2 to this.
    pub window_log: u32,
}

/// Why a segment cannot be read (further).
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum SegmentError {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("not a journal of Ballast")]
    Foreign,
    #[error("written by a newer Ballast (journal version {found}, this one knows {VERSION})")]
    Newer { found: u32 },
    #[error("ends within its header")]
    NoHeader,
    /// The last record of a manager that was killed, or is writing it now.
    #[error("its last record, at byte {at}, is not whole")]
    Torn { at: u64 },
    #[error("damaged at byte {at}: {what}; what comes after it in this file is lost")]
    Damaged { at: u64, what: String },
}

fn check_of(parts: &[&[u8]]) -> u32 {
    let mut hasher = XxHash3_64::new();
    for part in parts {
        std::hash::Hasher::write(&mut hasher, part);
    }
    std::hash::Hasher::finish(&hasher) as u32
}

/// Makes frames. Holds no file: whoever writes the bytes must write all of them, in order.
pub struct Encoder {
    stream: zstd::stream::write::Encoder<'static, Vec<u8>>,
    window: usize,
    raw_total: u64,
    /// Of the turn before.
    last: Moment,
}

impl Encoder {
    /// An encoder for turns of about `expected` raw bytes, and the header that its file begins with.
    ///
    /// # Errors
    /// When zstd cannot have its memory.
    pub fn new(mut header: Header, expected: usize) -> std::io::Result<(Encoder, Vec<u8>)> {
        // The turn before must be in reach from the end of the next.
        let wanted = (expected.max(1) * 2 + 4096).next_power_of_two().trailing_zeros();
        header.window_log = wanted.clamp(*WINDOWS.start(), *WINDOWS.end());
        let mut stream = zstd::stream::write::Encoder::new(Vec::new(), LEVEL)?;
        stream.window_log(header.window_log)?;
        // The matcher of this level forgets what is farther back than this.
        stream.long_distance_matching(header.window_log > NEAR)?;
        stream.include_checksum(false)?;
        let json = serde_json::to_vec(&header)?;
        let mut bytes = Vec::with_capacity(PREFIX + json.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(json.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&check_of(&[&json]).to_le_bytes());
        bytes.extend_from_slice(&json);
        Ok((Encoder { stream, window: 1 << header.window_log, raw_total: 0, last: ZERO }, bytes))
    }

    /// Whether a turn of so many raw bytes finds the one before within its window.
    pub fn fits(&self, raw: usize) -> bool {
        raw * 2 <= self.window || self.window == 1 << *WINDOWS.end()
    }

    /// Raw bytes of all frames so far: what a reader has to go through.
    pub fn raw_total(&self) -> u64 {
        self.raw_total
    }

    /// The frame of a turn, of which `decision` is encoded already.
    ///
    /// # Errors
    /// When it is larger than [`MAX_RAW`]; nothing has been taken into the stream then.
    pub(crate) fn turn(&mut self, head: &Head, decision: &[u8]) -> std::io::Result<Vec<u8>> {
        self.last = head.moment;
        let head = encode(head).map_err(std::io::Error::other)?;
        let len = (head.len() as u32).to_le_bytes();
        self.frame(&[&[TURN], &len, &head, decision])
    }

    /// The frame of repeats.
    ///
    /// # Errors
    /// As of a turn.
    pub(crate) fn again(&mut self, moments: &[Moment]) -> std::io::Result<Vec<u8>> {
        let step = |moment: &Moment| step(&mut self.last, *moment);
        let steps: Vec<Step> = moments.iter().map(step).collect();
        let body = rmp_serde::to_vec(&steps).map_err(std::io::Error::other)?;
        self.frame(&[&[AGAIN], &body])
    }

    fn frame(&mut self, parts: &[&[u8]]) -> std::io::Result<Vec<u8>> {
        let raw: usize = parts.iter().map(|p| p.len()).sum();
        if raw > MAX_RAW {
            let what = format!("a record of {raw} bytes is larger than {MAX_RAW}");
            return Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, what));
        }
        for part in parts {
            self.stream.write_all(part)?;
        }
        self.stream.flush()?;
        self.raw_total += raw as u64;
        let body = std::mem::take(self.stream.get_mut());
        let (len, raw) = ((body.len() as u32).to_le_bytes(), (raw as u32).to_le_bytes());
        let mut bytes = Vec::with_capacity(FRAME + body.len());
        bytes.extend_from_slice(&len);
        bytes.extend_from_slice(&raw);
        bytes.extend_from_slice(&check_of(&[&len, &raw, &body]).to_le_bytes());
        bytes.extend_from_slice(&body);
        Ok(bytes)
    }
}

/// From one moment to the next: numbers that are alike from turn to turn. `n`, `at_ms`, `up_ms` as
/// differences, and `took_us`.
type Step = (i64, i64, i64, u64);

const ZERO: Moment = Moment { n: 0, at_ms: 0, up_ms: 0, took_us: 0 };

fn step(last: &mut Moment, next: Moment) -> Step {
    let from = std::mem::replace(last, next);
    let less = |a: u64, b: u64| a.wrapping_sub(b) as i64;
    (less(next.n, from.n), less(next.at_ms, from.at_ms), less(next.up_ms, from.up_ms), next.took_us)
}

fn follow(last: &mut Moment, (n, at, up, took_us): Step) -> Moment {
    let more = |a: u64, b: i64| a.wrapping_add(b as u64);
    let (n, at_ms, up_ms) = (more(last.n, n), more(last.at_ms, at), more(last.up_ms, up));
    *last = Moment { n, at_ms, up_ms, took_us };
    *last
}

/// What a frame holds.
pub(crate) enum Record {
    Turn(Head, EncodedDecision),
    Again(Vec<Moment>),
}

/// A decision as it lies in a frame; decoded when it is wanted.
#[derive(Clone, Debug, Default)]
pub(crate) struct EncodedDecision {
    bytes: Vec<u8>,
    from: usize,
    at: u64,
}

impl EncodedDecision {
    /// The encoded bytes; see [`encode`].
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.from..]
    }

    pub fn decode(&self) -> Result<Decision, SegmentError> {
        rmp_serde::from_slice(self.bytes())
            .map_err(|e| SegmentError::Damaged { at: self.at, what: format!("a decision: {e}") })
    }
}

/// Reads the frames of a segment, in order.
pub struct Frames<R> {
    input: R,
    header: Header,
    decoder: Decoder<'static>,
    /// Byte of the file at which the next frame begins.
    at: u64,
    /// Of the turn before.
    last: Moment,
}

/// Reads what identifies a segment and says who wrote it.
///
/// # Errors
/// When it is no segment, or not one that this version understands.
pub fn read_header(input: &mut impl Read) -> Result<(Header, u64), SegmentError> {
    let mut prefix = [0; PREFIX];
    let got = read_up_to(input, &mut prefix)?;
    if got < MAGIC.len() && MAGIC.starts_with(&prefix[..got]) {
        return Err(SegmentError::NoHeader);
    }
    if !prefix.starts_with(MAGIC) {
        return Err(SegmentError::Foreign);
    }
    // Whatever a later version has behind it, the version stays where it is.
    if got >= 12 && u32_at(&prefix, 8) > VERSION {
        return Err(SegmentError::Newer { found: u32_at(&prefix, 8) });
    }
    if got < PREFIX {
        return Err(SegmentError::NoHeader);
    }
    let damaged = |what: &str| SegmentError::Damaged { at: 0, what: what.to_owned() };
    let len = u32_at(&prefix, 12) as usize;
    if len > MAX_HEADER {
        return Err(damaged("the length of its header"));
    }
    let mut json = vec![0; len];
    if read_up_to(input, &mut json)? < len {
        return Err(SegmentError::NoHeader);
    }
    if check_of(&[&json]) != u32_at(&prefix, 16) {
        return Err(damaged("its header"));
    }
    let header: Header = serde_json::from_slice(&json).map_err(|e| damaged(&e.to_string()))?;
    if !WINDOWS.contains(&header.window_log) {
        return Err(damaged("the window in its header"));
    }
    Ok((header, (PREFIX + len) as u64))
}

impl<R: Read> Frames<R> {
    /// # Errors
    /// As of [`read_header`].
    pub fn new(mut input: R) -> Result<Frames<R>, SegmentError> {
        let (header, at) = read_header(&mut input)?;
        let mut decoder = Decoder::new()?;
        decoder.set_parameter(DParameter::WindowLogMax(header.window_log))?;
        Ok(Frames { input, header, decoder, at, last: ZERO })
    }

    /// Who wrote it.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The next frame; `None` at the end.
    ///
    /// # Errors
    /// Nothing can be read from this segment after an error.
    pub(crate) fn next(&mut self) -> Result<Option<Record>, SegmentError> {
        let at = self.at;
        let torn = || SegmentError::Torn { at };
        let damaged = |what: &str| SegmentError::Damaged { at, what: what.to_owned() };
        let mut prefix = [0; FRAME];
        match read_up_to(&mut self.input, &mut prefix)? {
            0 => return Ok(None),
            FRAME => {}
            _ => return Err(torn()),
        }
        let (len, raw) = (u32_at(&prefix, 0) as usize, u32_at(&prefix, 4) as usize);
        if raw > MAX_RAW || len > MAX_RAW + (MAX_RAW >> 4) {
            return Err(self.torn_or(at, damaged("the length of a record")));
        }
        // As it comes, not as it is announced.
        let mut body = Vec::new();
        (&mut self.input).take(len as u64).read_to_end(&mut body)?;
        if body.len() < len {
            // A length that is wrong takes those behind it for its own.
            return Err(if has_frame(&body) { damaged("the length of a record") } else { torn() });
        }
        if check_of(&[&prefix[..8], &body]) != u32_at(&prefix, 8) {
            return Err(self.torn_or(at, damaged("a record's check does not agree")));
        }
        let raw = self.decompress(&body, raw).map_err(|e| damaged(&e))?;
        self.at += (FRAME + len) as u64;
        parse(raw, at, &mut self.last).map(Some)
    }

    /// Damage behind which nothing can be read.
    pub(crate) fn damaged(&self, what: &str) -> SegmentError {
        SegmentError::Damaged { at: self.at, what: what.to_owned() }
    }

    /// At the end of the file it is what was being written.
    fn torn_or(&mut self, at: u64, error: SegmentError) -> SegmentError {
        match self.input.read(&mut [0]) {
            Ok(0) => SegmentError::Torn { at },
            _ => error,
        }
    }

    fn decompress(&mut self, body: &[u8], raw: usize) -> Result<Vec<u8>, String> {
        let mut bytes: Vec<u8> = Vec::with_capacity(raw + 1);
        let mut input = InBuffer::around(body);
        loop {
            let before = (input.pos(), bytes.len());
            let mut output = OutBuffer::around_pos(&mut bytes, before.1);
            self.decoder.run(&mut input, &mut output).map_err(|e| e.to_string())?;
            if bytes.len() > raw {
                return Err("a record is longer than it says".to_owned());
            }
            if (input.pos(), bytes.len()) == before {
                break;
            }
        }
        if input.pos() < body.len() || bytes.len() != raw {
            return Err("a record is not as long as it says".to_owned());
        }
        Ok(bytes)
    }
}

fn parse(raw: Vec<u8>, at: u64, last: &mut Moment) -> Result<Record, SegmentError> {
    let damaged = |what: String| SegmentError::Damaged { at, what };
    match raw.first() {
        Some(&TURN) if raw.len() >= 5 => {
            let from = 5 + u32_at(&raw, 1) as usize;
            let head = raw.get(5..from).ok_or_else(|| damaged("the length of a head".into()))?;
            let head: Head =
                rmp_serde::from_slice(head).map_err(|e| damaged(format!("a head: {e}")))?;
            *last = head.moment;
            Ok(Record::Turn(head, EncodedDecision { bytes: raw, from, at }))
        }
        Some(&AGAIN) => {
            // Before anything is made of them: compressed, a file of a few bytes says as many as it likes.
            let many = || damaged(format!("more than {MOST_REPEATS} repeats"));
            if raw.len() > 1 + 5 + MOST_REPEATS * MAX_STEP {
                return Err(many());
            }
            let steps: Vec<Step> =
                rmp_serde::from_slice(&raw[1..]).map_err(|e| damaged(format!("repeats: {e}")))?;
            if steps.len() > MOST_REPEATS {
                return Err(many());
            }
            Ok(Record::Again(steps.into_iter().map(|step| follow(last, step)).collect()))
        }
        _ => Err(damaged("a record of an unknown kind".into())),
    }
}

/// How far behind a record the next one is looked for: further than any is long.
const LOOKED_THROUGH: usize = 1 << 20;
/// Bytes that are summed in that search: far more than chance makes look like frames, and done within a second.
const SUMMED: usize = 1 << 30;

/// Whether an intact frame begins somewhere in these bytes. Of bytes that look like more frames than chance allows, yes:
/// nobody's last record looks so.
fn has_frame(bytes: &[u8]) -> bool {
    let mut summed = 0;
    let is_frame = |at: usize| {
        let frame = &bytes[at..];
        let (prefix, rest) = frame.split_at(FRAME);
        let (len, raw) = (u32_at(prefix, 0) as usize, u32_at(prefix, 4) as usize);
        if !(1..=rest.len()).contains(&len) || !(1..=MAX_RAW).contains(&raw) {
            return false;
        }
        summed += len;
        summed > SUMMED || check_of(&[&prefix[..8], &rest[..len]]) == u32_at(prefix, 8)
    };
    (0..bytes.len().saturating_sub(FRAME).min(LOOKED_THROUGH)).any(is_frame)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut four = [0; 4];
    four.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(four)
}

fn read_up_to(input: &mut impl Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match input.read(&mut buffer[got..]) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(got)
}

#[cfg(test)]
#[path = "segment_tests.rs"]
mod tests;
