//! Blocks that stay where they lie in memory: leases, which read them there, and pins, which keep
//! them.

use std::sync::Arc;
use std::time::Instant;

use kvtier_codec::image::{self, Id};

use crate::ahead::Ahead;
use crate::arena::Pin;
use crate::error::Result;
use crate::flight::Wait;
use crate::index::Entry;
use crate::load::{Found, Miss};
use crate::policy::Handle;
use crate::read::{LOOKS, Watched};
use crate::store::{Inner, Namespace, Store};

/// A block that stays where it is while this lives; it may outlive the store.
#[derive(Clone)]
pub struct Leased {
    pin: Pin,
    len: usize,
    tier: &'static str,
}

impl Leased {
    /// The payload's first byte.
    pub fn ptr(&self) -> *const u8 {
        self.pin.ptr()
    }

    /// Payload bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a block has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The tier it lies in.
    pub fn tier(&self) -> &'static str {
        self.tier
    }
}

impl Store {
    /// Pins blocks where they lie in memory, loading those that lie on NVMe. `verify` checks their
    /// bytes now; a zero-copy reader is not protected later.
    pub fn lease(
        &self,
        ns: &Namespace,
        keys: &[&[u8]],
        verify: bool,
        deadline: Instant,
    ) -> Result<Vec<std::result::Result<Leased, Miss>>> {
        let inner = &self.inner;
        inner.check_open()?;
        let ids = self.inner.ids(ns, keys)?;
        let mut ahead = Ahead::new(ids.len());
        let attended = (ids.len() == 1).then_some(deadline);
        let mut leases = Vec::with_capacity(ids.len());
        let mut used = Vec::with_capacity(ids.len());
        for (i, id) in ids.iter().enumerate() {
            let first = ahead.take(i, |next| {
                let Some((known, bytes)) = inner.cold_only(&ids[next]) else {
                    return Ok((None, true));
                };
                Ok(
                    match inner.load(known, true, true, Instant::now(), attended) {
                        Found::Flying(flight) => (Some((Watched { flight, inner }, bytes)), true),
                        Found::Resident | Found::Nowhere => (None, true),
                        Found::Failed(_) => (None, false),
                    },
                )
            })?;
            let leased = inner.lease_one(id, first, verify, deadline, &mut || ahead.give_way(i));
            match leased {
                Ok((_, tier, h)) => {
                    used.push((tier, h));
                    inner.spent.used(h);
                    inner.tier_stats(tier).hits.add(1);
                }
                Err(_) => inner.stats.misses.add(1),
            }
            leases.push(leased.map(|(leased, _, _)| leased));
        }
        inner.count_use(ns, keys.len(), &used);
        Ok(leases)
    }

    /// Keeps blocks in memory until as many [`Store::unpin`]s; loads them if needed. Says which are
    /// pinned now.
    pub fn pin(&self, ns: &Namespace, keys: &[&[u8]], deadline: Instant) -> Result<Vec<bool>> {
        let leases = self.lease(ns, keys, false, deadline)?;
        let kept = ns.ids(keys)?.into_iter().zip(leases);
        Ok(kept
            .map(|(id, leased)| leased.is_ok_and(|leased| self.inner.keep(&id, &leased)))
            .collect())
    }

    /// Takes back one [`Store::pin`] of each key. Says which had one.
    pub fn unpin(&self, ns: &Namespace, keys: &[&[u8]]) -> Result<Vec<bool>> {
        self.inner.check_open()?;
        let ids = self.inner.ids(ns, keys)?;
        let mut pinned = self.inner.pinned.lock();
        Ok(ids
            .into_iter()
            .map(|id| {
                let Some((_, count)) = pinned.get_mut(&id) else {
                    return false;
                };
                *count -= 1;
                if *count == 0 {
                    pinned.remove(&id);
                }
                true
            })
            .collect())
    }
}

