//! Storing blocks.

use std::time::Instant;

use kvtier_codec::checksum::{copy_hash64_unfenced, fence};
use kvtier_codec::image::{self, Id, PAGE, Root, Segment, Shape};

use crate::arena::Pin;
use crate::error::{Error, Kind, Result};
use crate::index::{Entry, MEMORY_TIERS, NOWHERE, Shard, fingerprint};
use crate::key;
use crate::order::Known;
use crate::policy::Handle;
use crate::shares::Claim;
use crate::store::{Inner, Namespace, Store};

/// Puts of a call that are done together, at most, so many bytes, and at most this part of the tier: all
/// find room, all are copied, all are made visible. What the first and the last of that need stays in the
/// cache, which a copy fills.
const WINDOW: usize = 32;
const WINDOW_BYTES: usize = 1 << 20;
const WINDOW_PART: usize = 64;

/// A block to store.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    /// Its key, 16 to 64 bytes.
    pub key: &'a [u8],
    /// Its payload.
    pub data: &'a [u8],
    /// The key of the block before it.
    pub parent: Option<&'a [u8]>,
    /// The key of a block that this one makes superfluous: removed once this one is there.
    pub replaces: Option<&'a [u8]>,
    /// The caller's score.
    pub importance: f32,
}

/// What became of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// Stored in this tier.
    Stored(&'static str),
    /// It was there already, in this tier.
    Present(&'static str),
    /// Not stored: the parent that was named is not in the store, so the block would be useless.
    Orphan,
    /// Not stored: no room now.
    Full,
    /// Not stored: no room before the deadline.
    Deadline,
}

impl Store {
    /// Stores one block. Waits for room until `deadline`, then fails with [`Kind::Full`] (the
    /// deadline had passed at the call) or [`Kind::Deadline`].
    pub fn put(&self, ns: &Namespace, block: &Block<'_>, deadline: Instant) -> Result<Put> {
        self.inner.check_open()?;
        let checked = check(ns, block)?;
        let begun = Instant::now();
        let patience = (begun < deadline).then_some(deadline);
        let mut slot = match self.inner.begin_put(ns, &checked, |_| false, patience)? {
            Started::Done(put) => return Ok(put),
            Started::Slot(slot) => slot,
        };
        slot.fill(ns, block, &checked);
        fence();
        let put = self.inner.end_put(ns, block, &checked, slot);
        self.inner.count_puts(&[put], begun);
        Ok(put)
    }

    /// Stores blocks in order. What is wrong with a block is said before any is stored; a lack of
    /// room is a block's own result.
    pub fn put_many(
        &self,
        ns: &Namespace,
        blocks: &[Block<'_>],
        deadline: Instant,
    ) -> Result<Vec<Put>> {
        self.inner.check_open()?;
        let checked = blocks
            .iter()
            .map(|block| check(ns, block))
            .collect::<Result<Vec<_>>>()?;
        let mut puts = Vec::with_capacity(blocks.len());
        while puts.len() < blocks.len() {
            let (blocks, checked) = (&blocks[puts.len()..], &checked[puts.len()..]);
            puts.extend(self.inner.put_some(ns, blocks, checked, deadline)?);
        }
        Ok(puts)
    }
}

/// A block whose key, data and companions are all right.
struct Checked {
    shape: Shape,
    id: Id,
    parent: Option<Id>,
    replaces: Option<Id>,
}

/// Looks at all of a block: nothing is stored before.
fn check(ns: &Namespace, block: &Block<'_>) -> Result<Checked> {
    let id = |key| key::id(&ns.digest, key);
    let (key, parent, replaces) = (
        id(block.key)?,
        block.parent.map(id).transpose()?,
        block.replaces.map(id).transpose()?,
    );
    if !block.importance.is_finite() || block.importance < 0.0 {
        return Err(Error::new(
            Kind::InvalidBlock,
            format!(
                "importance {} was given; a finite score of at least 0 is needed",
                block.importance
            ),
        ));
    }
    Ok(Checked {
        shape: ns.layout.shape(block.data.len())?,
        id: key,
        parent,
        replaces,
    })
}

/// A put that is settled, or has a slot to fill.
enum Started<'a> {
    Done(Put),
    Slot(Slot<'a>),
}

/// A slot for a block, and what it holds until then.
struct Slot<'a> {
    pin: Pin,
    /// Of its parent, if that is in the store and not among the puts that are done together with it.
    expected: Option<Expected<'a>>,
    root: Root,
    _claim: Claim,
}

/// A block to come, for whose sake its parent stays.
struct Expected<'a> {
    inner: &'a Inner,
    parent: Known,
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        self.inner.order.lock().expect_no_more(self.parent);
    }
}

