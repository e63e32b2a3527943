//! What the fuzzer feeds, and the tests too.

use super::{HEADER, Header, checksum, decode_at, decode_tokens};
use crate::simd::Level;

/// Arrays larger than this are not decoded here: the caller's memory decides, not the frame.
const LARGEST: usize = 1 << 20;

/// The same bytes with the checksum put right, whatever they say.
pub fn resealed(mut frame: Vec<u8>) -> Vec<u8> {
    if frame.len() >= HEADER {
        let sum = checksum(&frame[..HEADER - 8], &frame[HEADER..]);
        frame[HEADER - 8..HEADER].copy_from_slice(&sum.to_le_bytes());
    }
    frame
}

/// Decodes any bytes, as they are and with the checksum put right: an error or some numbers, the same
/// on every instruction set.
pub fn decodes(data: &[u8]) {
    for frame in [data.to_vec(), resealed(data.to_vec())] {
        let Ok(header) = Header::read(&frame) else {
            continue;
        };
        let form = header.form;
        if form.raw_len() > LARGEST {
            continue;
        }
        let mut whole = vec![0; form.raw_len()];
        let result = decode_at(Level::BASELINE, &frame, &form, 0..form.tokens, &mut whole);
        for level in Level::all() {
            let mut same = vec![0; form.raw_len()];
            let other = decode_at(level, &frame, &form, 0..form.tokens, &mut same);
            assert_eq!(result, other);
            assert!(result.is_err() || same == whole, "{level:?} differs");
        }
        let (from, to) = (form.tokens / 3, form.tokens.div_ceil(2));
        let mut part = vec![0; form.with_tokens(to - from).raw_len()];
        let some = decode_tokens(&frame, &form, from..to, &mut part);
        assert_eq!(result.is_ok(), some.is_ok());
        if result.is_ok() {
            let token = form.plane_len() / form.tokens as usize;
            let planes = whole.chunks_exact(form.plane_len());
            let same = planes.flat_map(|p| &p[from as usize * token..to as usize * token]);
            assert!(same.eq(&part), "a part is other than in the whole");
        }
    }
}