impl Inner {
    /// Keeps a block in memory that is leased, and so lies there, unless it was removed meanwhile. From
    /// here on whoever removes it ends that as well.
    fn keep(&self, id: &Id, _leased: &Leased) -> bool {
        let shard = self.index.of(id); // until it is kept, nobody removes it
        let entry = shard.find(id).and_then(|h| shard.get(h));
        let place = entry.and_then(Entry::in_memory);
        // Not the lease's pin: it may have been put again.
        let Some(pin) = place.and_then(|(tier, start)| self.memory[tier].arena.pin(start)) else {
            return false;
        };
        let mut pinned = self.pinned.lock();
        if self.is_closed() {
            return false;
        }
        let count = pinned.get(id).map_or(0, |kept| kept.1);
        pinned.insert(*id, (pin, count + 1));
        true
    }

    fn lease_one<'a>(
        self: &'a Arc<Self>,
        id: &Id,
        mut watched: Option<Watched<'a>>,
        verify: bool,
        deadline: Instant,
        give_way: &mut dyn FnMut(),
    ) -> std::result::Result<(Leased, usize, Handle), Miss> {
        let mut looks = 0;
        loop {
            // Until the index is looked at, a block that was just loaded must not leave again.
            let mut loaded = None;
            if let Some(watched) = watched.take() {
                let flight = &watched.flight;
                if flight.course.is_reserving() {
                    give_way();
                }
                match flight.course.wait(deadline) {
                    Wait::Finish(pin) => {
                        let good = flight.unpack(self, &pin).and_then(|proof| {
                            // SAFETY: the slot holds the image that was read, and is ours alone.
                            let bytes = unsafe { pin.bytes(flight.shape.image_len()) };
                            Ok(proof.verify(bytes, flight.shape)?)
                        });
                        loaded = Some(pin.clone());
                        match self.finish(flight, pin, good) {
                            Ok(()) | Err(Miss::Absent) => {}
                            Err(miss) => return Err(miss),
                        }
                    }
                    Wait::Landed(Ok(())) => {}
                    Wait::Landed(Err(miss)) if miss.is_passing() => {}
                    Wait::Landed(Err(miss)) => return Err(miss),
                    Wait::TimedOut => return Err(Miss::Deadline),
                }
            }
            looks += 1;
            if looks > LOOKS && Instant::now() >= deadline {
                return Err(Miss::Deadline);
            }
            let (tier, known, shape, root, pin) = {
                let shard = self.index.of(id);
                let (h, entry) = shard
                    .find(id)
                    .and_then(|h| Some((h, shard.get(h)?)))
                    .ok_or(Miss::Absent)?;
                let known = (h, entry.epoch);
                let Some((tier, start)) = entry.in_memory() else {
                    drop(shard);
                    drop(loaded);
                    let mut found = self.load(known, true, true, Instant::now(), None);
                    if matches!(found, Found::Failed(miss) if miss.is_passing()) {
                        give_way();
                        found = self.load(known, true, true, deadline, None);
                    }
                    match found {
                        Found::Flying(flight) => {
                            watched = Some(Watched {
                                flight,
                                inner: self,
                            });
                        }
                        Found::Resident | Found::Nowhere => {}
                        Found::Failed(miss) => return Err(miss),
                    }
                    continue;
                };
                let pin = self.memory[tier].arena.pin(start);
                (tier, known, entry.shape, entry.root, pin)
            };
            let Some(pin) = pin else {
                continue;
            };
            if verify {
                // SAFETY: a published image, pinned.
                let bytes = unsafe { pin.bytes(shape.image_len()) };
                if image::verify(bytes, shape, root, id, 0, 0).is_err() {
                    self.lose_memory(known, tier, pin.start());
                    if !self.lies_elsewhere(id, tier, pin.start()) {
                        return Err(Miss::Corrupt);
                    }
                    continue;
                }
            }
            let leased = Leased {
                pin,
                len: shape.payload(),
                tier: self.memory[tier].name,
            };
            return Ok((leased, tier, known.0));
        }
    }
}
