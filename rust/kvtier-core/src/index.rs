//! The index: one entry a block, which knows every place where the block lies.
//!
//! Sharded by id. A [`Handle`] names an entry while it exists: the shard in its low bits, the
//! entry's place in the shard above, so that handles stay dense and policies can use arrays. An
//! entry's *epoch* tells two uses of one handle apart.

use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::sync::{Mutex, MutexGuard};
use hashbrown::{HashMap, HashTable};
use kvtier_codec::checksum::prefetch;
use kvtier_codec::frame::Codec;
use kvtier_codec::image::{Id, Root, Shape};
use kvtier_nvme::Slot;

use crate::load::Flight;
use crate::policy::Handle;

/// Memory tiers at most: DRAM and CXL.
pub const MEMORY_TIERS: usize = 2;

/// "No slot in this tier."
pub const NOWHERE: u32 = u32::MAX;

const SHARD_BITS: u32 = 8;
pub(crate) const SHARDS: usize = 1 << SHARD_BITS;

/// Where a block lies on NVMe, and what its image there must match.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cold {
    /// The slot.
    pub slot: Slot,
    /// Over the image in that slot.
    pub root: Root,
    /// How the payload is encoded there; 0 is plain.
    pub codec: u16,
    /// Payload bytes there: fewer than the block's where it is encoded.
    pub stored: u32,
}

impl Cold {
    /// The shape of what lies there, of a block of this shape; `None` if it cannot be.
    pub fn shape(&self, plain: Shape) -> Option<Shape> {
        if self.codec == 0 {
            return Some(plain);
        }
        Shape::new(self.stored as usize, plain.segments())
    }

    /// Does the copy there lack something of what was put?
    pub fn is_lossy(&self) -> bool {
        self.codec != 0 && Codec::from_id(self.codec).is_none_or(Codec::is_lossy)
    }
}

/// One block.
#[derive(Clone, Debug)]
pub struct Entry {
    /// BLAKE3 of namespace and key.
    pub id: Id,
    /// Tag of the namespace: the first 8 bytes of its digest.
    pub namespace: u64,
    /// Payload bytes and segments.
    pub shape: Shape,
    /// The caller's score.
    pub importance: f32,
    /// The copies in memory came from a lossy one.
    pub lossy: bool,
    /// Which use of its handle this is; set by [`Shard::insert`].
    pub epoch: u32,
    /// Of the plain image in every memory tier (generation 0); meaningless if there is none.
    pub root: Root,
    /// First page of its slot in each memory tier, or [`NOWHERE`].
    pub memory: [u32; MEMORY_TIERS],
    // Its place on NVMe, in pieces that leave no gaps. Without one there are no pages.
    cold_pages: u32,
    cold_start: u32,
    cold_stored: u32,
    cold_generation: u64,
    cold_root: Root,
    cold_codec: u16,
    cold_path: u8,
}

impl Entry {
    /// An entry that lies nowhere yet.
    pub fn new(id: Id, namespace: u64, shape: Shape, importance: f32) -> Self {
        Entry {
            id,
            namespace,
            shape,
            importance,
            lossy: false,
            epoch: 0,
            root: Root([0; 16]),
            memory: [NOWHERE; MEMORY_TIERS],
            cold_pages: 0,
            cold_start: 0,
            cold_stored: 0,
            cold_generation: 0,
            cold_root: Root([0; 16]),
            cold_codec: 0,
            cold_path: 0,
        }
    }

    /// Does it lie on NVMe?
    pub fn is_cold(&self) -> bool {
        self.cold_pages > 0
    }

    /// Its place on NVMe.
    pub fn cold(&self) -> Option<Cold> {
        self.is_cold().then_some(Cold {
            slot: Slot {
                path: self.cold_path,
                start: self.cold_start,
                pages: self.cold_pages,
                generation: self.cold_generation,
            },
            root: self.cold_root,
            codec: self.cold_codec,
            stored: self.cold_stored,
        })
    }

    /// Names its place on NVMe.
    pub fn set_cold(&mut self, place: Cold) {
        self.cold_path = place.slot.path;
        self.cold_start = place.slot.start;
        self.cold_pages = place.slot.pages;
        self.cold_generation = place.slot.generation;
        self.cold_root = place.root;
        self.cold_codec = place.codec;
        self.cold_stored = place.stored;
    }

    /// From now on it does not lie on NVMe.
    pub fn clear_cold(&mut self) {
        self.cold_pages = 0;
    }

    /// The fastest memory tier that holds it, and the slot there.
    pub fn in_memory(&self) -> Option<(usize, u32)> {
        let tier = self.memory.iter().position(|&start| start != NOWHERE)?;
        Some((tier, self.memory[tier]))
    }

