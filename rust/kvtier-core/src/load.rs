//! Loads from NVMe into memory: one flight a block, whoever asks.
//!
//! A flight owns the slot that it fills. When the read has completed, whoever waits for it verifies
//! the image (and copies it out in the same pass); if nobody waits, a worker does. Only then is the
//! block published in memory.

use std::sync::Arc;
use std::time::Instant;

use crate::flight::Course;
use kvtier_codec::frame::Codec;
use kvtier_codec::image::{Id, Mismatch, Root, Shape};
use kvtier_nvme::IoBuf;
use kvtier_nvme::Read;

use crate::arena::Pin;
use crate::coding;
use crate::error::Kind;
use crate::index::{Cold, NOWHERE};
use crate::order::Known;
use crate::reader::Proof;
use crate::shares::Claim;
use crate::store::Inner;
use crate::sync::Mutex;

/// Why a read of a block is not a hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// It is not in the store.
    Absent,
    /// Its bytes were not what was put; it has been dropped.
    Corrupt,
    /// The deadline passed first; it may still arrive.
    Deadline,
    /// There was no room in memory to load it into.
    Full,
    /// The device failed the read; the copy there has been dropped.
    Device,
    /// It is encoded in a way that this build cannot read.
    Codec,
    /// The job was cancelled first.
    Cancelled,
}

impl Miss {
    /// It says nothing of the block itself: another, more patient caller may have it.
    pub(crate) fn is_passing(self) -> bool {
        matches!(
            self,
            Miss::Absent | Miss::Deadline | Miss::Full | Miss::Cancelled
        )
    }

    /// The reason's name in results.
    pub fn name(self) -> &'static str {
        match self {
            Miss::Absent => "absent",
            Miss::Corrupt => "corrupt",
            Miss::Deadline => "deadline",
            Miss::Full => "full",
            Miss::Device => "device",
            Miss::Codec => "codec",
            Miss::Cancelled => "cancelled",
        }
    }
}

impl From<Mismatch> for Miss {
    fn from(_: Mismatch) -> Self {
        Miss::Corrupt
    }
}

/// How a flight ended.
pub type Landing = Result<(), Miss>;

/// One load.
pub struct Flight {
    pub(crate) block: Known,
    pub(crate) id: Id,
    pub(crate) shape: Shape,
    pub(crate) cold: Cold,
    started: Instant,
    /// Until it lands.
    claim: Mutex<Option<Claim>>,
    pub(crate) course: Course<Pin, Miss>,
}

/// What somebody who wants a block in memory finds.
pub(crate) enum Found {
    /// It is in memory.
    Resident,
    /// It is on its way.
    Flying(Arc<Flight>),
    /// The caller started a flight, and it ended at once.
    Failed(Miss),
    /// It is not to be had.
    Nowhere,
}

impl Flight {
    /// Takes a watch back. If the image is there and nobody waits any more, a worker finishes the
    /// flight.
    pub(crate) fn unwatch(self: &Arc<Self>, inner: &Arc<Inner>) {
        if self.course.unwatch() {
            inner.finish_later(self.clone());
        }
    }

    fn arrive(self: &Arc<Self>, inner: &Arc<Inner>, pin: Pin) {
        if self.course.arrive(pin) {
            inner.finish_later(self.clone());
        }
    }

    /// Decodes the image that was read where it lies, if it is encoded. Returns what the image in
    /// the slot must match now.
    pub(crate) fn unpack(&self, inner: &Inner, pin: &Pin) -> Result<Proof<'_>, Miss> {
        let proof = self.proof();
        if self.cold.codec == 0 {
            return Ok(proof);
        }
        // SAFETY: the slot holds the image that was read, has room for the plain one, and is ours
        // alone.
        let image = unsafe { pin.bytes_mut(self.shape.image_len()) };
        let stored = readable(&self.cold, self.shape).ok_or(Miss::Codec)?;
        proof.verify(&image[..stored.image_len()], stored)?;
        let root = coding::unpack(image, (stored, self.shape), &self.id, &inner.codings)?;
        Ok(Proof {
            generation: 0,
            codec: 0,
            root,
            ..proof
        })
    }

    /// What the image must match, as it was read.
    fn proof(&self) -> Proof<'_> {
        Proof {
            id: &self.id,
            generation: self.cold.slot.generation,
            codec: self.cold.codec,
            root: self.cold.root,
        }
    }
}

/// The shape of what lies at a place, if this build can make the block of it, in a slot of its size.
pub(crate) fn readable(cold: &Cold, plain: Shape) -> Option<Shape> {
    let known = cold.codec == 0 || Codec::from_id(cold.codec).is_some();
    let fits = |stored: &Shape| stored.pages() <= plain.pages();
    cold.shape(plain).filter(|stored| known && fits(stored))
}

