//! Blocks that take fewer bytes on NVMe: the memory that coding takes, and codecs that are not known.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::alloc::{GlobalAlloc, Layout as Size, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};

use common::*;
use kvtier_codec::checksum::hash64;
use kvtier_codec::form::{Dtype, Form};
use kvtier_codec::image::{self, Segment, Shape};
use kvtier_core::coding::Coding;
use kvtier_core::load::Miss;
use kvtier_core::put::Put;
use kvtier_core::store::Namespace;
use kvtier_nvme::{NvmeTier, Pages, Write};

/// Counts the page-aligned memory and the large buffers that are allocated beside the arena.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

/// No table of a store this small is as large.
const LARGE: usize = 48 << 10;

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, size: Size) -> *mut u8 {
        if size.size() >= LARGE {
            MOST.fetch_max(NOW.fetch_add(size.size(), SeqCst) + size.size(), SeqCst);
        }
        // SAFETY: the caller's contract.
        unsafe { System.alloc(size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, size: Size) {
        if size.size() >= LARGE {
            NOW.fetch_sub(size.size(), SeqCst);
        }
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The tests share the account.
static ALONE: Mutex<()> = Mutex::new(());

const LAYERS: usize = 8;
const LEN: usize = LAYERS * 2 * 384 * 32;

fn coding(codec: &str) -> Coding {
    let form = Form {
        planes: 2,
        tokens: 1,
        heads: 3,
        dim: 64,
        dtype: Dtype::Bf16,
    };
    Coding::new(codec.parse().unwrap(), vec![form; LAYERS]).unwrap()
}

/// A block whose every second byte is the same.
fn block(seed: u64) -> ([u8; 32], Vec<u8>) {
    let mut data = bytes(seed, LEN);
    data.iter_mut().skip(1).step_by(2).for_each(|b| *b = 0x3f);
    (key(seed), data)
}

#[test]
fn coding_and_decoding_stay_within_the_memory_that_is_set_aside() {
    const MEMORY: u64 = 12 << 20;
    let _alone = ALONE.lock().unwrap();
    let ns = gqa(LAYERS, 32);
    let blocks: Vec<_> = (0..96).map(block).collect();
    let device = GateDevice::new(64 << 20);
    let store = Arc::new(over(MEMORY, device.clone(), |_| {}));
    let plain = store.report().metadata;
    store.set_coding(&ns, Some(coding("zstd"))).unwrap();
    let aside = (store.report().metadata - plain) as usize;
    let each = aside / 2 / LEN * LEN; // what coding may take, and decoding
    assert!(
        aside as u64 <= MEMORY / 6 + 4096 && each >= 4 * LEN,
        "{aside}"
    );
    audit(&store);
    let before = NOW.load(SeqCst);
    MOST.store(before, SeqCst);
    // While the device holds all writes back, as many blocks are coded as there is memory for.
    device.close(false, true);
    for (key, data) in &blocks[..24] {
        put(&store, &ns, key, data, None);
    }
    let flushing = {
        let store = store.clone();
        std::thread::spawn(move || store.flush(soon()).unwrap())
    };
    eventually("the memory for coding is taken", || {
        MOST.load(SeqCst) - before >= 4 * LEN
    });
    audit(&store);
    device.open();
    flushing.join().unwrap();
    for (key, data) in &blocks[24..] {
        put(&store, &ns, key, data, None);
        audit(&store);
    }
    store.flush(soon()).unwrap();
    let most = MOST.load(SeqCst) - before;
    assert!(
        most <= aside / 2,
        "{most} bytes, {aside} set aside for both"
    );
    assert!(count(&store, "nvme", "write_bytes") < 96 * LEN as u64 * 4 / 5);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for (key, data) in &blocks {
                    assert!(get(&store, &ns, key, LEN).as_ref() == Ok(data));
                }
            });
        }
    });
    let most = MOST.load(SeqCst) - before;
    let own = 4 * LEN; // what the four read into
    assert!(most <= aside + own, "{most} bytes, {aside} set aside");
    audit(&store);
    clear_and_check(&store);
}

/// Writes a block as a build with another codec would.
fn write_as(tier: &NvmeTier, ns: &Namespace, name: &[u8], payload: &[u8], codec: u16) {
    let shape = Shape::new(payload.len(), 1).unwrap();
    let id = ns.ids(&[name]).unwrap()[0];
    let slot = tier.reserve(shape.pages()).unwrap();
    let mut pages = Pages::new(shape.pages() as usize);
    pages[..payload.len()].copy_from_slice(payload);
    let table = [Segment {
        offset: 0,
        len: payload.len() as u32,
        checksum: hash64(payload),
    }];
    let root = image::seal(&mut pages, shape, &id, slot.generation, codec, &table);
    let (sender, answer) = mpsc::channel();
    tier.write(Write {
        slot,
        id,
        parent: None,
        namespace: ns.tag(),
        shape,
        codec,
        plain: Shape::new(LEN, LAYERS).unwrap(),
        importance: 0.0,
        root,
        // SAFETY: nobody else touches the pages.
        buf: unsafe { Arc::new(pages).io() },
        done: Box::new(move |result| sender.send(result.is_ok()).unwrap()),
    });
    assert!(answer.recv().unwrap());
    tier.flush(None).unwrap();
}

#[test]
fn a_block_of_an_unknown_codec_is_a_miss_that_says_so_and_is_kept() {
    const OTHERS: u16 = 0x7f42;
    let _alone = ALONE.lock().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let ns = gqa(LAYERS, 32);
    let payload = bytes(7, 5000);
    let (name, data) = block(1);
    let (tier, _) = NvmeTier::open(nvme(dir.path(), 16 << 20)).unwrap();
    write_as(&tier, &ns, &name, &payload, OTHERS);
    tier.close(None).unwrap();
    drop(tier);
    for _ in 0..2 {
        let store = two_tiers(8 << 20, nvme(dir.path(), 16 << 20));
        store.set_coding(&ns, Some(coding("zstd"))).unwrap();
        assert_eq!(store.contains(&ns, &[&name]).unwrap(), [true]);
        for _ in 0..2 {
            assert_eq!(get(&store, &ns, &name, LEN), Err(Miss::Codec));
        }
        let leases = store.lease(&ns, &[&name], true, soon()).unwrap();
        assert!(matches!(leases[..], [Err(Miss::Codec)]));
        assert_eq!(Miss::Codec.name(), "codec");
        for counter in ["corrupt", "errors", "drops", "evictions", "reads"] {
            assert_eq!(count(&store, "nvme", counter), 0, "{counter}");
        }
        audit(&store);
        store.close(soon()).unwrap();
    }
    // The build that knows the codec finds its bytes.
    let (tier, found) = NvmeTier::open(nvme(dir.path(), 16 << 20)).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].codec, OTHERS);
    tier.close(None).unwrap();
    drop(tier);
    // Whoever has the block may put it again.
    let store = two_tiers(8 << 20, nvme(dir.path(), 16 << 20));
    assert!(matches!(
        put(&store, &ns, &name, &data, None),
        Put::Stored { .. }
    ));
    assert!(get(&store, &ns, &name, LEN) == Ok(data));
    clear_and_check(&store);
}
