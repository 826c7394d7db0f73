#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ballast_qemu::fuzzing::check_agent(bytes));
