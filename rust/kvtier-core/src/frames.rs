//! A few layers of a coded block, read from NVMe and decoded alone: first its table, then the frames
//! that the table names, without the caller in between.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use kvtier_codec::checksum::hash64;
use kvtier_codec::frame::{self, HEADER, Header};
use kvtier_codec::image::{self, Id, PAGE, Segment, Shape, page_ceil};
use kvtier_codec::many;
use kvtier_nvme::{IoBuf, Read, SlotHold};

use crate::arena::Pin;
use crate::coding::Codings;
use crate::index::Cold;
use crate::layout::Piece;
use crate::load::Miss;
use crate::order::Known;
use crate::shares::NOBODY;
use crate::store::Inner;
use crate::sync::{Condvar, Mutex};

/// Bytes of an image that lie in scratch memory: `[at, at + len)`.
#[derive(Clone, Copy)]
struct Span {
    at: usize,
    len: usize,
    /// Where, in the scratch memory.
    to: usize,
}

/// The frames of the layers, and the entries of the table that say what they must be; without a table,
/// the whole payload and none.
type Arrived = Result<(Span, Vec<Segment>), Miss>;

#[derive(Default)]
struct Latch {
    arrived: Mutex<Option<Arrived>>,
    changed: Condvar,
}

/// What is read, as the device's thread needs to know it.
struct Wanted {
    id: Id,
    cold: Cold,
    stored: Shape,
    /// Of all layers of the block, these.
    layers: Range<usize>,
    /// Scratch memory, and how much of it the frames may take.
    scratch: Pin,
    room: usize,
    latch: Arc<Latch>,
}

/// Layers that are on their way.
pub(crate) struct Frames {
    block: Known,
    shape: Shape,
    wanted: Arc<Wanted>,
    /// Where the layers lie in the block.
    segments: Vec<(usize, usize)>,
}

impl Wanted {
    fn arrive(&self, arrived: Arrived) {
        *self.latch.arrived.lock() = Some(arrived);
        self.latch.changed.notify_all();
    }

    /// # Safety
    /// The read into the span must have completed.
    unsafe fn bytes(&self, span: Span) -> &[u8] {
        // SAFETY: the scratch memory is pinned, and holds the span.
        unsafe { std::slice::from_raw_parts(self.scratch.ptr().add(span.to), span.len) }
    }

    /// The table of what was read of the image's end, if it is the right one.
    fn table(&self, span: Span) -> Result<Vec<Segment>, Miss> {
        // SAFETY: called when the read has completed.
        let bytes = unsafe { self.bytes(span) };
        let table = image::table(bytes, span.at, self.stored);
        let (generation, codec) = (self.cold.slot.generation, self.cold.codec);
        let good = image::table_matches(
            &table,
            self.cold.root,
            self.stored,
            &self.id,
            generation,
            codec,
        );
        good.then_some(table).ok_or(Miss::Corrupt)
    }

    /// Has a span read, and calls `then` on the device's thread.
    fn read(
        self: &Arc<Self>,
        inner: &Inner,
        span: Span,
        hold: SlotHold,
        then: impl FnOnce(&Arc<Self>) + Send + 'static,
    ) {
        let Some(nvme) = &inner.cold else {
            return self.arrive(Err(Miss::Device));
        };
        let keep: Arc<dyn Any + Send + Sync> = Arc::new(self.scratch.clone());
        // SAFETY: the scratch memory is pinned, and the span lies in it; nobody else touches it
        // until the read is done.
        let buf = unsafe { IoBuf::new(self.scratch.ptr().add(span.to), span.len, keep) };
        let this = self.clone();
        nvme.tier.read(Read {
            slot: self.cold.slot,
            offset: span.at as u32,
            len: span.len as u32,
            buf,
            hold,
            urgent: true,
            attended: None,
            done: Box::new(move |result| match result {
                Ok(()) => then(&this),
                Err(_) => this.arrive(Err(Miss::Device)),
            }),
        });
    }

    /// The entries of the layers in a table, and what is to be read for them.
    fn named_by(&self, mut table: Vec<Segment>, to: usize) -> Arrived {
        table.truncate(self.layers.end);
        table.drain(..self.layers.start);
        let (Some(first), Some(last)) = (table.first(), table.last()) else {
            return Err(Miss::Corrupt);
        };
        let at = first.offset as usize / PAGE * PAGE;
        let len = page_ceil(last.offset as usize + last.len as usize) - at;
        if len > self.room {
            return Err(Miss::Corrupt);
        }
        Ok((Span { at, len, to }, table))
    }

    /// The frames of the layers, verified.
    fn frames(&self, (span, table): (Span, Vec<Segment>)) -> Result<Vec<&[u8]>, Miss> {
        // SAFETY: what has arrived was read.
        let bytes = unsafe { self.bytes(span) };
        if self.stored.table_len() == 0 {
            self.table(span)?;
            let found = many::headers(&bytes[..self.stored.payload()]);
            let found = found.map_err(|_| Miss::Corrupt)?;
            let found = found.get(self.layers.clone()).ok_or(Miss::Corrupt)?;
            return Ok(found
                .iter()
                .map(|(place, _)| &bytes[place.clone()])
                .collect());
        }
        let frame = |s: &Segment| {
            let frame = &bytes[s.offset as usize - span.at..][..s.len as usize];
            (hash64(frame) == s.checksum).then_some(frame)
        };
        table
            .iter()
            .map(|s| frame(s).ok_or(Miss::Corrupt))
            .collect()
    }
}