    /// Does this tier hold it? NVMe comes after the memory tiers that there are.
    pub fn is_in(&self, tier: usize, memory: usize) -> bool {
        match tier < memory {
            true => self.memory[tier] != NOWHERE,
            false => self.is_cold(),
        }
    }

    /// Does a tier below memory tier `tier` hold it too?
    pub fn is_below(&self, tier: usize) -> bool {
        self.is_cold() || self.memory[tier + 1..].iter().any(|&s| s != NOWHERE)
    }

    /// Does any tier but memory tier `tier` hold it too?
    pub fn is_beside(&self, tier: usize) -> bool {
        self.is_below(tier) || self.memory[..tier].iter().any(|&s| s != NOWHERE)
    }

    /// Is what a reader gets less than what was put? An exact put replaces it.
    pub fn is_lossy(&self) -> bool {
        match self.in_memory() {
            Some(_) => self.lossy,
            None => self.cold().is_some_and(|cold| cold.is_lossy()),
        }
    }

    /// 64 bits that recognise the block.
    pub fn fingerprint(&self) -> u64 {
        fingerprint(&self.id)
    }
}

/// 64 bits that recognise a block.
pub(crate) fn fingerprint(id: &Id) -> u64 {
    u64::from_le_bytes(first(id))
}

/// The first half of an id, by which children name their parent in a journal.
pub fn half(id: &Id) -> [u8; 16] {
    first(id)
}

fn first<const N: usize>(id: &Id) -> [u8; N] {
    std::array::from_fn(|i| id[i])
}

/// The hash of an id, from its first half: ids are uniform, so eight of their bytes will do.
fn hash(id: &[u8]) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| id[i + 8]))
}

/// Makes `vec` long enough for place `at`. It grows by a 32nd at a time: memory that is counted
/// must not jump, and a large allocation grows without a copy.
pub(crate) fn grow<T: Clone>(vec: &mut Vec<T>, at: usize, fill: T) {
    if at >= vec.len() {
        make_room(vec, at + 1);
        vec.resize(at + 1, fill);
    }
}

fn make_room<T>(vec: &mut Vec<T>, len: usize) {
    if len > vec.capacity() {
        vec.reserve_exact(len + len / 32 + 1 - vec.len());
    }
}

/// Room for an entry.
enum Cell {
    Used(Entry),
    /// And the next one that is vacant.
    Vacant(u32),
}

impl Cell {
    fn entry(&self) -> Option<&Entry> {
        match self {
            Cell::Used(entry) => Some(entry),
            Cell::Vacant(_) => None,
        }
    }
}

/// No cell.
const NIL: u32 = u32::MAX;

/// Part of the index under one lock.
pub struct Shard {
    number: u32,
    table: HashTable<u32>,
    cells: Vec<Cell>,
    /// The first of the vacant cells.
    vacant: u32,
    epoch: u32,
    /// When each block of a namespace with a time to live was stored, once there is one.
    pub(crate) born: Vec<u32>,
    /// Loads under way, by handle.
    pub(crate) flights: HashMap<Handle, Arc<Flight>, PlainHash>,
    /// First page of the slots in HBM, by handle: few blocks lie there, and none only there.
    hbm: HashMap<Handle, u32, PlainHash>,
}

/// Handles are small dense numbers: spread them with one multiplication.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlainHash;

/// See [`PlainHash`].
#[derive(Clone, Copy, Debug, Default)]
pub struct PlainHasher(u64);

impl BuildHasher for PlainHash {
    type Hasher = PlainHasher;
    fn build_hasher(&self) -> PlainHasher {
        PlainHasher(0)
    }
}

impl Hasher for PlainHasher {
    fn finish(&self) -> u64 {
        self.0.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(26)
    }
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.0 = self.0 << 8 | u64::from(b);
        }
    }
    fn write_u32(&mut self, n: u32) {
        self.0 = n.into();
    }
}

impl Shard {
    fn new(number: u32) -> Self {
        Shard {
            number,
            table: HashTable::new(),
            cells: Vec::new(),
            vacant: NIL,
            epoch: 0,
            flights: HashMap::default(),
            born: Vec::new(),
            hbm: HashMap::default(),
        }
    }

    fn local(&self, h: Handle) -> usize {
        debug_assert_eq!(h & (SHARDS as u32 - 1), self.number);
        (h >> SHARD_BITS) as usize
    }

    /// The handle of the block `id`.
    pub fn find(&self, id: &Id) -> Option<Handle> {
        self.find_where(id, |other| other == id)
    }

    fn find_where(&self, begin: &[u8], same: impl Fn(&Id) -> bool) -> Option<Handle> {
        let cells = &self.cells;
        let local = self.table.find(hash(begin), |&local| {
            cells[local as usize].entry().is_some_and(|e| same(&e.id))
        })?;
        Some(local << SHARD_BITS | self.number)
    }

