//! A shim comes again to the manager that it had: their conversation broke off, and both live.
//!
//! Its VM is in the pager's hands, and stays there: nothing of it is booked or looked for anew, and the userfaultfd is
//! the one that the manager has. Only the way to the shim is another. In this order:
//!
//! 1. It is the process of that VM, and its RAM is where it was, of the same files.
//! 2. What is left of the former conversation is ended: whoever waits for an answer there hears that none will come.
//! 3. Managed; then the new conversation takes the place of the former.
//! 4. Pages of a batch that was never answered are looked up. The shim ends each batch before it connects again, so where
//!    they are mapped does not change any more; until now they were left as they are, busy.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ballast_pager::guest_ram::{GuestRam, RamPart};
use ballast_shim_proto::{Connection, Hello, Part, Peer};

use crate::handshakes::Keeper;
use crate::manager::Manager;
use crate::paging::managed;
use crate::shim_link;

/// After it came in, its place in the handshakes is kept for so long: nobody comes again and again any faster.
const APART: Duration = Duration::from_millis(200);

/// Takes the shim of a VM in again that this manager has, or says why not. `fds` are those of Hello.
///
/// # Errors
/// It is no shim of such a VM, its RAM is another than before, or the connection has ended: all is as it was.
pub fn rejoin(
    manager: &Manager,
    connection: &Arc<Connection>,
    hello: &Hello,
    fds: &[OwnedFd],
    peer: Peer,
    connections: &Keeper,
) -> Result<(), String> {
    let name = hello.vm.as_str();
    let vm = manager.vms().into_iter().find(|vm| vm.name == name);
    let vm = vm.ok_or_else(|| format!("this manager does not know '{name}'"))?;
    if vm.process.pid() != peer.pid {
        return Err(format!("'{name}' is process {}, not {}", vm.process.pid(), peer.pid));
    }
    // A number is another process's when it has ended; as long as it has not, it is this one's.
    if !vm.process.is_alive() {
        return Err(format!("the process of '{name}' has ended"));
    }
    let mappings = {
        let paged = vm.paged();
        let Some(paged) = &*paged else { return Err(format!("'{name}' is not paged")) };
        check_ram(paged.memory().backend(), hello, fds)?;
        Arc::clone(paged.memory().backend().mappings())
    };
    // Its end waits for whoever looks at its pager, and others for that: nobody may who waits for its VMM.
    connections.keep(peer.pid, connection.clone());
    shim_link::reconnect(&mappings, (connection, hello), || managed(connection))
        .inspect_err(|_| connections.hang_up(peer.pid))?;
    if let Some(paged) = &*vm.paged() {
        paged.reconnected();
    }
    std::thread::sleep(APART);
    Ok(())
}

/// What came is the RAM that the pager has.
fn check_ram(ram: &GuestRam, hello: &Hello, fds: &[OwnedFd]) -> Result<(), String> {
    let announced = |part: &RamPart| Part {
        addr: part.base,
        len: part.len.bytes(),
        file_offset: part.file_offset,
    };
    if !ram.layout().parts().map(announced).eq(hello.parts.iter().copied()) {
        return Err("its RAM is not where it was".to_owned());
    }
    // The last one is the userfaultfd.
    let files = fds.get(..hello.parts.len()).unwrap_or_default();
    let mut came = Vec::with_capacity(files.len());
    for file in files {
        let stat = rustix::fs::fstat(file).map_err(|e| format!("its RAM file: {e}"))?;
        came.push((stat.st_dev, stat.st_ino));
    }
    if ram.identities().map_err(|e| format!("its RAM file: {e}"))? != came {
        return Err("its RAM file is another than before".to_owned());
    }
    Ok(())
}