impl Slot<'_> {
    /// Copies the block there; a [`fence`] must follow.
    fn fill(&mut self, ns: &Namespace, block: &Block<'_>, checked: &Checked) {
        let shape = checked.shape;
        let mut table = Vec::with_capacity(shape.segments());
        for (offset, len) in ns.layout.segments(shape) {
            let (to, from) = (self.pin.ptr(), block.data[offset..].as_ptr());
            // SAFETY: the slot is ours alone and at least `payload` bytes long, and so is `data`.
            let checksum = unsafe { copy_hash64_unfenced(to.add(offset), from, len) };
            table.push(Segment {
                offset: offset as u32,
                len: len as u32,
                checksum,
            });
        }
        // SAFETY: the slot is ours alone until it is published, and as long as the image.
        let bytes = unsafe { self.pin.bytes_mut(shape.image_len()) };
        self.root = image::seal(bytes, shape, &checked.id, 0, 0, &table);
    }
}

impl Inner {
    /// How many of these puts are done together, at least one: those whose order does not matter before all
    /// have a slot.
    fn window(&self, puts: &[Checked]) -> usize {
        let room = (WINDOW_BYTES / PAGE).min(self.memory[0].arena.pages() as usize / WINDOW_PART);
        let mut pages = 0;
        let together = puts.iter().enumerate().take_while(|&(i, put)| {
            pages += put.shape.pages() as usize;
            let fits = pages <= room && put.replaces.is_none();
            fits && !puts[..i].iter().any(|before| before.id == put.id)
        });
        together.take(WINDOW).count().max(1)
    }

    /// Does the first of these puts, and those that can be done together with it.
    fn put_some(
        &self,
        ns: &Namespace,
        blocks: &[Block<'_>],
        checked: &[Checked],
        deadline: Instant,
    ) -> Result<Vec<Put>> {
        let window = self.window(checked);
        let begun = Instant::now();
        let patience = (begun < deadline).then_some(deadline);
        let mut started: Vec<Started<'_>> = Vec::with_capacity(window);
        for (i, next) in checked[..window].iter().enumerate() {
            // Who waits for room must not hold any: those before go first.
            let patience = patience.filter(|_| i == 0);
            let comes = |parent: &Id| {
                let mut before = started.iter().zip(checked);
                before.any(|(one, put)| matches!(one, Started::Slot(_)) && put.id == *parent)
            };
            match self.begin_put(ns, next, comes, patience) {
                Ok(one) => started.push(one),
                Err(_) if i > 0 => break,
                Err(error) => match error.kind() {
                    Kind::Full => return Ok(vec![Put::Full]),
                    Kind::Deadline => return Ok(vec![Put::Deadline]),
                    _ => return Err(error),
                },
            }
        }
        for ((one, block), checked) in started.iter_mut().zip(blocks).zip(checked) {
            if let Started::Slot(slot) = one {
                slot.fill(ns, block, checked);
            }
        }
        fence();
        if window > 1 {
            let coming: Vec<u64> = checked[..started.len()]
                .iter()
                .map(|put| fingerprint(&put.id))
                .collect();
            self.order.lock().shares.foresee(0, ns.tag(), &coming);
        }
        let ended = started.into_iter().zip(blocks).zip(checked);
        let puts: Vec<Put> = ended
            .map(|((one, block), checked)| match one {
                Started::Done(put) => put,
                Started::Slot(slot) => self.end_put(ns, block, checked, slot),
            })
            .collect();
        self.count_puts(&puts, begun);
        Ok(puts)
    }

    /// Sees to a slot for a block. `comes`: will this be in the store before the block is?
    fn begin_put(
        &self,
        ns: &Namespace,
        checked: &Checked,
        comes: impl Fn(&Id) -> bool,
        deadline: Option<Instant>,
    ) -> Result<Started<'_>> {
        let (id, shape) = (checked.id, checked.shape);
        self.expire(ns, &id);
        if let Some(parent) = &checked.parent {
            self.expire(ns, parent);
        }
        if let Some(tier) = self.touch(&id, shape)? {
            self.stats.present.add(1);
            self.remove_replaced(checked);
            return Ok(Started::Done(Put::Present(tier)));
        }
        // Making room must not take just the parent.
        let expected = match checked.parent.filter(|parent| !comes(parent)) {
            None => None,
            Some(parent) => match self.index.find(&parent).and_then(|p| self.expect_child(p)) {
                None => return Ok(Started::Done(self.orphan())),
                expected => expected,
            },
        };
        let (pin, claim) = self.reserve(0, shape.pages(), ns.tag(), deadline)?;
        Ok(Started::Slot(Slot {
            pin,
            expected,
            root: Root([0; 16]),
            _claim: claim,
        }))
    }

    /// Counts the time of puts that began when this says, and end now.
    fn count_puts(&self, puts: &[Put], begun: Instant) {
        let each = begun.elapsed() / puts.len().max(1) as u32;
        let stored = |put: &&Put| matches!(put, Put::Stored(_));
        for _ in puts.iter().filter(stored) {
            self.stats.put.record(each);
        }
    }

