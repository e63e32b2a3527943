//! Many segments at once, on a bounded number of threads that end with the call.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::form::Form;
use crate::frame::{Bad, Codec, Header, bound, decode_tokens, encode};

/// Fewer bytes than this are not worth another thread.
const SHARE: usize = 256 << 10;

/// How many of `threads` so many bytes are worth.
pub fn useful(threads: usize, bytes: usize) -> usize {
    threads.clamp(1, (bytes / SHARE).max(1))
}

/// Has this thread and up to `threads` - 1 others, which end with the call, take the parts one by
/// one. What `run` makes of them, in order.
pub fn spread<P: Send, T: Send>(
    threads: usize,
    parts: Vec<P>,
    run: impl Fn(P) -> T + Sync,
) -> Vec<T> {
    let others = threads.min(parts.len()).saturating_sub(1);
    if others == 0 {
        return parts.into_iter().map(run).collect();
    }
    let queue = Mutex::new(parts.into_iter().enumerate());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || -> Vec<(usize, T)> {
        let mut done = Vec::new();
        while let Some((i, part)) = next() {
            done.push((i, run(part)));
        }
        done
    };
    let mut done = thread::scope(|scope| {
        // A thread that cannot be had is made up for by the others.
        let start = || {
            let thread = thread::Builder::new().name("kvtier-code".into());
            thread.spawn_scoped(scope, work).ok()
        };
        let others: Vec<_> = (0..others).filter_map(|_| start()).collect();
        let mut done = work();
        for other in others {
            let more = other.join();
            done.extend(more.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    done.sort_unstable_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, made)| made).collect()
}

/// The frames of equal arrays that lie one after another, one after another.
///
/// # Panics
/// If `form` is not valid, or `src` does not hold whole arrays.
pub fn encode_all(codec: Codec, form: &Form, src: &[u8], threads: usize) -> Vec<u8> {
    let raw = form.raw_len();
    assert!(form.is_valid() && src.len().is_multiple_of(raw));
    let run = |src: &[u8]| {
        let mut frames = Vec::with_capacity(src.len() / raw * bound(form));
        let mut frame = vec![0; bound(form)];
        for array in src.chunks_exact(raw) {
            let (len, _) = encode(codec, form, array, &mut frame);
            frames.extend_from_slice(&frame[..len]);
        }
        frames
    };
    let threads = useful(threads, src.len());
    if threads == 1 {
        return run(src);
    }
    let share = (src.len() / raw).div_ceil(threads) * raw;
    spread(threads, src.chunks(share).collect(), run).concat()
}

/// Where each of the frames lies that fill `frames`, and what it says of itself.
pub fn headers(frames: &[u8]) -> Result<Vec<(Range<usize>, Header)>, Bad> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < frames.len() {
        let header = Header::read(&frames[at..])?;
        let end = at + header.frame_len();
        if end > frames.len() {
            return Err(Bad::Length);
        }
        found.push((at..end, header));
        at = end;
    }
    Ok(found)
}

/// The tokens of an array that are taken: all, if none are named.
fn taken(form: &Form, tokens: Option<&Range<u32>>) -> Range<u32> {
    tokens.cloned().unwrap_or(0..form.tokens)
}

/// Bytes that they are.
fn taken_len(form: &Form, tokens: Option<&Range<u32>>) -> usize {
    let count = taken(form, tokens).len();
    form.with_tokens(count as u32).raw_len()
}

/// Bytes that those tokens of these frames decode to; `None`: one of the arrays has not all of them.
pub fn decoded_len(found: &[(Range<usize>, Header)], tokens: Option<&Range<u32>>) -> Option<usize> {
    let len = |(_, header): &(_, Header)| {
        let taken = taken(&header.form, tokens);
        let has = taken.start <= taken.end && taken.end <= header.form.tokens;
        has.then(|| taken_len(&header.form, tokens))
    };
    found.iter().map(len).sum()
}

/// Decodes those tokens of each of these frames into `dst`, one array after another.
///
/// # Panics
/// If `dst` is not as long as [`decoded_len`] says, or that says nothing.
pub fn decode_all(
    frames: &[u8],
    found: &[(Range<usize>, Header)],
    tokens: Option<&Range<u32>>,
    dst: &mut [u8],
    threads: usize,
) -> Result<(), Bad> {
    let total = dst.len();
    let mut work = Vec::with_capacity(found.len());
    let mut rest = dst;
    for (at, header) in found {
        let (mine, behind) = rest.split_at_mut(taken_len(&header.form, tokens));
        rest = behind;
        work.push((&frames[at.clone()], header.form, mine));
    }
    assert!(rest.is_empty(), "the target is longer than what is decoded");
    let run = |work: &mut [(&[u8], Form, &mut [u8])]| {
        work.iter_mut()
            .try_for_each(|(frame, form, dst)| decode_tokens(frame, form, taken(form, tokens), dst))
    };
    let threads = useful(threads, total);
    if threads == 1 {
        return run(&mut work);
    }
    let share = work.len().div_ceil(threads);
    let parts = work.chunks_mut(share).collect();
    spread(threads, parts, run).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::form::Dtype;

    #[test]
    fn any_number_of_threads_gives_the_same() {
        let form = Form {
            planes: 2,
            tokens: 16,
            heads: 4,
            dim: 64,
            dtype: Dtype::Fp16,
        };
        let src: Vec<u8> = (0..100 * form.raw_len())
            .map(|i| (i % 251 % 60) as u8)
            .collect();
        let codec: Codec = "int8_token".parse().unwrap();
        let frames = encode_all(codec, &form, &src, 1);
        let found = headers(&frames).unwrap();
        assert_eq!(found.len(), 100);
        let mut want = vec![0; src.len()];
        decode_all(&frames, &found, None, &mut want, 1).unwrap();
        for threads in [2, 3, 7] {
            assert!(encode_all(codec, &form, &src, threads) == frames);
            let mut back = vec![0; src.len()];
            decode_all(&frames, &found, None, &mut back, threads).unwrap();
            assert!(back == want);
        }
        assert_eq!(headers(&frames[..frames.len() - 1]), Err(Bad::Length));
        assert!(encode_all(codec, &form, &[], 2).is_empty());
    }
}
