//! Writes of blocks to NVMe: by the mover to make room, or by a flush to keep them. The completion
//! publishes the new place, and frees the old one where that was the point.

use std::sync::Arc;
use std::time::Instant;

use kvtier_codec::image::{self, Id, Root};
use kvtier_nvme::{IoBuf, Pages, Write};

use crate::arena::Pin;
use crate::budget::Budget;
use crate::cold::Room;
use crate::index::{Cold, Entry, NOWHERE, half};
use crate::mover::Load;
use crate::order::Known;
use crate::policy::Handle;
use crate::shares::Claim;
use crate::store::Inner;

/// Why a block is written below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// To make room: it leaves the tier above.
    Demote,
    /// To keep it, in the room that there is: it stays above too.
    Persist(Room),
}

/// What became of a block that should be written to NVMe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// It is under way, or did not hold what was put and was dropped.
    Away,
    /// There is no room for it there, or it must not be written.
    Refused,
    /// Too much was under way until the deadline.
    Late,
}

/// The root of a block's image at `generation` on NVMe; `None` if the image is not what was put.
fn cold_root(entry: &Entry, image: &[u8], generation: u64) -> Option<Root> {
    let (id, shape) = (&entry.id, entry.shape);
    let table = image::verify(image, shape, entry.root, id, 0, 0).ok()?;
    Some(Root::over(&table, id, generation, 0, shape))
}

/// A write in the mover's account, until it is dropped.
struct Begun {
    inner: Arc<Inner>,
    block: Known,
    load: Load,
    /// It leaves its tier.
    _going: Option<Claim>,
}

impl Drop for Begun {
    fn drop(&mut self) {
        // Those who wait for room are told of each slot that is freed; this is for those that were not.
        if self.inner.mover.end(self.block, self.load) {
            for memory in &self.inner.memory {
                memory.arena.notify();
            }
        }
    }
}

/// What a write holds until its device lets go of the buffer: only then is it over. Let go of in
/// this order.
struct Leaving {
    _pin: Pin,
    /// What is written, where it is not what lies in the slot.
    _coded: Option<Pages>,
    _begun: Begun,
}

impl Inner {
    /// Could this block be written to NVMe now?
    pub(crate) fn can_write(&self, entry: &Entry) -> bool {
        self.cold.as_ref().is_some_and(|cold| {
            !cold.is_failed()
                && !self.mover.is_stalled()
                && entry.shape.pages() <= cold.tier.max_slot_pages()
                && !self.is_unaffordable(entry)
        })
    }

    /// Does the write budget alone keep this block from NVMe?
    pub(crate) fn is_unaffordable(&self, entry: &Entry) -> bool {
        let budget = self.cold.as_ref().and_then(|cold| cold.budget.as_ref());
        budget.is_some_and(|b| !b.allows(entry.shape.image_len(), self.clock.now()))
    }