    /// Makes a block visible whose slot is filled.
    fn end_put(&self, ns: &Namespace, block: &Block<'_>, checked: &Checked, slot: Slot<'_>) -> Put {
        let (pin, shape) = (&slot.pin, checked.shape);
        let parent = match (&slot.expected, checked.parent) {
            (Some(expected), _) => Some(Some(expected.parent)),
            (None, Some(parent)) => self.index.find(&parent).map(Some), // it came just before
            (None, None) => Some(None),
        };
        let mut entry = Entry::new(checked.id, ns.tag(), shape, block.importance);
        entry.root = slot.root;
        entry.memory[0] = pin.start();
        let published = parent.map_or(Put::Orphan, |parent| self.publish(entry, parent));
        match published {
            Put::Stored(_) => {}
            other => {
                slot.pin.discard();
                return match other {
                    Put::Orphan => self.orphan(),
                    other => other,
                };
            }
        }
        drop(slot);
        self.stats.puts.add(1);
        self.stats.put_bytes.add(shape.payload() as u64);
        self.memory[0].stats.inserts.add(1);
        self.remove_replaced(checked);
        published
    }

    fn expect_child(&self, parent: Known) -> Option<Expected<'_>> {
        let alive = self.order.lock().expect_child(parent);
        alive.then_some(Expected {
            inner: self,
            parent,
        })
    }

    /// Removes the block that this one, which is there now, makes superfluous.
    fn remove_replaced(&self, checked: &Checked) {
        if let Some(old) = checked.replaces.filter(|&old| old != checked.id) {
            self.remove_id(&old);
        }
    }

    fn orphan(&self) -> Put {
        self.stats.orphans.add(1);
        Put::Orphan
    }

    /// If the block is there as it was put: notes the use, and says where it is. A block of another
    /// size under the same key is an error.
    fn touch(&self, id: &Id, shape: Shape) -> Result<Option<&'static str>> {
        let shard = self.index.of(id);
        let Some((h, entry)) = shard.find(id).and_then(|h| Some((h, shard.get(h)?))) else {
            return Ok(None);
        };
        if shape != entry.shape {
            return Err(Error::new(
                Kind::InvalidBlock,
                format!(
                    "a block of {} bytes was given under a key that holds {} bytes. Equal keys must mean equal bytes: use another key, or remove the old block first",
                    shape.payload(),
                    entry.shape.payload()
                ),
            ));
        }
        if entry.is_lossy() {
            return Ok(None);
        }
        let tier = self.below_hbm(entry);
        self.order.lock().shares.on_hit(tier, h);
        Ok(Some(self.nearest(&shard, h, entry)))
    }

    /// The name of the fastest tier that holds a block.
    pub(crate) fn nearest(&self, shard: &Shard, h: Handle, entry: &Entry) -> &'static str {
        self.tier_name(match self.in_hbm(shard, h) {
            None => self.below_hbm(entry),
            Some(_) => self.tiers(),
        })
    }

    /// Puts an exact copy in the place of those that lack something.
    fn replace_lossy(&self, shard: &mut Shard, h: Handle, new: &Entry) -> Put {
        self.leave_hbm(shard, &mut self.order.lock(), h);
        let Some(entry) = shard.get_mut(h) else {
            return Put::Present(self.memory[0].name);
        };
        let held = self.leave_places(&mut self.order.lock(), h, entry);
        entry.memory = [NOWHERE; MEMORY_TIERS];
        entry.memory[0] = new.memory[0];
        entry.clear_cold();
        entry.root = new.root;
        entry.lossy = false;
        self.insert_order(0, h, entry);
        let arena = &self.memory[0].arena;
        arena.set_owner(new.memory[0], h);
        self.is_born(shard, h, new.namespace);
        // Who asked for the block to be kept means the block, not that copy of it.
        if held
            && let Some(kept) = self.pinned.lock().get_mut(&new.id)
            && let Some(pin) = arena.pin(new.memory[0])
        {
            kept.0 = pin;
        }
        Put::Stored(self.memory[0].name)
    }

    /// Makes a complete block visible, unless somebody else was first or its parent has gone.
    fn publish(&self, entry: Entry, parent: Option<Known>) -> Put {
        let start = entry.memory[0];
        let mut shard = self.index.of(&entry.id);
        if let Some((h, other)) = shard.find(&entry.id).and_then(|h| Some((h, shard.get(h)?))) {
            if other.is_lossy() {
                return self.replace_lossy(&mut shard, h, &entry);
            }
            return Put::Present(self.nearest(&shard, h, other));
        }
        let tag = entry.namespace;
        let (fingerprint, pages, importance) =
            (entry.fingerprint(), entry.shape.pages(), entry.importance);
        let h = self.index.insert(&mut shard, entry);
        let epoch = shard.get(h).map_or(0, |entry| entry.epoch);
        let mut order = self.order.lock();
        if !order.attach((h, epoch), parent, tag) {
            drop(order);
            self.index.remove(&mut shard, h);
            return Put::Orphan;
        }
        let meta = order.meta(h, fingerprint, pages, importance);
        order.shares.enter(0, h, tag, &meta);
        drop(order);
        self.is_born(&mut shard, h, tag);
        self.memory[0].arena.set_owner(start, h);
        Put::Stored(self.memory[0].name)
    }
}
