//! Turns back from files: one segment, or all of a folder in their order.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_policy::Decision;

use crate::outcome::Outcome;
use crate::segment::{EncodedDecision, Frames, Header, Record, SegmentError, read_header};
use crate::store::segments_in;
use crate::turn::{Moment, Names, Turn};

/// What kept a segment, or its rest, from being read.
#[derive(Debug, thiserror::Error)]
#[error("{}: {what}", .path.display())]
pub struct Trouble {
    /// The segment.
    pub path: PathBuf,
    /// Why.
    pub what: SegmentError,
}

/// One turn as it was read; its decision is decoded when it is wanted.
#[derive(Clone, Debug)]
pub struct Sourced {
    /// Which turn, and when.
    pub moment: Moment,
    /// What ended with it.
    pub outcomes: Vec<Outcome>,
    /// Of all VMs named so far in the segment.
    pub names: Arc<Names>,
    /// Of the segment.
    pub header: Arc<Header>,
    /// All but its moment is as of the turn before.
    pub again: bool,
    segment: Arc<Path>,
    encoded: Arc<EncodedDecision>,
}

impl Sourced {
    /// The file that it is in.
    pub fn segment(&self) -> &Path {
        &self.segment
    }

    /// # Errors
    /// When this version does not understand it.
    pub fn decision(&self) -> Result<Decision, SegmentError> {
        self.encoded.decode()
    }

    /// The decision as [`encode`](crate::turn::encode) gave it.
    pub fn bytes(&self) -> &[u8] {
        self.encoded.bytes()
    }

    /// # Errors
    /// As of [`decision`](Self::decision).
    pub fn turn(&self) -> Result<Turn, SegmentError> {
        let (moment, outcomes) = (self.moment, self.outcomes.clone());
        Ok(Turn { moment, decision: self.decision()?, outcomes })
    }
}

/// Reads turns in the order in which they were recorded. A segment that cannot be read, or not to
/// its end, is a [`Trouble`], and the next one goes on.
#[derive(Debug)]
pub struct Reader {
    /// Those to come, last first.
    segments: Vec<(PathBuf, Header)>,
    current: Option<Current>,
    troubles: Vec<Trouble>,
}

struct Current {
    path: Arc<Path>,
    header: Arc<Header>,
    frames: Frames<BufReader<File>>,
    names: Arc<Names>,
    encoded: Arc<EncodedDecision>,
    /// Repeats to come, last first.
    again: Vec<Moment>,
}

impl std::fmt::Debug for Current {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Current").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Reader {
    /// Opens a segment, or a folder with any number of them. Nothing is changed there.
    ///
    /// # Errors
    /// When there is no such file or folder, or it cannot be read; when the one segment that is
    /// named is none, or of a newer version.
    pub fn open(path: &Path) -> Result<Reader, Trouble> {
        let failed = |what: SegmentError| Trouble { path: path.to_owned(), what };
        let about = std::fs::metadata(path).map_err(|e| failed(e.into()))?;
        let (mut segments, mut troubles) = (Vec::new(), Vec::new());
        if about.is_dir() {
            for (_, path) in segments_in(path).map_err(|e| failed(e.into()))? {
                match header_of(&path) {
                    Ok(header) => segments.push((path, header)),
                    // It was the oldest, and is gone.
                    Err(SegmentError::Io(e)) if e.kind() == std::io::ErrorKind::NotFound => {}
                    Err(what) => troubles.push(Trouble { path, what }),
                }
            }
        } else {
            segments.push((path.to_owned(), header_of(path).map_err(failed)?));
        }
        segments.reverse();
        Ok(Reader { segments, current: None, troubles })
    }

    /// Leaves out segments that hold nothing of `at_ms` (milliseconds since 1970) or later, by when
    /// the next one begins; the turn before that moment is still among what is read, if there is one.
    #[must_use]
    pub fn since(mut self, at_ms: u64) -> Reader {
        // The last one that begins before.
        if let Some(i) = self.segments.iter().position(|(_, h)| h.begun_ms < at_ms) {
            self.segments.truncate(i + 1);
        }
        self
    }

    /// One reader for each segment, in their order, and what could not be opened.
    pub fn split(mut self) -> (Vec<Reader>, Vec<Trouble>) {
        self.segments.reverse();
        let one = |segment| Reader { segments: vec![segment], current: None, troubles: Vec::new() };
        (self.segments.into_iter().map(one).collect(), self.troubles)
    }

    /// When the first segment begins, milliseconds since 1970.
    pub fn begins_ms(&self) -> Option<u64> {
        self.segments.last().map(|(_, header)| header.begun_ms)
    }

    /// What could not be read so far.
    pub fn troubles(&self) -> &[Trouble] {
        &self.troubles
    }

    /// As [`troubles`](Self::troubles), for errors.
    pub fn into_troubles(self) -> Vec<Trouble> {
        self.troubles
    }

    fn step(&mut self) -> Option<Sourced> {
        loop {
            let Some(current) = &mut self.current else {
                let (path, _) = self.segments.pop()?;
                match Current::open(&path) {
                    Ok(current) => self.current = Some(current),
                    Err(SegmentError::Io(e)) if e.kind() == std::io::ErrorKind::NotFound => {}
                    Err(what) => self.troubles.push(Trouble { path, what }),
                }
                continue;
            };
            match current.step() {
                Ok(Some(turn)) => return Some(turn),
                Ok(None) => self.current = None,
                Err(what) => {
                    self.troubles.push(Trouble { path: current.path.to_path_buf(), what });
                    self.current = None;
                }
            }
        }
    }
}

impl Iterator for Reader {
    type Item = Sourced;
    fn next(&mut self) -> Option<Sourced> {
        self.step()
    }
}

fn header_of(path: &Path) -> Result<Header, SegmentError> {
    Ok(read_header(&mut File::open(path)?)?.0)
}

impl Current {
    fn open(path: &Path) -> Result<Current, SegmentError> {
        let frames = Frames::new(BufReader::new(File::open(path)?))?;
        Ok(Current {
            path: path.into(),
            header: Arc::new(frames.header().clone()),
            frames,
            names: Arc::new(Names::new()),
            encoded: Arc::new(EncodedDecision::default()),
            again: Vec::new(),
        })
    }

    fn step(&mut self) -> Result<Option<Sourced>, SegmentError> {
        loop {
            if let Some(moment) = self.again.pop() {
                return Ok(Some(self.sourced(moment, Vec::new(), true)));
            }
            match self.frames.next()? {
                None => return Ok(None),
                Some(Record::Again(mut moments)) => {
                    if self.encoded.bytes().is_empty() {
                        return Err(self.frames.damaged("repeats of nothing"));
                    }
                    moments.reverse();
                    self.again = moments;
                }
                Some(Record::Turn(head, encoded)) => {
                    if !head.names.is_empty() {
                        Arc::make_mut(&mut self.names).extend(head.names);
                    }
                    self.encoded = Arc::new(encoded);
                    return Ok(Some(self.sourced(head.moment, head.outcomes, false)));
                }
            }
        }
    }

    fn sourced(&self, moment: Moment, outcomes: Vec<Outcome>, again: bool) -> Sourced {
        Sourced {
            moment,
            outcomes,
            names: self.names.clone(),
            header: self.header.clone(),
            again,
            segment: self.path.clone(),
            encoded: self.encoded.clone(),
        }
    }
}
