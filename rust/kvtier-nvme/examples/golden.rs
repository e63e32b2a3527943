//! Makes the golden files of the present format version: a small store in every state that a record
//! knows, and the list of what must be read back from it.
//!
//! `cargo run -p kvtier-nvme --example golden -- DIR`, through `scripts/golden.sh`. Made once for a
//! version, by the code that defined it, and never again.

#![allow(clippy::unwrap_used)] // it is run by hand

#[path = "../tests/common/mod.rs"]
mod common;

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use common::{answer, id, is_intact, put, read, write_of};
use kvtier_codec::checksum::hash64;
use kvtier_codec::image::Shape;
use kvtier_nvme::{NvmeTier, Options};

const SECTOR: usize = 512;

fn main() {
    let to = PathBuf::from(std::env::args().nth(1).expect("a directory to write to"));
    let dir = tempfile::tempdir().unwrap();
    let options = Options::new(vec![dir.path().to_owned()], 1 << 20);
    let (tier, _) = NvmeTier::open(options.clone()).unwrap();
    let mut parent = None;
    for (n, payload) in [1, 511, 4096, 4097, 20_000, 65_537, 65_536]
        .into_iter()
        .enumerate()
    {
        let shape = Shape::new(payload, payload.min(7)).unwrap();
        let slot = tier.reserve(shape.pages()).unwrap();
        let (done, answer) = answer();
        let mut write = write_of(slot, id(n as u64), payload, done);
        (write.parent, write.importance) = (parent, n as f32 / 4.0);
        tier.write(write);
        answer.recv().unwrap().unwrap();
        tier.flush(None).unwrap();
        parent = id(n as u64)[..16].try_into().ok();
    }
    let lost = put(&tier, id(100), 3000);
    tier.flush(None).unwrap();
    tier.quarantine(lost, &id(100));
    for n in 200..210 {
        let gone = put(&tier, id(n), 100);
        tier.flush(None).unwrap();
        tier.remove(gone, &id(n));
        tier.flush(None).unwrap();
    }
    put(&tier, id(300), 700); // in the journal, behind the checkpoint
    assert!(tier.stats().checkpoints > 0);
    tier.close(None).unwrap();

    let (tier, recovered) = NvmeTier::open(options).unwrap();
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let mut list = String::from(
        "id\tparent\tnamespace\tpayload\tsegments\tcodec\timportance\tgeneration\txxh3\n",
    );
    for block in &recovered {
        let bytes = read(&tier, block.slot).unwrap();
        assert!(is_intact(block, &bytes));
        writeln!(
            list,
            "{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{:016x}",
            hex(&block.id),
            block.parent.map_or("-".into(), |p| hex(&p)),
            block.namespace,
            block.shape.payload(),
            block.shape.segments(),
            block.codec,
            block.importance,
            block.slot.generation,
            hash64(&bytes[..block.shape.payload()]),
        )
        .unwrap();
    }
    tier.close(None).unwrap();
    let image = fs::read(dir.path().join("kvtier.dat")).unwrap();
    let mut sectors = Vec::new();
    for (i, sector) in image.chunks_exact(SECTOR).enumerate() {
        if sector.iter().any(|&b| b != 0) {
            sectors.extend((i as u32).to_le_bytes());
            sectors.extend(sector);
        }
    }
    fs::write(to.join("store.sectors"), sectors).unwrap();
    fs::write(to.join("blocks.tsv"), list).unwrap();
}
