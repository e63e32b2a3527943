//! Reading blocks: copies into the caller's memory.

use std::sync::{Arc, Weak};
use std::time::Instant;

use kvtier_codec::checksum::fence;
use kvtier_codec::image::{self, Id};

use crate::ahead::Ahead;
use crate::arena::Pin;
use crate::direct::{Direct, Part};
use crate::error::{Error, Kind, Result};
use crate::flight::Wait;
use crate::frames::Frames;
use crate::hbm::HBM;
use crate::index::{Cold, Entry};
use crate::layout::{Piece, Selection};
use crate::load::{Flight, Found, Miss, readable};
use crate::order::Known;
use crate::policy::Handle;
use crate::reader::{Proof, copy_out, copy_proven};
use crate::store::{Inner, NVME, Namespace, Store};

/// Looks at the index after which a reader whose deadline has passed gives up.
pub(crate) const LOOKS: usize = 16;

/// Where a read puts its bytes.
#[derive(Clone, Copy, Debug)]
pub struct Out {
    /// The first byte.
    pub ptr: *mut u8,
    /// Bytes there: exactly what the selection takes from the block; of tokens that go where they
    /// lie, what it would take with all of them.
    pub len: usize,
}

// SAFETY: a destination that the caller hands over for the time of the call.
unsafe impl Send for Out {}

/// What became of one key of a read.
pub type Got = std::result::Result<&'static str, Miss>;

/// A flight that the caller has promised to wait for.
pub(crate) struct Watched<'a> {
    pub(crate) flight: Arc<Flight>,
    pub(crate) inner: &'a Arc<Inner>,
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.flight.unwatch(self.inner);
    }
}

/// What is under way for a key that was not in memory when it was looked up.
enum Pending<'a> {
    Flight(Watched<'a>),
    Direct(Direct),
    Frames(Frames),
}

/// What a key needs before it can be read.
enum Begun<'a> {
    /// This.
    Pending(Pending<'a>),
    /// Nothing: look at the index.
    Ready,
    /// It is not to be had now.
    Failed(Miss),
}

/// Orders what a call copies before what its thread tells others then, however the call ends.
struct Fenced;

impl Drop for Fenced {
    fn drop(&mut self) {
        fence();
    }
}

/// What all keys of a call share.
struct Call<'a> {
    ns: &'a Namespace,
    deadline: Instant,
    keys: usize,
}

/// A key of a call, with what it wants.
struct Request<'a> {
    call: &'a Call<'a>,
    selection: &'a Selection,
    id: Id,
    out: Out,
}

impl Request<'_> {
    fn pieces(&self, shape: image::Shape) -> Result<Vec<Piece>> {
        if self.call.ns.layout.shape(shape.payload())? != shape {
            return Err(Error::new(
                Kind::InvalidBlock,
                "another layout was given than the one that the block was stored with. Name the layout in the namespace's identity",
            ));
        }
        let pieces = self.call.ns.layout.pieces(shape, self.selection)?;
        let bytes = self.call.ns.layout.extent(shape, self.selection, &pieces);
        if bytes != self.out.len {
            return Err(Error::new(
                Kind::InvalidBlock,
                format!(
                    "a buffer of {} bytes was given for {bytes} bytes of a block of {}. Give each key a buffer of exactly that size",
                    self.out.len,
                    shape.payload()
                ),
            ));
        }
        Ok(pieces)
    }

    /// Bytes that it copies.
    fn bytes(&self) -> usize {
        self.call.ns.layout.taken(self.selection, self.out.len)
    }
}

impl Store {
    /// Copies blocks, or the same part of each, into the caller's memory, and verifies them. One
    /// result a key: the tier that it was found in, or why it is a miss; after a miss the key's
    /// buffer holds nothing that may be used.
    ///
    /// # Safety
    /// Each `out` must be valid for writes of its length until the call returns, and they must not
    /// overlap. Inside a registered region it must stay valid while the region lives.
    pub unsafe fn get_into(
        &self,
        ns: &Namespace,
        keys: &[&[u8]],
        outs: &[Out],
        selection: &Selection,
        deadline: Instant,
    ) -> Result<Vec<Got>> {
        // SAFETY: the caller's contract.
        unsafe { self.get_each_into(ns, keys, outs, &[selection], deadline) }
    }

