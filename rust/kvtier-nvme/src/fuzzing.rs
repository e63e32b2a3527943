//! What fuzzers feed: every decoder, and whole devices. The tests run the same for a few seconds.
//!
//! Each function panics if something that must hold does not.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use kvtier_codec::checksum::hash64;
use kvtier_codec::image::{self, ENTRY, Id, PAGE, Root, Segment, Shape};

use crate::buf::Pages;
use crate::clock::SystemClock;
use crate::commit::Committer;
use crate::device::sim::SimDevice;
use crate::device::{Device, read_exact, write_all};
use crate::engine::{Engine, Kind, Op};
use crate::place;
use crate::record::{
    Change, Place, RECORD, Record, Series, decode_block, encode_block, get, get_u32, get_u64, put,
};
use crate::recover;
use crate::superblock::Superblock;
use crate::tier::{Slot, Write, merge};
use crate::volume::Volume;

/// Bytes of the devices that are fuzzed: the smallest there are.
pub const BYTES: u64 = 1 << 20;

/// An engine that completes everything at once, on the caller's thread.
pub(crate) struct Inline(pub Arc<dyn Device>);

impl Engine for Inline {
    fn submit(&self, op: Op) {
        let mut copy = Pages::new(op.len / PAGE);
        // SAFETY: the operation owns its buffer of at least `len` bytes.
        let buf = unsafe { std::slice::from_raw_parts_mut(op.buf.ptr(), op.len) };
        let result = match op.kind {
            Kind::Read => {
                read_exact(&*self.0, &mut copy, op.offset).map(|()| buf.copy_from_slice(&copy))
            }
            Kind::Write => write_all(&*self.0, buf, op.offset),
        };
        (op.done)(result);
    }

    fn close(&self, _: Option<Instant>) -> bool {
        true
    }

    fn name(&self) -> &'static str {
        "inline"
    }
}

/// The first `len` bytes of `data`, or as many zeros as are missing behind it.
fn padded(data: &[u8], len: usize) -> Vec<u8> {
    let mut page = data[..data.len().min(len)].to_vec();
    page.resize(len, 0);
    page
}

/// A superblock: as it is, and with its CRC put right.
pub fn superblock(data: &[u8]) {
    let mut page = padded(data, PAGE);
    for _ in 0..2 {
        if let Ok(found) = Superblock::decode(&page) {
            let mut again = vec![0; PAGE];
            found.encode(&mut again);
            assert!(again == page, "what is read is what would be written");
        }
        fix_superblock(&mut page);
    }
}

fn fix_superblock(page: &mut [u8]) {
    let crc = crc32fast::hash(&page[..508]);
    put(page, 508, &crc.to_le_bytes());
}

/// A block of records, in the place that it says: as it is, and with all checksums put right.
pub fn block(data: &[u8]) {
    let mut block = padded(data, PAGE);
    for _ in 0..2 {
        let place = Place {
            uuid: get(&block, 16),
            series: match get_u32(&block, 56) {
                2 => Series::Checkpoint(get_u64(&block, 32)),
                _ => Series::Journal,
            },
            sequence: get_u64(&block, 40),
            chain: get_u64(&block, 48),
        };
        if let Some((records, _)) = decode_block(&block, &place, 1 << 20) {
            let mut again = vec![0; PAGE];
            encode_block(&mut again, &place, &records);
            let end = (records.len() + 1) * RECORD;
            assert!(again[RECORD..end] == block[RECORD..end]);
        }
        fix_block(&mut block);
    }
}

fn fix_block(block: &mut [u8]) {
    let count = (get_u32(block, 60) as usize).min(PAGE / RECORD - 1);
    for record in block[RECORD..].chunks_exact_mut(RECORD).take(count) {
        let crc = crc32fast::hash(&record[..RECORD - 4]);
        put(record, RECORD - 4, &crc.to_le_bytes());
    }
    let checksum = hash64(&block[8..]);
    put(block, 0, &checksum.to_le_bytes());
}

/// A slot's image with its table: as it is, and with a root that fits the table.
pub fn slot_image(data: &[u8]) {
    if data.len() < 8 {
        return;
    }
    let payload = get_u32(data, 0) as usize % (512 << 10);
    let Some(shape) = Shape::new(payload, get_u32(data, 4) as usize % 4096) else {
        return;
    };
    let image = padded(&data[8..], shape.image_len());
    let (id, generation, codec) = ([7; 32], 9, 1);
    let stored = &image[shape.table_offset()..][..shape.table_len()];
    let root = Root::new(&id, generation, codec, shape, stored);
    for root in [Root([0; 16]), root] {
        if image::verify(&image, shape, root, &id, generation, codec).is_ok() {
            let table = image::table(&image, 0, shape);
            let whole: usize = table.iter().map(|s| s.len as usize).sum();
            assert_eq!(whole, shape.payload(), "the segments tile the payload");
        }
    }
    for entry in stored.chunks_exact(ENTRY) {
        assert_eq!(Segment::from_bytes(&get(entry, 0)).to_bytes()[..], *entry);
    }
}

/// A device with a store on it that has seen everything: adds, removals, quarantine, checkpoints.
pub fn example() -> &'static [u8] {
    static IMAGE: OnceLock<Vec<u8>> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let device = Arc::new(SimDevice::new(BYTES, 1));
        let formatted = recover::format_as(&*device, BYTES, "example", [0x5a; 16]);
        assert!(formatted.is_ok());
        let Some(mut store) = Store::open(device.clone()) else {
            panic!("a fresh store opens");
        };
        for n in 0..60 {
            let block = store.put(n, 1 + (n as usize * 977) % 12_000);
            store.flush();
            let Some((slot, id)) = block else { continue };
            match n % 5 {
                0 => store.volume.leave(slot, &id, Change::Remove),
                1 if n % 3 == 0 => store.volume.leave(slot, &id, Change::Quarantine),
                _ if n > 40 => {}
                _ => store.volume.leave(slot, &id, Change::Remove),
            }
        }
        store.flush();
        device.image()
    })
}

