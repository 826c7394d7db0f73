#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ballast_shim_proto::fuzzing::check(bytes));