    /// Has the processor fetch the entry of a block that is going to be looked for.
    pub(crate) fn prefetch(&self, id: &Id) {
        self.table.find(hash(id), |&local| {
            prefetch(&self.cells[local as usize]);
            false // to tell is to wait for it
        });
    }

    /// The entry of a handle.
    pub fn get(&self, h: Handle) -> Option<&Entry> {
        self.cells.get(self.local(h))?.entry()
    }

    /// The entry of a handle.
    pub fn get_mut(&mut self, h: Handle) -> Option<&mut Entry> {
        let local = self.local(h);
        match self.cells.get_mut(local)? {
            Cell::Used(entry) => Some(entry),
            Cell::Vacant(_) => None,
        }
    }

    /// Notes when a block was stored.
    pub(crate) fn set_born(&mut self, h: Handle, at: u32) {
        let local = self.local(h);
        grow(&mut self.born, local, 0);
        self.born[local] = at;
    }

    /// When a block was stored; meaningless if its namespace has no time to live.
    pub(crate) fn born(&self, h: Handle) -> Option<u32> {
        self.born.get(self.local(h)).copied()
    }

    /// The entry of a handle, if it is still the use of it that had this epoch.
    pub fn get_same(&mut self, h: Handle, epoch: u32) -> Option<&mut Entry> {
        self.get_mut(h).filter(|entry| entry.epoch == epoch)
    }

    /// First page of a block's slot in HBM.
    pub fn hbm(&self, h: Handle) -> Option<u32> {
        self.hbm.get(&h).copied()
    }

    /// All that lie in HBM.
    pub fn handles_in_hbm(&self) -> Vec<Handle> {
        self.hbm.keys().copied().collect()
    }

    /// From now on it does not lie in HBM. Returns where it lay.
    pub fn clear_hbm(&mut self, h: Handle) -> Option<u32> {
        self.hbm.remove(&h)
    }

    /// All handles in use.
    pub fn handles(&self) -> impl Iterator<Item = Handle> + '_ {
        let number = self.number;
        (0u32..)
            .zip(&self.cells)
            .filter(|(_, cell)| cell.entry().is_some())
            .map(move |(local, _)| local << SHARD_BITS | number)
    }

    fn insert(&mut self, mut entry: Entry) -> Handle {
        self.epoch = self.epoch.wrapping_add(1);
        entry.epoch = self.epoch;
        let hashed = hash(&entry.id);
        let local = match self.cells.get(self.vacant as usize) {
            Some(&Cell::Vacant(next)) => {
                let local = std::mem::replace(&mut self.vacant, next);
                self.cells[local as usize] = Cell::Used(entry);
                local
            }
            _ => {
                let len = self.cells.len() + 1;
                make_room(&mut self.cells, len);
                self.cells.push(Cell::Used(entry));
                len as u32 - 1
            }
        };
        let cells = &self.cells;
        self.table.insert_unique(hashed, local, |&l| {
            cells[l as usize].entry().map_or(0, |e| hash(&e.id))
        });
        local << SHARD_BITS | self.number
    }

    fn remove(&mut self, h: Handle) -> Option<Entry> {
        debug_assert!(self.hbm(h).is_none(), "its place in HBM is given up first");
        let local = self.local(h);
        let cell = self.cells.get_mut(local)?;
        cell.entry()?;
        let Cell::Used(entry) = std::mem::replace(cell, Cell::Vacant(self.vacant)) else {
            return None;
        };
        self.vacant = local as u32;
        if let Ok(slot) = self
            .table
            .find_entry(hash(&entry.id), |&l| l as usize == local)
        {
            slot.remove();
        }
        Some(entry)
    }

    fn memory_bytes(&self) -> usize {
        self.cells.capacity() * size_of::<Cell>()
            + self.born.capacity() * size_of::<u32>()
            + self.table.allocation_size()
            + self.hbm.allocation_size()
    }
}

/// All entries.
pub struct Index {
    shards: Vec<Mutex<Shard>>,
    bytes: AtomicUsize,
    len: AtomicUsize,
    cells: AtomicUsize,
}

impl Default for Index {
    fn default() -> Self {
        let shards: Vec<_> = (0..SHARDS as u32)
            .map(|number| Mutex::new(Shard::new(number)))
            .collect();
        Index {
            bytes: AtomicUsize::new(SHARDS * size_of::<Mutex<Shard>>()),
            len: AtomicUsize::new(0),
            cells: AtomicUsize::new(0),
            shards,
        }
    }
}

