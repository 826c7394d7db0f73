//! PostgreSQL under pgbench, whose books must balance.

use std::os::unix::net::UnixStream;

use super::place::{self, Daemon, STATE, outside};
use super::{Load, Random};

/// MiB that pgbench's tables take per unit of its scale, about.
const SCALE_MB: u64 = 16;
const CLIENTS: u32 = 2;
/// Seconds of one run of pgbench.
const RUN: u32 = 5;

struct Database {
    pgbench: String,
    psql: String,
    rate: f64,
}

pub fn start(mb: u64, rate: f64) -> Result<(Daemon, Box<dyn Load>), String> {
    let program = |name: &str| place::find("/usr/lib/postgresql", &format!("bin/{name}"));
    let data = format!("{STATE}/data");
    let mut initdb = place::command(&program("initdb")?)?;
    // Every guest's files are its own, and none outlives it.
    initdb.args(["-D", &data, "-U", "service", "--no-sync", "--locale=C", "-E", "UTF8"]);
    place::run(&mut initdb)?;
    let mut command = place::command(&program("postgres")?)?;
    command.args(["-D", &data]);
    for setting in [
        "listen_addresses=".to_owned(),
        format!("unix_socket_directories={STATE}"),
        "shared_buffers=32MB".to_owned(),
        "dynamic_shared_memory_type=mmap".to_owned(),
        "jit=off".to_owned(),
    ] {
        command.args(["-c", &setting]);
    }
    let mut daemon = Daemon::start(&mut command)?;
    let socket = outside(STATE).join(".s.PGSQL.5432");
    daemon.until(|| {
        UnixStream::connect(&socket).map(drop).map_err(|e| format!("{}: {e}", socket.display()))
    })?;
    let mut load = Database { pgbench: program("pgbench")?, psql: program("psql")?, rate };
    let scale = (mb / SCALE_MB).max(1).to_string();
    daemon.until(|| load.pgbench(&["-i", "-q", "-s", &scale]).map(drop))?;
    Ok((daemon, Box::new(load)))
}

impl Database {
    fn pgbench(&mut self, arguments: &[&str]) -> Result<String, String> {
        let mut command = place::command(&self.pgbench)?;
        place::run(command.args(["-h", STATE, "-U", "service"]).args(arguments).arg("postgres"))
    }

    fn query(&self, sql: &str) -> Result<String, String> {
        let mut command = place::command(&self.psql)?;
        command.args(["-h", STATE, "-U", "service", "-At", "-c", sql, "postgres"]);
        place::run(&mut command).map(|text| text.trim().to_owned())
    }
}

impl Load for Database {
    fn step(&mut self, _: &mut Random) -> Result<u64, String> {
        let (rate, run) = (self.rate.to_string(), RUN.to_string());
        let clients = CLIENTS.to_string();
        let text = self.pgbench(&["-n", "-c", &clients, "-R", &rate, "-T", &run])?;
        let done = transactions(&text).ok_or_else(|| format!("pgbench printed '{text}'"))?;
        // What was booked to accounts, tellers and branches is what the history says.
        let sums = self.query(
            "SELECT (SELECT sum(abalance) FROM pgbench_accounts), \
             (SELECT sum(tbalance) FROM pgbench_tellers), \
             (SELECT sum(bbalance) FROM pgbench_branches), \
             (SELECT coalesce(sum(delta), 0) FROM pgbench_history)",
        )?;
        balanced(&sums).map(|()| done)
    }
}

fn transactions(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.split_once("transactions actually processed: "))?;
    line.1.split('/').next()?.trim().parse().ok()
}

fn balanced(sums: &str) -> Result<(), String> {
    let mut columns = sums.split('|');
    let first = columns.next();
    match first.is_some_and(|f| !f.is_empty()) && columns.all(|c| Some(c) == first) {
        true => Ok(()),
        false => Err(format!("the database's books do not balance: {sums}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transactions_are_counted_with_and_without_a_limit() {
        let text = |n: &str| format!("x\nnumber of transactions actually processed: {n}\ny\n");
        assert_eq!(transactions(&text("412")), Some(412));
        assert_eq!(transactions(&text("99/100")), Some(99));
        assert_eq!(transactions("tps = 3"), None);
    }

    #[test]
    fn books_balance_only_if_all_sums_agree() {
        balanced("-12|-12|-12|-12").unwrap();
        assert!(balanced("1|1|2|1").is_err());
        assert!(balanced("").is_err());
    }
}