impl Inner {
    /// Finds the block in memory, joins its flight, or starts one. Waits until `deadline` for a
    /// slot to load it into; see [`Inner::reserve`]. `attended`: until then the caller has nothing to do
    /// but to wait for it.
    pub(crate) fn load(
        self: &Arc<Self>,
        block: Known,
        urgent: bool,
        watch: bool,
        deadline: Instant,
        attended: Option<Instant>,
    ) -> Found {
        let (flight, tag, hold) = {
            let mut shard = self.index.shard(block.0);
            let Some(entry) = shard.get_same(block.0, block.1) else {
                return Found::Nowhere;
            };
            if entry.in_memory().is_some() {
                return Found::Resident;
            }
            let (id, shape, cold, tag) = (entry.id, entry.shape, entry.cold(), entry.namespace);
            if let Some(flight) = shard.flights.get(&block.0)
                && flight.block == block
            {
                self.stats.joined.add(1);
                if watch {
                    flight.course.watch();
                }
                return Found::Flying(flight.clone());
            }
            let (Some(cold), Some(nvme)) = (cold, &self.cold) else {
                return Found::Nowhere;
            };
            let flight = Arc::new(Flight {
                block,
                id,
                shape,
                cold,
                started: Instant::now(),
                claim: Mutex::default(),
                course: Course::new(usize::from(watch)),
            });
            shard.flights.insert(block.0, flight.clone());
            (flight, tag, nvme.tier.hold(cold.slot))
        };
        self.stats.loads.add(1);
        let Some(stored) = readable(&flight.cold, flight.shape) else {
            self.codings.warn_of(flight.cold.codec);
            self.land(&flight, Err(Miss::Codec));
            return Found::Failed(Miss::Codec);
        };
        if flight.cold.codec != 0 {
            self.begin_coding();
        }
        let pin = match self.reserve_loading(flight.shape.pages(), tag, deadline) {
            Ok((pin, claim)) => {
                *flight.claim.lock() = Some(claim);
                pin
            }
            Err(error) => {
                let miss = match error.kind() {
                    Kind::Deadline => Miss::Deadline,
                    Kind::Closed => Miss::Cancelled,
                    _ => Miss::Full,
                };
                self.land(&flight, Err(miss));
                return Found::Failed(miss);
            }
        };
        flight.course.depart();
        let len = stored.image_len();
        // SAFETY: the slot has at least the image's length, and is ours alone until it is published.
        let buf = unsafe { IoBuf::new(pin.ptr(), len, Arc::new(pin.clone())) };
        let (inner, landing) = (self.clone(), flight.clone());
        if let Some(nvme) = &self.cold {
            nvme.tier.read(Read {
                slot: flight.cold.slot,
                offset: 0,
                len: len as u32,
                buf,
                hold,
                urgent,
                attended,
                done: Box::new(move |result| match result {
                    Ok(()) => landing.arrive(&inner, pin),
                    Err(_) => {
                        pin.discard();
                        inner.lose_cold(landing.block, &landing.cold, Miss::Device);
                        inner.land(&landing, Err(Miss::Device));
                    }
                }),
            });
        }
        Found::Flying(flight)
    }

    /// Has a worker verify and publish an image that nobody waits for. A reader who comes before
    /// the worker does it himself: readers may be workers, and must never wait for one.
    fn finish_later(self: &Arc<Self>, flight: Arc<Flight>) {
        let inner = self.clone();
        self.workers.spawn(Box::new(move || {
            let Some(pin) = flight.course.claim() else {
                return;
            };
            let verified = flight.unpack(&inner, &pin).and_then(|proof| {
                // SAFETY: the slot holds the image that was read, and is ours alone.
                let image = unsafe { pin.bytes(flight.shape.image_len()) };
                Ok(proof.verify(image, flight.shape)?)
            });
            let _ = inner.finish(&flight, pin, verified);
        }));
    }

    /// Publishes an image that was verified, with its root in memory, or drops it with the entry's
    /// claim to it.
    pub(crate) fn finish(
        self: &Arc<Self>,
        flight: &Arc<Flight>,
        pin: Pin,
        verified: Result<Root, Miss>,
    ) -> Landing {
        let landing = match verified {
            Ok(root) => self.publish_loaded(flight, pin, root),
            Err(Miss::Corrupt) => {
                pin.discard();
                Err(self.lose_cold(flight.block, &flight.cold, Miss::Corrupt))
            }
            Err(miss) => {
                pin.discard();
                Err(miss)
            }
        };
        self.land(flight, landing);
        landing
    }

    fn publish_loaded(&self, flight: &Flight, pin: Pin, root: Root) -> Landing {
        let (h, epoch) = flight.block;
        let mut shard = self.index.shard(h);
        let Some(entry) = shard.get_same(h, epoch) else {
            drop(shard);
            pin.discard();
            return Err(Miss::Absent);
        };
        if entry.memory[0] != NOWHERE {
            drop(shard);
            pin.discard();
            return Ok(());
        }
        entry.memory[0] = pin.start();
        entry.root = root;
        entry.lossy = flight.cold.is_lossy();
        self.memory[0].arena.set_owner(pin.start(), h);
        self.insert_order(0, h, entry);
        drop(shard);
        self.memory[0].stats.inserts.add(1);
        Ok(())
    }

    /// Ends a flight and takes it out of the index.
    fn land(&self, flight: &Arc<Flight>, landing: Landing) {
        let (h, _) = flight.block;
        let mut shard = self.index.shard(h);
        if shard
            .flights
            .get(&h)
            .is_some_and(|f| Arc::ptr_eq(f, flight))
        {
            shard.flights.remove(&h);
        }
        drop(shard);
        flight.claim.lock().take();
        if landing.is_ok() {
            self.stats.load.since(flight.started);
        }
        flight.course.land(landing);
    }
}