impl Inner {
    /// Starts to read `layers` of a coded block, which lie at `segments` of it. `None`: no room for
    /// them now.
    pub(crate) fn read_frames(
        self: &Arc<Self>,
        (block, id, shape): (Known, Id, Shape),
        (cold, stored): (Cold, Shape),
        layers: Range<usize>,
        segments: Vec<(usize, usize)>,
    ) -> Option<Frames> {
        let nvme = &self.cold.as_ref()?.tier;
        let whole = stored.table_len() == 0;
        let tail_at = if whole {
            0
        } else {
            stored.table_offset() / PAGE * PAGE
        };
        let tail = Span {
            at: tail_at,
            len: stored.image_len() - tail_at,
            to: 0,
        };
        // No frame is longer than its layer and a header; they begin and end within pages.
        let most: usize = segments.iter().map(|s| s.1 + HEADER).sum();
        let room = if whole {
            0
        } else {
            page_ceil(most).min(page_ceil(stored.payload())) + PAGE
        };
        let pages = ((tail.len + room) / PAGE) as u32;
        let reserved = self.reserve(0, pages, NOBODY, None);
        let scratch = reserved.ok()?.0.temporary();
        self.begin_coding();
        let wanted = Arc::new(Wanted {
            id,
            cold,
            stored,
            layers,
            scratch,
            room,
            latch: Arc::default(),
        });
        let frames = Frames {
            block,
            shape,
            wanted: wanted.clone(),
            segments,
        };
        if whole {
            let hold = nvme.hold(cold.slot);
            wanted.read(self, tail, hold, move |this| {
                this.arrive(Ok((tail, Vec::new())))
            });
            return Some(frames);
        }
        let (hold, next) = (nvme.hold(cold.slot), nvme.hold(cold.slot));
        let inner = self.clone();
        wanted.read(self, tail, hold, move |this| {
            let table = this.table(tail);
            match table.and_then(|table| this.named_by(table, tail.len)) {
                Err(miss) => this.arrive(Err(miss)),
                Ok((span, table)) => this.read(&inner, span, next, move |this| {
                    this.arrive(Ok((span, table)));
                }),
            }
        });
        Some(frames)
    }
}

impl Frames {
    pub(crate) fn block(&self) -> Known {
        self.block
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    pub(crate) fn place(&self) -> &Cold {
        &self.wanted.cold
    }

    fn wait(&self, deadline: Instant) -> Arrived {
        let latch = &self.wanted.latch;
        let mut arrived = latch.arrived.lock();
        loop {
            if let Some(arrived) = &*arrived {
                return arrived.clone();
            }
            if latch.changed.wait_until(&mut arrived, deadline).timed_out() && arrived.is_none() {
                return Err(Miss::Deadline);
            }
        }
    }

    /// Waits for the frames, and decodes to `out` what the pieces take.
    ///
    /// # Safety
    /// `out` must be valid for writes of the pieces' bytes.
    pub(crate) unsafe fn finish(
        &self,
        pieces: &[Piece],
        out: *mut u8,
        deadline: Instant,
        codings: &Codings,
    ) -> Result<(), Miss> {
        let frames = self.wanted.frames(self.wait(deadline)?)?;
        for of_layer in pieces.chunk_by(|a, b| a.segment == b.segment) {
            let (first, last) = (of_layer[0], of_layer[of_layer.len() - 1]);
            let room = last.to + last.len - first.to;
            // SAFETY: the caller's contract.
            let out = unsafe { std::slice::from_raw_parts_mut(out.add(first.to), room) };
            let i = (of_layer[0].segment as usize)
                .checked_sub(self.wanted.layers.start)
                .ok_or(Miss::Corrupt)?;
            let (Some(frame), Some(&segment)) = (frames.get(i), self.segments.get(i)) else {
                return Err(Miss::Corrupt);
            };
            decode(frame, segment, of_layer, out, codings)?;
        }
        Ok(())
    }
}

/// Decodes the pieces of a layer from its frame.
fn decode(
    frame: &[u8],
    (offset, len): (usize, usize),
    pieces: &[Piece],
    out: &mut [u8],
    codings: &Codings,
) -> Result<(), Miss> {
    let header = Header::read(frame).map_err(|_| Miss::Corrupt)?;
    let form = header.form;
    if form.raw_len() != len {
        return Err(Miss::Corrupt);
    }
    let body = if header.zstd { len } else { 0 };
    let plane = form.plane_len();
    let token = plane / form.tokens as usize;
    let from = (pieces[0].offset - offset) / token;
    let taken = from..from + pieces[0].len / token;
    let first = pieces[0].to;
    // The same tokens of each plane, one after another, or the layer as it is.
    let of_planes = pieces.len() == form.planes as usize
        && pieces.iter().enumerate().all(|(p, piece)| {
            piece.offset == offset + p * plane + taken.start * token
                && piece.len == taken.len() * token
                && piece.to == first + p * piece.len
        });
    let tokens = if pieces[0].len == len {
        Some(0..form.tokens)
    } else if of_planes {
        Some(taken.start as u32..taken.end as u32)
    } else {
        None
    };
    if let Some(tokens) = tokens {
        let _room = codings.decoding(body)?;
        return frame::decode_tokens(frame, &form, tokens, out).map_err(|_| Miss::Corrupt);
    }
    let _room = codings.decoding(body + len)?;
    let mut layer = vec![0; len];
    frame::decode(frame, &form, &mut layer).map_err(|_| Miss::Corrupt)?;
    for piece in pieces {
        let from = &layer[piece.offset - offset..][..piece.len];
        out[piece.to - first..][..piece.len].copy_from_slice(from);
    }
    Ok(())
}
