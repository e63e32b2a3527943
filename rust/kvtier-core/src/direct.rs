//! Reads from NVMe that go past the memory tier.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use crate::sync::{Condvar, Mutex};
use kvtier_codec::checksum::{copy, copy_hash64, hash64};
use kvtier_codec::image::{self, Id, PAGE, Segment, Shape, page_ceil};
use kvtier_nvme::IoBuf;
use kvtier_nvme::Read;

use crate::arena::Pin;
use crate::index::Cold;
use crate::layout::Piece;
use crate::load::Miss;
use crate::order::Known;
use crate::shares::NOBODY;
use crate::store::Inner;

/// What to read.
pub(crate) enum Part {
    /// All of the payload, straight to this page-aligned place in a registered region.
    Region(*mut u8, Arc<dyn Any + Send + Sync>),
    /// The layers that fill `[from, to)` of the payload.
    Layers(usize, usize),
}

#[derive(Default)]
struct Latch {
    state: Mutex<(usize, bool)>, // (reads under way, one failed)
    changed: Condvar,
}

/// Bytes of an image that lie in memory: `[at, at + len)`.
#[derive(Clone, Copy)]
struct Span {
    at: usize,
    len: usize,
    ptr: *mut u8,
}

impl Span {
    /// # Safety
    /// The read into the span must have completed.
    unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the span's memory is pinned, or the caller's region; the read has completed.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

/// A read under way.
pub(crate) struct Direct {
    block: Known,
    id: Id,
    shape: Shape,
    cold: Cold,
    body: Span,
    tail: Span,
    in_place: bool,
    latch: Arc<Latch>,
    _scratch: Option<Pin>,
}

impl Inner {
    /// Starts a direct read. `None`: no room now for the parts that are not the caller's.
    pub(crate) fn read_direct(
        &self,
        block: Known,
        id: Id,
        shape: Shape,
        cold: Cold,
        part: Part,
    ) -> Option<Direct> {
        let nvme = &self.cold.as_ref()?.tier;
        let (at, len) = match &part {
            Part::Region(..) => (0, shape.payload() / PAGE * PAGE),
            Part::Layers(from, to) => (from / PAGE * PAGE, page_ceil(*to) - from / PAGE * PAGE),
        };
        let tail_at = match &part {
            Part::Region(..) => len,
            Part::Layers(..) => shape.table_offset() / PAGE * PAGE,
        };
        let tail_len = shape.image_len() - tail_at;
        let in_place = matches!(part, Part::Region(..));
        let scratch_len = tail_len + if in_place { 0 } else { len };
        let scratch = match scratch_len {
            0 => None,
            bytes => {
                let pages = (bytes / PAGE) as u32;
                let reserved = self.reserve(0, pages, NOBODY, None);
                Some(reserved.ok()?.0.temporary())
            }
        };
        let scratch_ptr = scratch.as_ref().map_or(std::ptr::null_mut(), Pin::ptr);
        let body_ptr = match &part {
            Part::Region(ptr, _) => *ptr,
            Part::Layers(..) => scratch_ptr.wrapping_add(tail_len),
        };
        let spans = [
            Span {
                at,
                len,
                ptr: body_ptr,
            },
            Span {
                at: tail_at,
                len: tail_len,
                ptr: scratch_ptr,
            },
        ];
        let latch = Arc::new(Latch::default());
        latch.state.lock().0 = spans.iter().filter(|s| s.len > 0).count();
        let keep_scratch: Arc<dyn Any + Send + Sync> = Arc::new(scratch.clone());
        for (i, span) in spans.iter().enumerate().filter(|(_, s)| s.len > 0) {
            let keep = match (&part, i) {
                (Part::Region(_, keep), 0) => keep.clone(),
                _ => keep_scratch.clone(),
            };
            // SAFETY: `keep` keeps the memory valid; nobody else touches it until the read is done.
            let buf = unsafe { IoBuf::new(span.ptr, span.len, keep) };
            let latch = latch.clone();
            nvme.read(Read {
                slot: cold.slot,
                offset: span.at as u32,
                len: span.len as u32,
                buf,
                hold: nvme.hold(cold.slot),
                urgent: true,
                attended: None,
                done: Box::new(move |result| {
                    let mut state = latch.state.lock();
                    state.0 -= 1;
                    state.1 |= result.is_err();
                    drop(state);
                    latch.changed.notify_all();
                }),
            });
        }
        Some(Direct {
            block,
            id,
            shape,
            cold,
            body: spans[0],
            tail: spans[1],
            in_place,
            latch,
            _scratch: scratch,
        })
    }
}

impl Direct {
    pub(crate) fn block(&self) -> Known {
        self.block
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    pub(crate) fn place(&self) -> &Cold {
        &self.cold
    }

    fn wait(&self, deadline: Instant) -> Result<(), Miss> {
        let mut state = self.latch.state.lock();
        while state.0 > 0 {
            if self
                .latch
                .changed
                .wait_until(&mut state, deadline)
                .timed_out()
                && state.0 > 0
            {
                return Err(Miss::Deadline);
            }
        }
        if state.1 { Err(Miss::Device) } else { Ok(()) }
    }

    /// Waits for the bytes, verifies them and brings them to `out`.
    ///
    /// # Safety
    /// `out` must be valid for writes of the pieces' bytes; for a region it is the place that was
    /// read to.
    pub(crate) unsafe fn finish(
        &self,
        pieces: &[Piece],
        out: *mut u8,
        deadline: Instant,
    ) -> Result<(), Miss> {
        self.wait(deadline)?;
        // SAFETY: both reads have completed.
        let (body, tail) = unsafe {
            (
                self.body.bytes(),
                if self.tail.len > 0 {
                    self.tail.bytes()
                } else {
                    &[]
                },
            )
        };
        let payload = self.shape.payload();
        if self.in_place {
            // SAFETY: `out` is `payload` bytes long, and the tail holds what follows the body.
            unsafe { copy(out.add(body.len()), tail.as_ptr(), payload - body.len()) };
        }
        let table = if self.shape.table_len() == 0 {
            // SAFETY: the whole payload lies at `out` now.
            let whole = unsafe { std::slice::from_raw_parts(out, payload) };
            image::table(whole, 0, self.shape)
        } else {
            image::table(tail, self.tail.at, self.shape)
        };
        if !image::table_matches(
            &table,
            self.cold.root,
            self.shape,
            &self.id,
            self.cold.slot.generation,
            self.cold.codec,
        ) {
            return Err(Miss::Corrupt);
        }
        if self.in_place {
            // SAFETY: the whole payload lies at `out` now.
            let whole = unsafe { std::slice::from_raw_parts(out, payload) };
            let good = self.shape.table_len() == 0
                || table
                    .iter()
                    .all(|s| hash64(&whole[s.offset as usize..][..s.len as usize]) == s.checksum);
            return good.then_some(()).ok_or(Miss::Corrupt);
        }
        // SAFETY: the caller's contract.
        unsafe { self.copy_pieces(&table, pieces, out) }
    }

    unsafe fn copy_pieces(
        &self,
        table: &[Segment],
        pieces: &[Piece],
        out: *mut u8,
    ) -> Result<(), Miss> {
        // SAFETY: the read has completed.
        let body = unsafe { self.body.bytes() };
        let mut verified = None;
        for piece in pieces {
            let segment = table[piece.segment as usize];
            let (offset, len) = (segment.offset as usize, segment.len as usize);
            if offset < self.body.at || offset + len > self.body.at + body.len() {
                return Err(Miss::Corrupt);
            }
            let bytes = &body[offset - self.body.at..][..len];
            let within = piece.offset - offset;
            let good = if piece.len == len {
                // SAFETY: `out` has room for the piece.
                unsafe { copy_hash64(out.add(piece.to), bytes.as_ptr(), len) == segment.checksum }
            } else {
                let good = verified == Some(piece.segment) || hash64(bytes) == segment.checksum;
                verified = Some(piece.segment);
                // SAFETY: the piece lies in the segment; `out` has room for it.
                unsafe { copy(out.add(piece.to), bytes[within..].as_ptr(), piece.len) };
                good
            };
            if !good {
                return Err(Miss::Corrupt);
            }
        }
        Ok(())
    }
}