impl Index {
    /// Locks the shard that holds, or would hold, `id`.
    pub fn of(&self, id: &Id) -> MutexGuard<'_, Shard> {
        self.shards[id[0] as usize].lock()
    }

    /// Has the processor fetch what locking the shard of `id` needs.
    pub(crate) fn prefetch(&self, id: &Id) {
        prefetch(&self.shards[id[0] as usize]);
    }

    /// Locks the shard of a handle.
    pub fn shard(&self, h: Handle) -> MutexGuard<'_, Shard> {
        self.shards[h as usize % SHARDS].lock()
    }

    /// Adds an entry to its locked shard.
    pub fn insert(&self, shard: &mut Shard, entry: Entry) -> Handle {
        let before = shard.cells.len();
        let h = self.counted(shard, |shard| shard.insert(entry));
        let added = shard.cells.len() - before;
        self.cells.fetch_add(added, Ordering::Relaxed);
        self.len.fetch_add(1, Ordering::Relaxed);
        h
    }

    /// Names a block's place in HBM, in its locked shard.
    pub fn set_hbm(&self, shard: &mut Shard, h: Handle, start: u32) {
        self.counted(shard, |shard| shard.hbm.insert(h, start));
    }

    /// Takes an entry out of its locked shard.
    pub fn remove(&self, shard: &mut Shard, h: Handle) -> Option<Entry> {
        let entry = self.counted(shard, |shard| shard.remove(h))?;
        self.len.fetch_sub(1, Ordering::Relaxed);
        Some(entry)
    }

    /// Does this to a shard, and counts the memory that it takes or gives back.
    pub(crate) fn counted<T>(&self, shard: &mut Shard, change: impl FnOnce(&mut Shard) -> T) -> T {
        let before = shard.memory_bytes();
        let done = change(shard);
        let grown = shard.memory_bytes().wrapping_sub(before);
        self.bytes.fetch_add(grown, Ordering::Relaxed);
        done
    }

    /// The handle and epoch of a block.
    pub fn find(&self, id: &Id) -> Option<(Handle, u32)> {
        let shard = self.of(id);
        let h = shard.find(id)?;
        Some((h, shard.get(h)?.epoch))
    }

    /// The handle and epoch of the block whose id begins with `half`.
    pub fn find_half(&self, half: &[u8; 16]) -> Option<(Handle, u32)> {
        let shard = self.shards[half[0] as usize].lock();
        let h = shard.find_where(half, |id| id[..16] == half[..])?;
        Some((h, shard.get(h)?.epoch))
    }

    /// Visits every shard in turn, each under its lock for a moment.
    pub fn for_each_shard(&self, mut visit: impl FnMut(&mut Shard)) {
        for shard in &self.shards {
            visit(&mut shard.lock());
        }
    }

    /// Entries.
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// There is no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Entries, and the cells of those that are gone, which are kept for others of their shards.
    pub fn cells(&self) -> usize {
        self.cells.load(Ordering::Relaxed)
    }

    /// Bytes kept in memory.
    pub fn memory_bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(n: u32) -> Entry {
        let id = *blake3::hash(&n.to_le_bytes()).as_bytes();
        Entry::new(id, 0, Shape::new(4096, 1).unwrap(), 0.0)
    }

    #[test]
    fn what_is_inserted_is_found_until_it_is_removed() {
        let index = Index::default();
        let handles: Vec<Handle> = (0..5000)
            .map(|n| {
                let entry = entry(n);
                let mut shard = index.of(&entry.id.clone());
                index.insert(&mut shard, entry)
            })
            .collect();
        assert_eq!(index.len(), 5000);
        assert!(
            handles.iter().all(|&h| h < 40 * SHARDS as u32),
            "handles are dense"
        );
        for (n, &h) in handles.iter().enumerate() {
            assert_eq!(index.find(&entry(n as u32).id).map(|f| f.0), Some(h));
            if n % 2 == 0 {
                let mut shard = index.shard(h);
                assert!(index.remove(&mut shard, h).is_some());
                assert!(index.remove(&mut shard, h).is_none());
            }
        }
        assert_eq!(index.len(), 2500);
        assert!((0..5000).all(|n| index.find(&entry(n).id).is_some() == (n % 2 == 1)));
    }

    #[test]
    fn a_reused_handle_has_another_epoch() {
        let index = Index::default();
        let (a, mut b) = (entry(1), entry(2));
        b.id[0] = a.id[0];
        let mut shard = index.of(&a.id.clone());
        let h = index.insert(&mut shard, a);
        let old = shard.get(h).unwrap().epoch;
        index.remove(&mut shard, h);
        assert_eq!(index.insert(&mut shard, b), h);
        assert!(shard.get_same(h, old).is_none());
    }

    #[test]
    fn an_entry_is_small() {
        assert_eq!(size_of::<Cell>(), 120);
    }
}
