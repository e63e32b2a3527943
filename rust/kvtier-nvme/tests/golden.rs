//! Stores that older versions made (`scripts/golden.sh`), read by this one.

#![allow(clippy::unwrap_used)] // the helpers are tests as well

mod common;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use common::{id, is_intact, put, read};
use kvtier_codec::checksum::hash64;
use kvtier_nvme::{ErrorKind, NvmeTier, Options, check, inspect};

const SIZE: u64 = 1 << 20;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

/// The data file: all zeros but for the sectors that are listed with their numbers.
fn unpack(version: &Path) -> Vec<u8> {
    let mut image = vec![0; SIZE as usize];
    for entry in fs::read(version.join("store.sectors"))
        .unwrap()
        .chunks_exact(516)
    {
        let number = u32::from_le_bytes(entry[..4].try_into().unwrap()) as usize;
        image[number * 512..][..512].copy_from_slice(&entry[4..]);
    }
    image
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn every_version_is_read_to_the_last_byte() {
    let mut versions = 0;
    for version in fs::read_dir(golden()).unwrap() {
        let version = version.unwrap().path();
        let list = fs::read_to_string(version.join("blocks.tsv")).unwrap();
        let mut expected: HashMap<String, String> = list
            .lines()
            .skip(1)
            .map(|line| {
                let (id, rest) = line.split_once('\t').unwrap();
                (id.to_owned(), rest.to_owned())
            })
            .collect();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("kvtier.dat"), unpack(&version)).unwrap();
        let report = check(dir.path(), false).unwrap();
        assert_eq!(
            (
                report.blocks,
                report.corrupt,
                report.quarantined,
                report.orphaned
            ),
            (expected.len() as u64, 0, 1, 0)
        );
        assert!(report.damaged.is_empty(), "{:?}", report.damaged);
        let summary = inspect(dir.path()).unwrap();
        assert!(summary.epoch > 1 && summary.checkpoint_records > 0 && summary.journal_blocks > 0);

        let options = Options::new(vec![dir.path().to_owned()], SIZE);
        let (tier, recovered) = NvmeTier::open(options.clone()).unwrap();
        for block in &recovered {
            let bytes = read(&tier, block.slot).unwrap();
            let (shape, slot) = (block.shape, block.slot);
            assert!(is_intact(block, &bytes));
            let found = format!(
                "{}\t{}\t{}\t{}\t{}\t{}\t{}\t{:016x}",
                block.parent.map_or("-".into(), |p| hex(&p)),
                block.namespace,
                shape.payload(),
                shape.segments(),
                block.codec,
                block.importance,
                slot.generation,
                hash64(&bytes[..shape.payload()]),
            );
            assert_eq!(expected.remove(&hex(&block.id)), Some(found));
        }
        assert!(expected.is_empty(), "{expected:?}");
        // And it is written to.
        let all = recovered.len();
        put(&tier, id(1000), 5000);
        tier.close(None).unwrap();
        assert_eq!(NvmeTier::open(options).unwrap().1.len(), all + 1);
        versions += 1;
    }
    assert!(versions >= 1);
}

#[test]
fn a_version_to_come_is_refused_untouched() {
    let ours = unpack(&golden().join("v1"));
    for copies in [&[0][..], &[1], &[0, 1]] {
        let mut newer = ours.clone();
        for copy in copies {
            let page = &mut newer[copy * 4096..][..4096];
            page[8..12].copy_from_slice(&2u32.to_le_bytes());
            page[300..304].copy_from_slice(b"new!"); // fields that nobody knows yet
            let crc = crc32fast::hash(&page[..508]);
            page[508..512].copy_from_slice(&crc.to_le_bytes());
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("kvtier.dat");
        fs::write(&file, &newer).unwrap();
        let before = fs::metadata(&file).unwrap().modified().unwrap();
        let options = Options::new(vec![dir.path().to_owned()], SIZE);
        let error = NvmeTier::open(options).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::NewerFormat);
        let text = error.to_string();
        assert!(
            text.contains("format version 2") && text.contains("up to 1"),
            "{text}"
        );
        for repair in [false, true] {
            assert_eq!(
                check(dir.path(), repair).unwrap_err().kind(),
                ErrorKind::NewerFormat
            );
        }
        assert_eq!(
            inspect(dir.path()).unwrap_err().kind(),
            ErrorKind::NewerFormat
        );
        assert!(fs::read(&file).unwrap() == newer);
        assert_eq!(fs::metadata(&file).unwrap().modified().unwrap(), before);
    }
}
