//! Blocks for the tests: bytes that follow from an id, and a tier that is waited for.

use crossbeam_channel::{Receiver, unbounded as channel};
use std::sync::Arc;

use kvtier_codec::checksum::hash64;
use kvtier_codec::image::{self, Id, Root, Segment, Shape};
use kvtier_nvme::{Done, Error, NvmeTier, Pages, Read, Recovered, Slot, Write};

/// The id that is made of `number`.
pub fn id(number: u64) -> Id {
    let mut id = [0; 32];
    id[..8].copy_from_slice(&number.to_le_bytes());
    id[16..24].copy_from_slice(&(!number).to_le_bytes());
    id
}

/// The image of the block `id` at `generation` with `payload` bytes: all bytes depend on both.
pub fn sealed(id: &Id, generation: u64, payload: usize) -> (Pages, Shape, Root) {
    let shape = Shape::new(payload, payload.min(7)).unwrap();
    let mut image = Pages::new(shape.pages() as usize);
    let mut word = hash64(id) ^ generation.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for chunk in image[..payload].chunks_mut(8) {
        word = word.wrapping_mul(0x2545_f491_4f6c_dd1d).rotate_left(17);
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
    }
    let n = shape.segments();
    let table: Vec<Segment> = (0..n)
        .map(|i| {
            let (from, to) = (payload * i / n, payload * (i + 1) / n);
            Segment {
                offset: from as u32,
                len: (to - from) as u32,
                checksum: hash64(&image[from..to]),
            }
        })
        .collect();
    let root = image::seal(&mut image, shape, id, generation, 3, &table);
    (image, shape, root)
}

/// Where the answer of an operation comes.
pub type Answer = Receiver<Result<(), Error>>;

/// A callback, and where its answer comes.
pub fn answer() -> (Done, Answer) {
    let (send, receive) = channel();
    let done = Box::new(move |result| {
        let _ = send.send(result);
    });
    (done, receive)
}

/// The write of the block that [`sealed`] makes.
pub fn write_of(slot: Slot, id: Id, payload: usize, done: Done) -> Write {
    let (image, shape, root) = sealed(&id, slot.generation, payload);
    Write {
        slot,
        id,
        parent: None,
        namespace: 9,
        shape,
        codec: 3,
        plain: shape,
        importance: 0.5,
        root,
        // SAFETY: nobody else has the memory.
        buf: unsafe { Arc::new(image).io() },
        done,
    }
}

/// Reserves a slot and starts to write a block of `payload` bytes.
pub fn start_put(tier: &NvmeTier, id: Id, payload: usize) -> Option<(Slot, Answer)> {
    let pages = Shape::new(payload, payload.min(7)).unwrap().pages();
    let slot = tier.reserve(pages)?;
    let (done, answer) = answer();
    tier.write(write_of(slot, id, payload, done));
    Some((slot, answer))
}

/// Writes a block and waits until it can be read.
pub fn put(tier: &NvmeTier, id: Id, payload: usize) -> Slot {
    let (slot, answer) = start_put(tier, id, payload).expect("room");
    answer.recv().unwrap().unwrap();
    slot
}

/// Reads all of a slot.
pub fn read(tier: &NvmeTier, slot: Slot) -> Result<Arc<Pages>, Error> {
    let pages = Arc::new(Pages::new(slot.pages as usize));
    let (done, answer) = answer();
    tier.read(Read {
        slot,
        offset: 0,
        len: slot.pages * 4096,
        // SAFETY: the memory is looked at after the answer only.
        buf: unsafe { pages.io() },
        hold: tier.hold(slot),
        urgent: true,
        attended: None,
        done,
    });
    answer.recv().unwrap().map(|()| pages)
}

/// Are the bytes of a recovered block those that [`sealed`] made?
pub fn is_intact(block: &Recovered, bytes: &[u8]) -> bool {
    let (image, shape, root) = sealed(&block.id, block.slot.generation, block.shape.payload());
    (shape, root, block.codec, block.namespace) == (block.shape, block.root, 3, 9)
        && image[..] == bytes[..image.len()]
        && image::verify(bytes, shape, root, &block.id, block.slot.generation, 3).is_ok()
}
