//! A ballastd without VMs, to look at `ballast top` by hand:
//! `cargo run --example fake_ballastd /tmp/fake.sock`, then `ballast --socket /tmp/fake.sock top`.

#[path = "../tests/common/mod.rs"]
mod common;

fn main() {
    let socket = std::env::args_os().nth(1).unwrap_or_else(|| "fake.sock".into());
    let fake = common::Fake::at(socket.as_ref());
    println!("listening on {}; Ctrl-C ends it", fake.socket.display());
    loop {
        std::thread::park();
    }
}