    /// As [`Store::get_into`], of each block a part of its own, or of all the same one.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn get_each_into(
        &self,
        ns: &Namespace,
        keys: &[&[u8]],
        outs: &[Out],
        selections: &[&Selection],
        deadline: Instant,
    ) -> Result<Vec<Got>> {
        let inner = &self.inner;
        let _fenced = Fenced;
        inner.check_open()?;
        if selections.len() != 1 && selections.len() != keys.len() {
            return Err(Error::new(
                Kind::InvalidBlock,
                format!(
                    "parts of {} blocks were given for {} keys; one a key is needed",
                    selections.len(),
                    keys.len()
                ),
            ));
        }
        if keys.len() != outs.len() {
            return Err(Error::new(
                Kind::InvalidBlock,
                format!(
                    "{} buffers were given for {} keys; one a key is needed",
                    outs.len(),
                    keys.len()
                ),
            ));
        }
        let call = Call {
            ns,
            deadline,
            keys: keys.len(),
        };
        let requests: Vec<Request<'_>> = inner
            .ids(ns, keys)?
            .into_iter()
            .zip(outs)
            .zip(selections.iter().cycle())
            .map(|((id, &out), selection)| Request {
                call: &call,
                selection,
                id,
                out,
            })
            .collect();
        let mut ahead = Ahead::new(requests.len());
        let mut results = Vec::with_capacity(requests.len());
        let mut used: Vec<(usize, Handle)> = Vec::with_capacity(requests.len());
        let begun = Instant::now();
        let mut started = begun;
        let mut bytes = vec![0; inner.tiers()];
        for (i, request) in requests.iter().enumerate() {
            inner.foresee(&requests[i + 1..]);
            let first = ahead.take(i, |next| {
                Ok(match inner.begin(&requests[next], None)? {
                    Begun::Pending(p) => (Some((p, requests[next].out.len)), true),
                    Begun::Ready => (None, true),
                    Begun::Failed(_) => (None, false),
                })
            })?;
            let got = inner.get_one(request, first, &mut || ahead.give_way(i))?;
            let ended = Instant::now();
            let taken = ended - std::mem::replace(&mut started, ended);
            match got {
                Ok((tier, h)) => {
                    used.push((tier, h));
                    bytes[tier] += request.bytes();
                    if tier == inner.memory.len() {
                        inner.spent.note(h);
                    } else if inner.cold.is_some() {
                        inner.spent.used(h);
                    }
                    inner.tier_stats(tier).get.record(taken);
                }
                Err(_) => inner.stats.misses.add(1),
            }
            results.push(got.map(|(tier, _)| inner.tier_name(tier)));
        }
        for (tier, &sum) in bytes.iter().enumerate() {
            let hits = used.iter().filter(|used| used.0 == tier).count();
            let stats = inner.tier_stats(tier);
            stats.hits.add(hits as u64);
            stats.hit_bytes.add(sum as u64);
            let pacer = inner.memory.get(tier).and_then(|m| m.pacer.as_ref());
            if let (Some(pacer), 1..) = (pacer, sum) {
                pacer.pass_since(sum, begun);
            }
        }
        inner.count_use(ns, keys.len(), &used);
        Ok(results)
    }

    /// Payload bytes that a selection takes from each of these blocks; `None` if it is not there.
    pub fn sizes(
        &self,
        ns: &Namespace,
        keys: &[&[u8]],
        selection: &Selection,
    ) -> Result<Vec<Option<usize>>> {
        self.inner.check_open()?;
        self.inner
            .ids(ns, keys)?
            .iter()
            .map(|id| {
                let shard = self.inner.index.of(id);
                let Some(entry) = shard.find(id).and_then(|h| shard.get(h)) else {
                    return Ok(None);
                };
                let pieces = ns.layout.pieces(entry.shape, selection)?;
                Ok(Some(pieces.iter().map(|p| p.len).sum()))
            })
            .collect()
    }
}