    /// Starts a block's write to NVMe; `going` counts it as leaving the tier above.
    #[expect(clippy::too_many_arguments, reason = "a block, and why it is written")]
    pub(crate) fn write_down(
        self: &Arc<Self>,
        tier: usize,
        h: Handle,
        entry: Entry,
        pin: Pin,
        why: Why,
        going: Option<Claim>,
        deadline: Instant,
    ) -> Sent {
        let Some(cold) = &self.cold else {
            return Sent::Refused;
        };
        let (len, payload) = (entry.shape.image_len(), entry.shape.payload());
        let block = (h, entry.epoch);
        let Some(parent) = self.parent_name(block) else {
            return Sent::Away;
        };
        let coding = self.codings.of(entry.namespace, payload);
        let load = Load {
            bytes: len,
            staged: coding.as_ref().map_or(0, |coding| coding.room(payload)),
            leaves: why == Why::Demote,
        };
        match self.mover.begin(block, load, deadline, &*self.clock) {
            None => return Sent::Away,
            Some(false) => return Sent::Late,
            Some(true) => {}
        }
        let tag = entry.namespace;
        let begun = Begun {
            inner: self.clone(),
            block,
            load,
            _going: going,
        };
        // A zero-copy lease may have been written to: never let that reach the disk unseen.
        let lost = || {
            self.lose_memory(block, tier, pin.start());
            Sent::Away
        };
        // SAFETY: a published image, pinned.
        let bytes = unsafe { pin.bytes(len) };
        let mut coded = None;
        if let Some(coding) = coding {
            if image::verify(bytes, entry.shape, entry.root, &entry.id, 0, 0).is_err() {
                return lost();
            }
            coded = coding.pack(&bytes[..payload], entry.shape, &self.codings.helpers);
        }
        if entry.lossy && !coded.as_ref().is_some_and(|coded| coded.codec.is_lossy()) {
            // Without the mark of a lossy codec it would pass for what was put.
            return Sent::Refused;
        }
        let shape = coded.as_ref().map_or(entry.shape, |coded| coded.shape);
        let written = shape.image_len();
        let room = match why {
            Why::Demote => Room::Coldest,
            Why::Persist(room) => room,
        };
        let stop = || why == Why::Demote && self.mover.is_stopped();
        let reserved = self.reserve_cold(shape.pages(), tag, room, deadline, &stop);
        let Some((slot, claim)) = reserved else {
            return if stop() { Sent::Late } else { Sent::Refused };
        };
        let affordable = |b: &Budget| b.spend(written, self.clock.now());
        if !cold.budget.as_ref().is_none_or(affordable) {
            cold.tier.abandon(slot);
            return Sent::Refused;
        }
        let (root, codec) = match &mut coded {
            Some(coded) => (coded.seal(&entry.id, slot.generation), coded.codec.id()),
            None => match cold_root(&entry, bytes, slot.generation) {
                Some(root) => (root, 0),
                None => {
                    cold.tier.abandon(slot);
                    return lost();
                }
            },
        };
        let place = Cold {
            slot,
            root,
            codec,
            stored: shape.payload() as u32,
        };
        let start = pin.start();
        let coded = coded.map(|coded| coded.pages);
        let ptr = match &coded {
            Some(pages) => pages.as_ptr().cast_mut(),
            None => pin.ptr(),
        };
        let leaving = Leaving {
            _pin: pin,
            _coded: coded,
            _begun: begun,
        };
        // SAFETY: the slot, or the coded image, has at least the image's length; pinned slots are
        // not written to, and nobody else has the coded image.
        let buf = unsafe { IoBuf::new(ptr, written, Arc::new(leaving)) };
        let inner = self.clone();
        let id = entry.id;
        self.mover.note_sent();
        cold.tier.write(Write {
            slot,
            id,
            parent,
            namespace: entry.namespace,
            shape,
            codec,
            plain: entry.shape,
            importance: entry.importance,
            root,
            buf,
            done: Box::new(move |result| {
                match result {
                    Ok(()) => inner.publish_cold(block, &id, place, (tier, start), why),
                    Err(_) => inner.cold_error(),
                }
                drop(claim);
            }),
        });
        Sent::Away
    }

    /// By what the journal names a block's parent, if it has one; `None`: the block is going.
    fn parent_name(&self, block: Known) -> Option<Option<[u8; 16]>> {
        let parent = self.order.lock().parent_of(block)?;
        let Some((h, epoch)) = parent else {
            return Some(None);
        };
        let mut shard = self.index.shard(h);
        Some(Some(half(&shard.get_same(h, epoch)?.id)))
    }

    /// A block's bytes are on NVMe: names the place, and frees the slot above if nobody reads it.
    fn publish_cold(&self, (h, epoch): Known, id: &Id, place: Cold, from: (usize, u32), why: Why) {
        let (tier, start) = from;
        let Some(cold) = &self.cold else {
            return;
        };
        let memory = &self.memory[tier];
        let mut shard = self.index.shard(h);
        let Some(entry) = shard.get_same(h, epoch).filter(|e| !e.is_cold()) else {
            drop(shard);
            cold.tier.remove(place.slot, id);
            return;
        };
        entry.set_cold(place);
        cold.tier.set_owner(place.slot, h);
        self.insert_order(self.memory.len(), h, entry);
        cold.stats.inserts.add(1);
        // The write itself still holds one pin.
        if why == Why::Demote && entry.memory[tier] == start && memory.arena.pins(start) <= 1 {
            entry.memory[tier] = NOWHERE;
            let (tag, pages) = (entry.namespace, entry.shape.pages());
            self.order.lock().shares.leave(tier, h, tag, pages);
            memory.stats.demotions.add(1);
            memory.arena.retire(start);
        }
    }

    fn cold_error(&self) {
        if let Some(cold) = &self.cold {
            cold.stats.errors.add(1);
        }
    }
}
