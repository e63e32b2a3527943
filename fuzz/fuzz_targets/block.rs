#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvtier_nvme::fuzzing::block(data));