impl Inner {
    /// Has the processor fetch what the next reads of a call need, beside the copy before them: the entry of
    /// the second, and then what that names.
    fn foresee(&self, next: &[Request<'_>]) {
        if let Some(Request { id, .. }) = next.get(2) {
            self.index.prefetch(id);
        }
        if let Some(Request { id, .. }) = next.get(1) {
            self.index.of(id).prefetch(id);
        }
        if let Some(Request { id, .. }) = next.first() {
            let shard = self.index.of(id);
            let entry = shard.find(id).and_then(|h| shard.get(h));
            if let Some((tier, start)) = entry.and_then(Entry::in_memory) {
                self.memory[tier].arena.prefetch(start);
            }
        }
    }

    /// Notes that a call for so many blocks found these, by tier.
    pub(crate) fn count_use(&self, ns: &Namespace, asked: usize, used: &[(usize, Handle)]) {
        let mut order = self.order.lock();
        let missed = asked - used.len();
        order.shares.count_reads(ns.tag(), used.len(), missed);
        // From the tail of the chain to its head, so that the head is the last to leave.
        order.shares.on_hits(used.iter().rev().copied());
    }

    pub(crate) fn tier_stats(&self, tier: usize) -> &crate::stats::TierStats {
        match (self.memory.get(tier), &self.cold) {
            (Some(m), _) => &m.stats,
            (None, Some(cold)) => &cold.stats,
            (None, None) => &self.memory[0].stats,
        }
    }

    pub(crate) fn tier_name(&self, tier: usize) -> &'static str {
        match self.memory.get(tier) {
            Some(m) => m.name,
            None if tier == self.tiers() => HBM,
            None => NVME,
        }
    }

    /// The block, and its payload bytes, if it lies on NVMe only.
    pub(crate) fn cold_only(&self, id: &Id) -> Option<(Known, usize)> {
        self.cold.as_ref()?;
        let shard = self.index.of(id);
        let h = shard.find(id)?;
        let entry = shard.get(h)?;
        let only = entry.in_memory().is_none() && entry.is_cold();
        only.then(|| ((h, entry.epoch), entry.shape.payload()))
    }

