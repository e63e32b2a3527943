//! The fuzzers' targets, fed with seeded mutations of what is valid.

use super::Random;
use crate::fuzzing::{BYTES, block, device, example, slot_image, superblock};

const PAGE: usize = 4096;

/// As everywhere, and many more in CI: 52 s of a core, and TOML and traces 15 s.
fn rounds(count: u64) -> u64 {
    let ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
    super::rounds(count) * if ci { 230 } else { 1 }
}

/// Changes a few bytes, some of them to what often breaks things.
fn mutate(bytes: &mut [u8], random: &mut Random) {
    for _ in 0..1 + random.below(6) {
        let at = random.below(bytes.len() as u64) as usize;
        match random.below(6) {
            0 => bytes[at] = 0,
            1 => bytes[at..].iter_mut().take(8).for_each(|b| *b = 0xff),
            2 => bytes[at..].iter_mut().take(4).for_each(|b| *b = 0),
            3 => bytes[at] = bytes[at].wrapping_add(1),
            4 => bytes[at] ^= 1 << random.below(8),
            _ => bytes[at] = random.below(256) as u8,
        }
    }
}

#[test]
fn no_superblock_does_harm() {
    let mut random = Random(1);
    for round in 0..rounds(20_000) {
        let mut page = example()[(round % 2) as usize * PAGE..][..PAGE].to_vec();
        // Most of a page is zeros: change what means something.
        let len = if random.below(8) == 0 { PAGE } else { 128 };
        mutate(&mut page[..len], &mut random);
        superblock(&page);
    }
    superblock(&[]);
}

#[test]
fn no_block_of_records_does_harm() {
    let blocks: Vec<&[u8]> = example()
        .chunks_exact(PAGE)
        .filter(|page| page[8..15] == *b"KVTRECS")
        .collect();
    assert!(blocks.len() > 10);
    let mut random = Random(2);
    for _ in 0..rounds(20_000) {
        let mut page = blocks[random.below(blocks.len() as u64) as usize].to_vec();
        let len = [PAGE, 384, 128][random.below(3) as usize];
        mutate(&mut page[..len], &mut random);
        block(&page);
    }
}

#[test]
fn no_image_does_harm() {
    let mut random = Random(3);
    for _ in 0..rounds(300) {
        let payload = 60_000 + random.below(40_000) as u32;
        let segments = 1 + random.below(6) as u32;
        let mut data = [payload.to_le_bytes(), segments.to_le_bytes()].concat();
        let table_at = (payload as usize).next_multiple_of(16);
        data.resize(8 + table_at, 1);
        let (each, mut next) = (payload / segments, 0);
        for i in 0..segments {
            let len = if i + 1 == segments {
                payload - next
            } else {
                each
            };
            data.extend(next.to_le_bytes());
            data.extend(len.to_le_bytes());
            data.extend(random.below(u64::MAX >> 1).to_le_bytes());
            next += len;
        }
        let from = if random.below(3) == 0 {
            0
        } else {
            8 + table_at
        };
        mutate(&mut data[from..], &mut random);
        slot_image(&data);
    }
}

#[test]
fn no_device_does_harm() {
    // Most of the time goes here: one thread a seed.
    std::thread::scope(|scope| {
        for seed in [4, 5] {
            scope.spawn(move || damage_devices(seed));
        }
    });
    device(&[]);
}

fn damage_devices(seed: u64) {
    let mut random = Random(seed);
    let metadata: Vec<usize> = (0..BYTES as usize / PAGE)
        .filter(|&page| page < 2 || example()[page * PAGE + 8..][..7] == *b"KVTRECS")
        .collect();
    for round in 0..rounds(1200) {
        let mut data = vec![(round % 2) as u8];
        for _ in 0..1 + random.below(12) {
            let page = if random.below(10) == 0 {
                random.below(BYTES / PAGE as u64) as usize
            } else {
                metadata[random.below(metadata.len() as u64) as usize]
            };
            let within = [PAGE as u64, 512, 128][random.below(3) as usize];
            let at = page * PAGE + random.below(within) as usize;
            let byte = [0, 0xff, 1, random.below(256) as u8][random.below(4) as usize];
            data.extend([at as u8, (at >> 8) as u8, (at >> 16) as u8, byte]);
        }
        device(&data);
    }
}

/// Writes the fuzzers' seeds: `KVTIER_SEEDS=fuzz/corpus cargo test -p kvtier-nvme seeds`.
#[test]
fn seeds_for_the_fuzzers() {
    let Ok(dir) = std::env::var("KVTIER_SEEDS") else {
        return;
    };
    let write = |target: &str, name: &str, bytes: &[u8]| {
        std::fs::write(format!("{dir}/{target}/{name}"), bytes).unwrap();
    };
    // What follows is zeros, which the targets put back.
    let short = |page: &[u8]| page[..page.iter().rposition(|&b| b != 0).unwrap() + 1].to_vec();
    write("superblock", "example", &short(&example()[..PAGE]));
    let blocks = example()
        .chunks_exact(PAGE)
        .filter(|page| page[8..15] == *b"KVTRECS");
    for (i, block) in blocks.step_by(4).take(3).enumerate() {
        write("block", &format!("example{i}"), &short(block));
    }
    write("device", "none", &[0]);
    for page in [0u32, 1, 2, 8, 9] {
        for mode in [0, 1] {
            let at = page * PAGE as u32 + 88;
            let [a, b, c, _] = at.to_le_bytes();
            write(
                "device",
                &format!("page{page}mode{mode}"),
                &[mode, a, b, c, 0xff],
            );
        }
    }
    let mut image = [100_000u32.to_le_bytes(), 2u32.to_le_bytes()].concat();
    write("slot_image", "zeros", &image);
    image.resize(6000, 7);
    write("slot_image", "sevens", &image);
}