/// A device that was changed in places: `data` is a mode and then four bytes for each change (an
/// offset of three bytes, and what is put there). With mode 1 all checksums of the metadata are put
/// right afterwards.
///
/// It opens or is refused. If it opens, what is there is accounted for, each id is there once, and
/// it can be written to and opened again.
pub fn device(data: &[u8]) {
    let mut bytes = example().to_vec();
    let (mode, changes) = data.split_first().unwrap_or((&0, &[]));
    let mut changed = HashSet::new();
    for change in changes.chunks_exact(4).take(256) {
        let at = (get_u32(change, 0) & 0xff_ffff) as usize % bytes.len();
        bytes[at] = change[3];
        changed.insert(at / PAGE);
    }
    if mode % 2 == 1 {
        for page in changed {
            let page_bytes = &mut bytes[page * PAGE..][..PAGE];
            match page {
                0 | 1 => fix_superblock(page_bytes),
                _ if page_bytes[8..15] == *b"KVTRECS" => fix_block(page_bytes),
                _ => {}
            }
        }
    }
    let device = Arc::new(SimDevice::from_image(bytes, 1));
    let Some(mut store) = Store::open(device.clone()) else {
        return;
    };
    let known = store.intact();
    let block = store.put(1000, 5000);
    store.flush();
    if store.volume.state.lock().failed.is_some() {
        return;
    }
    drop(store);
    let Some(mut again) = Store::open(device) else {
        panic!("what opened once opens again");
    };
    let found = again.intact();
    assert!(known.is_subset(&found), "nothing is lost meanwhile");
    if let Some((slot, id)) = block {
        assert!(found.contains(&(id, slot.generation)));
    }
}

/// A store on one device, without threads.
struct Store {
    device: Arc<dyn Device>,
    volume: Arc<Volume>,
    committer: Committer,
    generation: u64,
    blocks: Vec<Record>,
}

impl Store {
    /// `None` if it is refused.
    fn open(device: Arc<SimDevice>) -> Option<Store> {
        let mut found = place::recover(&*device, "fuzzed", BYTES).ok()?;
        let (blocks, generation) = (found.blocks.clone(), found.generation);
        let lost: HashSet<u32> = found
            .lost
            .iter()
            .flat_map(|r| r.start..r.start + r.pages)
            .collect();
        let used: u32 = blocks.iter().map(|r| r.pages).sum();
        let data = found.superblock.geometry.data;
        assert_eq!(
            found.slots.free_pages() + used + lost.len() as u32,
            data,
            "every page is accounted for"
        );
        let engine = Arc::new(Inline(device.clone()));
        let (name, clock) = ("fuzzed".into(), Arc::new(SystemClock));
        let volume = Volume::new(0, name, device.clone(), engine, clock, &mut found);
        let volume = Arc::new(volume);
        let committer = Committer::new(volume.clone(), &found, move || generation + 1000);
        let (merged, older) = merge(vec![blocks.clone()]);
        let ids: HashSet<Id> = merged.iter().map(|r| r.id).collect();
        assert_eq!(ids.len(), merged.len(), "each id once");
        for old in older {
            volume.leave(old.slot, &old.id, Change::Remove);
        }
        Some(Store {
            device,
            volume,
            committer,
            generation,
            blocks,
        })
    }

    /// The blocks that match their roots, less older copies of others.
    fn intact(&mut self) -> HashSet<(Id, u64)> {
        let (merged, _) = merge(vec![self.blocks.clone()]);
        let matches = merged.iter().filter(|block| {
            let slot = block.slot;
            let mut bytes = Pages::new(slot.pages as usize);
            let at = self.volume.geometry.data_at(slot.start);
            read_exact(&*self.device, &mut bytes, at).is_ok()
                && image::verify(
                    &bytes,
                    block.shape,
                    block.root,
                    &block.id,
                    slot.generation,
                    block.codec,
                )
                .is_ok()
        });
        matches.map(|b| (b.id, b.slot.generation)).collect()
    }

    fn put(&mut self, number: u64, payload: usize) -> Option<(Slot, Id)> {
        let shape = Shape::new(payload, 1)?;
        let slot = self.volume.reserve(shape.pages(), self.generation)?;
        self.generation += 1;
        let mut id = [0; 32];
        put(&mut id, 0, &number.to_le_bytes());
        let mut bytes = Pages::new(shape.pages() as usize);
        bytes[..payload].fill(number as u8);
        let table = [Segment {
            offset: 0,
            len: payload as u32,
            checksum: hash64(&bytes[..payload]),
        }];
        let root = image::seal(&mut bytes, shape, &id, slot.generation, 0, &table);
        self.volume.write(Write {
            slot,
            id,
            parent: None,
            namespace: 1,
            shape,
            codec: 0,
            plain: shape,
            importance: 0.0,
            root,
            // SAFETY: nobody else has the memory.
            buf: unsafe { Arc::new(bytes).io() },
            done: Box::new(|_| {}),
        });
        Some((slot, id))
    }

    fn flush(&mut self) {
        while !self.volume.state.lock().queue.is_empty() {
            if let Err(e) = self.committer.turn() {
                return self.volume.fail(e.to_string());
            }
        }
    }
}