    /// Starts the read from NVMe that a key needs, if it does. Waits until `deadline` for room, if there is
    /// one.
    fn begin<'a>(
        self: &'a Arc<Self>,
        request: &Request<'_>,
        deadline: Option<Instant>,
    ) -> Result<Begun<'a>> {
        let Some((known, _)) = self.cold_only(&request.id) else {
            return Ok(Begun::Ready);
        };
        if let Some(pending) = self.begin_direct(known, request)? {
            return Ok(Begun::Pending(pending));
        }
        let deadline = deadline.unwrap_or_else(Instant::now);
        let attended = (request.call.keys == 1).then_some(request.call.deadline);
        Ok(match self.load(known, true, true, deadline, attended) {
            Found::Flying(flight) => Begun::Pending(Pending::Flight(Watched {
                flight,
                inner: self,
            })),
            Found::Resident | Found::Nowhere => Begun::Ready,
            Found::Failed(miss) => Begun::Failed(miss),
        })
    }

    /// Does the block still lie anywhere but in this slot?
    pub(crate) fn lies_elsewhere(&self, id: &Id, tier: usize, start: u32) -> bool {
        let shard = self.index.of(id);
        let entry = shard.find(id).and_then(|h| shard.get(h));
        entry.is_some_and(|entry| entry.memory[tier] != start || entry.is_beside(tier))
    }

    /// Reads only what is wanted, past the memory tier, where that pays: a whole block straight
    /// into a registered region, or a few layers of a large block.
    fn begin_direct<'a>(
        self: &Arc<Self>,
        known: Known,
        request: &Request<'_>,
    ) -> Result<Option<Pending<'a>>> {
        let (shape, cold) = {
            let mut shard = self.index.shard(known.0);
            match shard.get_same(known.0, known.1) {
                Some(entry) => match entry.cold() {
                    Some(cold) => (entry.shape, cold),
                    None => return Ok(None),
                },
                None => return Ok(None),
            }
        };
        let pieces = request.pieces(shape)?;
        let part = if request.selection.is_all() {
            if cold.codec != 0 {
                return Ok(None);
            }
            let at = request.out.ptr as usize;
            let regions = self.regions.lock();
            let mut live = regions.iter().filter_map(Weak::upgrade);
            let Some(region) = live.find(|r| r.holds(at, request.out.len)) else {
                return Ok(None);
            };
            if !at.is_multiple_of(image::PAGE) || shape.payload() < image::PAGE {
                return Ok(None);
            }
            Part::Region(request.out.ptr, region.keep())
        } else {
            let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else {
                return Ok(None);
            };
            let (first, last) = (first.segment as usize, last.segment as usize);
            let segments = request.call.ns.layout.segments(shape);
            if shape.segments() == 1 {
                return Ok(None);
            }
            let (from, to) = (segments[first].0, segments[last].0 + segments[last].1);
            if (to - from) * 2 > shape.payload() {
                return Ok(None); // most of it: load it, so that the next reader finds it
            }
            if cold.codec != 0 {
                let Some(stored) = readable(&cold, shape) else {
                    return Ok(None);
                };
                let wanted = segments[first..=last].to_vec();
                let frames = self.read_frames(
                    (known, request.id, shape),
                    (cold, stored),
                    first..last + 1,
                    wanted,
                );
                return Ok(frames.map(Pending::Frames));
            }
            Part::Layers(from, to)
        };
        let direct = self.read_direct(known, request.id, shape, cold, part);
        Ok(direct.map(Pending::Direct))
    }

    /// The tier and handle that a key was read from. Calls `give_way` before it waits for room.
    fn get_one<'a>(
        self: &'a Arc<Self>,
        request: &Request<'_>,
        mut pending: Option<Pending<'a>>,
        give_way: &mut dyn FnMut(),
    ) -> Result<std::result::Result<(usize, Handle), Miss>> {
        let nvme = self.memory.len();
        let mut looks = 0;
        loop {
            match pending.take() {
                None => {}
                Some(Pending::Direct(direct)) => {
                    let pieces = request.pieces(direct.shape())?;
                    // SAFETY: `out` has the pieces' length (checked) and is the caller's promise.
                    let done =
                        unsafe { direct.finish(&pieces, request.out.ptr, request.call.deadline) };
                    if let Some(got) = self.passed_by(direct.block(), direct.place(), done) {
                        return Ok(got);
                    }
                }
                Some(Pending::Frames(frames)) => {
                    let pieces = request.pieces(frames.shape())?;
                    let (out, codings) = (request.out.ptr, &self.codings);
                    // SAFETY: as above.
                    let done =
                        unsafe { frames.finish(&pieces, out, request.call.deadline, codings) };
                    if let Some(got) = self.passed_by(frames.block(), frames.place(), done) {
                        return Ok(got);
                    }
                }
                Some(Pending::Flight(watched)) => {
                    let flight = &watched.flight;
                    if flight.course.is_reserving() {
                        give_way();
                    }
                    match flight.course.wait(request.call.deadline) {
                        Wait::Finish(pin) => match self.finish_into(request, flight, pin)? {
                            Ok(()) => return Ok(Ok((nvme, flight.block.0))),
                            Err(Miss::Absent) => {}
                            Err(miss) => return Ok(Err(miss)),
                        },
                        Wait::Landed(Ok(())) => {}
                        Wait::Landed(Err(miss)) if miss.is_passing() => {}
                        Wait::Landed(Err(miss)) => return Ok(Err(miss)),
                        Wait::TimedOut => return Ok(Err(Miss::Deadline)),
                    }
                }
            }
            // A block can move between a look at the index and the next, but not for ever.
            looks += 1;
            if looks > LOOKS && Instant::now() >= request.call.deadline {
                return Ok(Err(Miss::Deadline));
            }
            let found = {
                let shard = self.index.of(&request.id);
                let Some((h, entry)) = shard
                    .find(&request.id)
                    .and_then(|h| Some((h, shard.get(h)?)))
                else {
                    return Ok(Err(Miss::Absent));
                };
                entry.in_memory().map(|(tier, start)| {
                    let pin = self.memory[tier].arena.pin(start);
                    (tier, (h, entry.epoch), entry.shape, entry.root, pin)
                })
            };
            let Some((tier, known, shape, root, pin)) = found else {
                let mut begun = self.begin(request, None)?;
                if matches!(begun, Begun::Failed(miss) if miss.is_passing()) {
                    give_way();
                    begun = self.begin(request, Some(request.call.deadline))?;
                }
                match begun {
                    Begun::Pending(p) => pending = Some(p),
                    Begun::Ready => {}
                    Begun::Failed(miss) => return Ok(Err(miss)),
                }
                continue;
            };
            let Some(pin) = pin else {
                continue;
            };
            let pieces = request.pieces(shape)?;
            // SAFETY: a published image, pinned.
            let bytes = unsafe { pin.bytes(shape.image_len()) };
            let proof = self.verify.then_some(Proof {
                id: &request.id,
                generation: 0,
                codec: 0,
                root,
            });
            let out = request.out.ptr;
            // SAFETY: `out` has the pieces' length (checked) and is the caller's promise.
            let right = unsafe {
                match proof {
                    Some(proof) => copy_proven(bytes, shape, proof, &pieces, out).is_ok(),
                    None => {
                        copy_out(bytes, &pieces, out);
                        true
                    }
                }
            };
            if right {
                return Ok(Ok((tier, known.0)));
            }
            self.lose_memory(known, tier, pin.start());
            if !self.lies_elsewhere(&request.id, tier, pin.start()) {
                return Ok(Err(Miss::Corrupt));
            }
        }
    }

    /// What a read past memory gives; `None`: the block moved, look again.
    fn passed_by(
        &self,
        block: Known,
        place: &Cold,
        done: std::result::Result<(), Miss>,
    ) -> Option<std::result::Result<(usize, Handle), Miss>> {
        match done {
            Ok(()) => Some(Ok((self.memory.len(), block.0))),
            Err(miss) if miss.is_passing() => Some(Err(miss)),
            Err(miss) => match self.lose_cold(block, place, miss) {
                Miss::Absent => None,
                miss => Some(Err(miss)),
            },
        }
    }

    /// Verifies a loaded image and copies it out in the same pass, then publishes it.
    fn finish_into(
        self: &Arc<Self>,
        request: &Request<'_>,
        flight: &Arc<Flight>,
        pin: Pin,
    ) -> Result<std::result::Result<(), Miss>> {
        let shape = flight.shape;
        let pieces = request.pieces(shape);
        let verified = flight.unpack(self, &pin).and_then(|proof| {
            // SAFETY: the slot holds the image that was read, and is ours alone.
            let bytes = unsafe { pin.bytes(shape.image_len()) };
            match &pieces {
                Ok(pieces) if request.selection.is_all() => {
                    // SAFETY: `out` has the pieces' length (checked) and is the caller's promise.
                    unsafe { Ok(copy_proven(bytes, shape, proof, pieces, request.out.ptr)?) }
                }
                Ok(pieces) => {
                    let root = proof.verify(bytes, shape)?;
                    // SAFETY: as above.
                    unsafe { copy_out(bytes, pieces, request.out.ptr) };
                    Ok(root)
                }
                Err(_) => Ok(proof.verify(bytes, shape)?),
            }
        });
        let landing = self.finish(flight, pin, verified);
        pieces?;
        // A block that was removed while it was read is still a hit: the bytes are the right ones.
        Ok(match (verified, landing) {
            (Ok(_), _) => Ok(()),
            (Err(_), Err(miss)) => Err(miss),
            (Err(_), Ok(())) => Err(Miss::Corrupt),
        })
    }
}
