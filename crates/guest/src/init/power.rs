//! The power button (QMP `system_powerdown` presses it), and the power-off.
//!
//! The `button` module turns the ACPI event into a key, and `evdev` hands the key to us.

use std::os::fd::{AsRawFd, OwnedFd};
use std::process::ExitCode;
use std::time::Duration;

const EV_KEY: u16 = 1;
const KEY_POWER: u16 = 116;

pub struct Buttons {
    devices: Vec<OwnedFd>,
}

impl Buttons {
    /// Opens every input device; a keyboard's other keys are ignored.
    pub fn open() -> Buttons {
        let devices = (0..32)
            .filter_map(|n| {
                std::fs::OpenOptions::new().read(true).open(format!("/dev/input/event{n}")).ok()
            })
            .map(OwnedFd::from)
            .collect();
        Buttons { devices }
    }

    pub fn count(&self) -> usize {
        self.devices.len()
    }

    /// Waits for at most `wait`; true if the power button was pressed.
    pub fn pressed(&self, wait: Duration) -> bool {
        let mut polled: Vec<libc::pollfd> = self
            .devices
            .iter()
            .map(|d| libc::pollfd { fd: d.as_raw_fd(), events: libc::POLLIN, revents: 0 })
            .collect();
        let wait = libc::c_int::try_from(wait.as_millis()).unwrap_or(libc::c_int::MAX);
        // SAFETY: the array and its length belong together, and it lives through the call.
        let ready = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, wait) };
        ready > 0 && polled.iter().filter(|p| p.revents & libc::POLLIN != 0).any(|p| read(p.fd))
    }
}

/// Reads the events that wait; true if one is a press of the power button.
fn read(fd: libc::c_int) -> bool {
    const SIZE: usize = size_of::<libc::input_event>();
    let mut buffer = [0u8; SIZE * 32];
    // SAFETY: the buffer is valid for its whole length, and the descriptor belongs to Buttons.
    let got = unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) };
    let Ok(got) = usize::try_from(got) else { return false };
    buffer[..got].chunks_exact(SIZE).any(is_press)
}

/// struct input_event: a time, then type and code of 16 bits each, and a value of 32.
fn is_press(event: &[u8]) -> bool {
    let at = size_of::<libc::timeval>();
    let half = |o: usize| u16::from_le_bytes([event[at + o], event[at + o + 1]]);
    half(0) == EV_KEY && half(2) == KEY_POWER && half(4) == 1
}

/// Writes out, unmounts, and powers off. Returns only if the kernel refuses.
pub fn off() -> ExitCode {
    // SAFETY: plain system calls with a NUL-ended path; all that this process still holds may be
    // lost now.
    unsafe {
        libc::sync();
        libc::umount2(c"/disk".as_ptr(), libc::MNT_DETACH);
        libc::sync();
        libc::reboot(libc::RB_POWER_OFF);
    }
    // A kernel without a way to power off: halting is all that is left.
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: u16, code: u16, value: u32) -> Vec<u8> {
        let mut bytes = vec![9; size_of::<libc::timeval>()];
        bytes.extend(kind.to_le_bytes());
        bytes.extend(code.to_le_bytes());
        bytes.extend(value.to_le_bytes());
        bytes
    }

    #[test]
    fn only_a_press_of_the_power_key_counts() {
        assert_eq!(event(1, 116, 1).len(), size_of::<libc::input_event>());
        assert!(is_press(&event(EV_KEY, KEY_POWER, 1)));
        assert!(!is_press(&event(EV_KEY, KEY_POWER, 0)));
        assert!(!is_press(&event(EV_KEY, 30, 1)));
        assert!(!is_press(&event(0, KEY_POWER, 1)));
    }
}
