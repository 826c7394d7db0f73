//! Recorded traces: CSV with a header, one line per moment and VM:
//!
//! ```text
//! time,vm,active,consumed
//! 0,db1,104857600,209715200
//! 30,db1,115343360,209715200
//! ```
//!
//! Time in seconds, not falling for a VM; active and consumed in bytes. Further columns are passed
//! over, and the columns may stand in any order. The first moment of a VM counts as its start.

use std::path::Path;
use std::sync::Arc;

use ballast_units::Bytes;

use crate::Millis;
use crate::load::Demand;

/// The trace of one VM: demands with the moments they begin at, since its first, in ascending order.
///
/// # Errors
/// What cannot be read or makes no sense, with its line.
pub fn load(path: &Path, vm: &str) -> Result<Arc<[(Millis, Demand)]>, String> {
    let text = std::fs::read_to_string(path).map_err(|e| e.to_string())?;
    parse(&text, vm)
}

/// The same of a text.
///
/// # Errors
/// As [`load`].
pub fn parse(text: &str, vm: &str) -> Result<Arc<[(Millis, Demand)]>, String> {
    let mut lines = text.lines().enumerate().map(|(n, line)| (n + 1, line.trim()));
    let header = lines.next().map_or("", |(_, line)| line);
    let at = |name: &str| {
        let found = header.split(',').position(|column| column.trim() == name);
        found.ok_or_else(|| format!("line 1: no column '{name}' (time,vm,active,consumed)"))
    };
    let (time, name, active, consumed) = (at("time")?, at("vm")?, at("active")?, at("consumed")?);
    let mut points: Vec<(Millis, Demand)> = Vec::new();
    let mut begin = 0.0;
    for (n, line) in lines.filter(|(_, line)| !line.is_empty()) {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        if cells.get(name) != Some(&vm) {
            continue;
        }
        let number = |column: usize, what: &str| {
            let cell = cells.get(column).copied().unwrap_or("");
            let value = cell.parse::<f64>().ok().filter(|v| v.is_finite() && *v >= 0.0);
            value.ok_or_else(|| format!("line {n}: {what} is '{cell}', not a number"))
        };
        let pages =
            |column, what| Ok::<_, String>(Bytes(number(column, what)? as u64).pages_ceil());
        let seconds = number(time, "time")?;
        if points.is_empty() {
            begin = seconds;
        }
        let ms = ((seconds - begin) * 1e3) as Millis;
        if seconds < begin || points.last().is_some_and(|(last, _)| *last > ms) {
            return Err(format!("line {n}: time goes back to {seconds}"));
        }
        let demand = Demand::new(pages(active, "active")?, pages(consumed, "consumed")?);
        match points.last_mut() {
            Some(last) if last.0 == ms => last.1 = demand,
            _ => points.push((ms, demand)),
        }
    }
    if points.is_empty() { Err(format!("no line of VM '{vm}'")) } else { Ok(points.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_units::Pages;

    #[test]
    fn the_lines_of_one_vm_are_read() {
        let text = "vm,time,swapped,active,consumed\n\
                    a,10,0,4096,8192\nb,10,0,1,1\n\na,12.5,0,8192,8192\n";
        let points = parse(text, "a").unwrap();
        let demand = |a, u| Demand { active: Pages(a), used: Pages(u) };
        assert_eq!(points[..], [(0, demand(1, 2)), (2_500, demand(2, 2))]);
    }

    #[test]
    fn what_makes_no_sense_is_named_with_its_line() {
        let head = "time,vm,active,consumed\n";
        for (text, wanted) in [
            ("time,vm,active\n".to_owned(), "line 1: no column 'consumed'"),
            (head.to_owned(), "no line of VM 'a'"),
            (format!("{head}0,a,x,1\n"), "line 2: active is 'x'"),
            (format!("{head}0,a,1\n"), "line 2: consumed is ''"),
            (format!("{head}5,a,1,1\n4,a,1,1\n"), "line 3: time goes back to 4"),
            (format!("{head}5,a,1,1\n6,a,-1,1\n"), "line 3: active is '-1'"),
        ] {
            let error = parse(&text, "a").unwrap_err();
            assert!(error.contains(wanted), "{text:?}: {error}");
        }
    }
}
