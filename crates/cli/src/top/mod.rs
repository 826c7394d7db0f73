//! `ballast top`: the live view.
//!
//! ```text
//!  ballast                                                                 up 3m12s    <- title
//! +- host --- STATE SOFT --- overcommit 2.00 (peak 2.10) --- 3 VMs --- tax 0.75 ---+
//! | web            db                     idle       overhead | free               |   <- budget
//! | H high >23M  S soft <15M  D hard <7.7M  L low <3.8M                 H  S  D L  |   <- marks
//! | used 361M free 23M of 384M, peak 380M  measured 350M, peak 377M  swap 40M/512M |
//! | swap in 0.0 MB/s  out 1.2 MB/s  balloon 3.0 MB/s  faults 1.2k/s  waits 0/s     |
//! | shared 120M common 20M saved 100M zero 50M  broken 3M 12/s  scan 41 MB/s 3.2%  |
//! +--------------------------------------------------------------------------------+
//! +- VMs --------------------------------------------------------------------------+
//! | NAME  MEMORY             USED  TGT  ACT SHARES  MIN  MAX  TAX  BALLN    WT/BL  |
//! |>web   ########|%%%::::.. 192M 160M 120M   2560  64M 256M 0.75  ok         0/0  |
//! | db    ...                                                                      |
//! +- # resident = compressed % swapped : ballooned . untouched | target o active --+
//! +- web --- running --- paged --- pid 4711 --- up 3m12s --------------------------+
//! | memory   resident 128M  staged 1M  swapped 30M  ballooned 64M  untouched 33M   |
//! | active   128M, the largest of slow 120M, fast 128M, now 100M (12 periods)      |
//! | balloon  healthy, asked 64M, reported 60M, at most 150M                        |
//! | sharing  own: shared 40M saved 33M broken 1M 4/s  scan 12 MB/s 1.1%            |
//! | guest    free 30M  available 80M  caches 50M  major faults 12  (2 s old)       |
//! | traffic  swap in 0.0 MB/s  out 1.2 MB/s  faults 12/s  waits 0/s  blocks 0/s    |
//! | why      target 160 MiB: ...                                                   |
//! | used ___--^^--__      target ____----____      active __-^-__                  |   <- history
//! +--------------------------------------------------------------------------------+
//!  q quit  arrows select  s shares  m min  x max  t tax  w why  ? help                 <- footer
//! ```
//!
//! A small screen loses the detail pane first, then the host's text; a wide one gives its width to
//! the bars and puts the history to the right of the details.
//!
//! [`app`] holds the state: `update(event)` changes it and returns what to ask the manager; it does
//! no I/O and knows no clock. [`draw`] turns it into cells. [`live`] is the shell around the two,
//! [`plain`] the view for anything but a terminal.

mod app;
mod draw;
mod edit;
mod history;
mod keys;
mod live;
mod palette;
mod plain;
mod rates;
mod source;

#[cfg(test)]
mod app_tests;
#[cfg(test)]
mod draw_tests;
#[cfg(test)]
mod samples;

use std::io::IsTerminal;
use std::time::Duration;

use ballast_api::client::Client;

use crate::args::TopArgs;
use crate::failure::Failure;

/// The least time that the manager is given to answer a look.
const PATIENCE: Duration = Duration::from_secs(5);

/// Fails at once where the manager cannot be reached; later absences are waited out.
pub async fn run(client: Client, args: &TopArgs, json: bool) -> Result<(), Failure> {
    let client = client.with_timeout(PATIENCE.max(args.interval));
    let on_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    if json || args.once || !on_terminal {
        plain::run(&client, args, json).await
    } else {
        live::run(client, args.interval).await
    }
}
