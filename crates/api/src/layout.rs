//! Names in the manager's run folder that other programs go by, too: who ends a VM or reads a journal while no
//! manager runs.

/// The API's socket, unless it is put elsewhere.
pub const API_SOCKET: &str = "api.sock";
/// Locked by the manager that runs.
pub const LOCK: &str = "lock";
/// The folder of the journal, unless it is put elsewhere.
pub const JOURNAL: &str = "journal";
/// The run folder of the service, unless it is another's.
pub const RUN_DIR: &str = "/run/ballast";
/// Where VMs swap to of a manager whose run folder is the service's, unless it is put elsewhere.
pub const SERVICE_SWAP: &str = "/var/lib/ballast/swap";
/// Where the journal is of a manager whose run folder is the service's, unless it is put elsewhere: it outlives the host.
pub const SERVICE_JOURNAL: &str = "/var/lib/ballast/journal";
/// The folder with a folder for each VM, under its name.
pub const VMS: &str = "vms";
/// In a VM's folder, its record: while the manager has the VM, or is to take it over.
pub const RECORD: &str = "vm.json";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_is_in_the_run_folder() {
        assert_eq!(crate::DEFAULT_SOCKET, format!("{RUN_DIR}/{API_SOCKET}"));
    }
}
