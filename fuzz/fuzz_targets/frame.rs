#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvtier_codec::frame::fuzzing::decodes(data));
