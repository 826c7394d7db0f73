//! What a guest does, and what is asked of it.

use ballast_units::Bytes;

/// One guest's part.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// The workload's name in its reports.
    pub work: &'static str,
    /// Its command line.
    pub command: String,
    /// Operations per second that it is asked for; zero if it serves nobody.
    pub asked: f64,
    /// Size of its disk, if it has one.
    pub disk: Option<Bytes>,
}

impl Load {
    /// A database's stand-in: a table of `table` MiB on disk, `sessions` MiB of memory.
    pub fn store(table: u64, sessions: u64, rate: f64, seed: usize) -> Load {
        Load {
            work: "store",
            command: format!(
                "store --mb {table} --sessions-mb {sessions} --rate {rate} --seed {seed}"
            ),
            asked: rate,
            // The table, and room for the file system's own.
            disk: Some(Bytes::from_mib(table + 32)),
        }
    }

    /// A user of six programs of `mb` MiB each, who thinks `think` seconds between actions.
    pub fn office(mb: u64, think: f64, seed: usize) -> Load {
        Load {
            work: "office",
            command: format!("office --program-mb {mb} --think {think} --seed {seed}"),
            // If actions took no time.
            asked: 1.0 / think,
            disk: None,
        }
    }

    /// Memory that is written once.
    pub fn hog(mb: u64) -> Load {
        Load { work: "hog", command: format!("hog --mb {mb}"), asked: 0.0, disk: None }
    }
}
