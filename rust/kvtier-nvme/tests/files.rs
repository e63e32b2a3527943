//! The tier on real files: locks, versions, sizes, check and repair, and a process that is killed.

#![allow(clippy::unwrap_used)] // the helpers are tests as well

mod common;

use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::{id, is_intact, put, read, start_put};
use kvtier_nvme::{EngineKind, ErrorKind, NvmeTier, Options, check, check_all, inspect, probe};

const SIZE: u64 = 8 << 20;

fn options(dir: &Path) -> Options {
    Options::new(vec![dir.to_owned()], SIZE)
}

fn data(dir: &Path) -> PathBuf {
    dir.join("kvtier.dat")
}

/// Runs this very test program again, as the test `child` with a role.
fn spawn(role: &str, dir: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["child", "--exact", "--nocapture"])
        .env("KVTIER_TEST_ROLE", role)
        .env("KVTIER_TEST_DIR", dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// What the other process does; nothing in a plain run of the tests.
#[test]
fn child() {
    let Ok(role) = std::env::var("KVTIER_TEST_ROLE") else {
        return;
    };
    let dir = PathBuf::from(std::env::var("KVTIER_TEST_DIR").unwrap());
    let (tier, recovered) = NvmeTier::open(options(&dir)).unwrap();
    let mut newest = recovered
        .iter()
        .map(|r| u64::from_le_bytes(r.id[..8].try_into().unwrap()))
        .max();
    println!("\nopen");
    if role == "hold" {
        let _ = std::io::stdin().read_line(&mut String::new());
        return;
    }
    // Writes for ever, and says from time to time up to where all is durable.
    let mut live: Vec<_> = recovered.iter().map(|r| (r.id, r.slot)).collect();
    loop {
        let next = newest.map_or(0, |n| n + 1);
        newest = Some(next);
        let payload = 1 + (next as usize * 7919) % 100_000;
        while tier.free_pages() < 600 {
            let (id, slot) = live.remove(0);
            tier.remove(slot, &id);
            tier.flush(None).unwrap();
        }
        let (slot, answer) = start_put(&tier, id(next), payload).unwrap();
        answer.recv().unwrap().unwrap();
        live.push((id(next), slot));
        if next % 7 == 6 {
            tier.flush(None).unwrap();
            println!(
                "{} {next}",
                u64::from_le_bytes(live[0].0[..8].try_into().unwrap())
            );
        }
    }
}

fn wait_for_open(child: &mut Child) -> impl Iterator<Item = String> + use<> {
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    assert!(lines.any(|line| line == "open"));
    lines
}

#[test]
fn a_second_process_is_refused_and_told_who_holds_the_path() {
    let dir = tempfile::tempdir().unwrap();
    let mut other = spawn("hold", dir.path());
    let _lines = wait_for_open(&mut other);
    let error = NvmeTier::open(options(dir.path())).err().unwrap();
    assert_eq!(
        error.kind(),
        ErrorKind::Locked {
            pid: Some(other.id())
        }
    );
    assert!(
        error.to_string().contains(&other.id().to_string()),
        "{error}"
    );
    assert_eq!(inspect(dir.path()).unwrap().holder, Some(other.id()));
    assert!(matches!(
        check(dir.path(), false).unwrap_err().kind(),
        ErrorKind::Locked { .. }
    ));
    other.stdin.take().unwrap().write_all(b"\n").unwrap();
    other.wait().unwrap();
    let (tier, _) = NvmeTier::open(options(dir.path())).unwrap();
    tier.close(None).unwrap();
    assert_eq!(inspect(dir.path()).unwrap().holder, None);
}

#[test]
fn a_killed_process_loses_nothing_that_was_flushed() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..8 {
        let mut writer = spawn("write", dir.path());
        let mut lines = wait_for_open(&mut writer);
        let last = lines.nth(round * 5).unwrap();
        writer.kill().unwrap();
        writer.wait().unwrap();
        let last = lines.last().unwrap_or(last); // it may have gone on until the signal came
        let (from, to) = last.split_once(' ').unwrap();
        let (from, to): (u64, u64) = (from.parse().unwrap(), to.parse().unwrap());
        let (tier, recovered) = NvmeTier::open(options(dir.path())).unwrap();
        for block in &recovered {
            assert!(is_intact(block, &read(&tier, block.slot).unwrap()));
        }
        let numbers: Vec<u64> = recovered
            .iter()
            .map(|r| u64::from_le_bytes(r.id[..8].try_into().unwrap()))
            .collect();
        // What the next group removes may be gone already: one group at most, the oldest blocks.
        let missing = (from..=to)
            .filter(|n| !numbers.contains(n))
            .collect::<Vec<_>>();
        assert!(
            missing.iter().all(|&n| n < to - 6),
            "{missing:?} of {from}..={to}"
        );
        assert!(numbers.is_sorted(), "commit order");
        let pages: u64 = recovered.iter().map(|r| u64::from(r.slot.pages)).sum();
        assert_eq!(tier.used_pages(), pages);
        tier.close(None).unwrap();
        assert_eq!(
            check(dir.path(), false).unwrap().damaged,
            Vec::<String>::new()
        );
    }
}

#[test]
fn the_file_is_allocated_at_once_and_never_grows() {
    for engine in [EngineKind::IoUring, EngineKind::Threads] {
        let dir = tempfile::tempdir().unwrap();
        let options = Options {
            engine,
            ..options(dir.path())
        };
        let (tier, _) = NvmeTier::open(options.clone()).unwrap();
        let before = fs::metadata(data(dir.path())).unwrap();
        assert_eq!(before.len(), SIZE);
        assert!(before.blocks() * 512 >= SIZE);
        let mut slots = std::collections::VecDeque::new();
        for n in 0..400 {
            while tier.free_pages() < 40 {
                let (id, slot) = slots.pop_front().unwrap();
                tier.remove(slot, &id);
                tier.flush(None).unwrap();
            }
            slots.push_back((id(n), put(&tier, id(n), 1 + n as usize * 331 % 100_000)));
        }
        tier.close(None).unwrap();
        let after = fs::metadata(data(dir.path())).unwrap();
        assert_eq!(after.len(), SIZE);
        // A file system may need a few blocks more to say which parts have been written.
        assert!(after.blocks() * 512 <= SIZE + (64 << 10));
        let (tier, recovered) = NvmeTier::open(options).unwrap();
        assert_eq!(recovered.len(), slots.len());
        assert_eq!(
            tier.engine_name(),
            if engine == EngineKind::Threads {
                "threads"
            } else {
                "io_uring"
            }
        );
    }
}

#[test]
fn newer_foreign_and_resized_files_are_refused_untouched() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, _) = NvmeTier::open(options(dir.path())).unwrap();
    put(&tier, id(1), 5000);
    tier.close(None).unwrap();
    let path = data(dir.path());
    let ours = fs::read(&path).unwrap();

    let refused = |bytes: &[u8], kind: ErrorKind, says: &str| {
        fs::write(&path, bytes).unwrap();
        let error = NvmeTier::open(options(dir.path())).err().unwrap();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(says), "{error}");
        assert!(check(dir.path(), true).is_err() && inspect(dir.path()).is_err());
        assert!(fs::read(&path).unwrap() == bytes, "nothing was changed");
    };
    let mut newer = ours.clone();
    newer[8..12].copy_from_slice(&7u32.to_le_bytes());
    let crc = crc32fast::hash(&newer[..508]);
    newer[508..512].copy_from_slice(&crc.to_le_bytes());
    refused(&newer, ErrorKind::NewerFormat, "format version 7");
    refused(
        &vec![b'x'; 20_000],
        ErrorKind::Damaged,
        "not a kvtier store",
    );
    refused(&vec![0; 20_000], ErrorKind::Damaged, "blank");
    refused(&ours[..ours.len() / 2], ErrorKind::Damaged, "damaged");

    fs::write(&path, &ours).unwrap();
    for size in [SIZE / 2, SIZE * 2] {
        let error = NvmeTier::open(Options::new(vec![dir.path().into()], size))
            .err()
            .unwrap();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(
            error
                .to_string()
                .contains("was made with 8 MiB, the size given makes it"),
            "{error}"
        );
    }
    assert!(fs::read(&path).unwrap() == ours);
    assert_eq!(NvmeTier::open(options(dir.path())).unwrap().1.len(), 1);
}

#[test]
fn a_size_that_the_file_system_does_not_have_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let error = NvmeTier::open(Options::new(vec![dir.path().into()], 15 << 40))
        .err()
        .unwrap();
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    let left: Vec<_> = fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left, ["kvtier.lock"]);
    for (paths, size) in [(0, SIZE), (1, 4096), (1, u64::MAX)] {
        let paths = vec![dir.path().to_owned(); paths];
        let error = NvmeTier::open(Options::new(paths, size)).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    }
    let twice = Options::new(vec![dir.path().into(); 2], SIZE);
    assert_eq!(
        NvmeTier::open(twice).err().unwrap().kind(),
        ErrorKind::Config
    );
    let elsewhere = tempfile::tempdir().unwrap();
    let alias = elsewhere.path().join("alias");
    std::os::unix::fs::symlink(dir.path(), &alias).unwrap();
    let twice = Options::new(vec![dir.path().into(), alias], SIZE);
    assert!(matches!(
        NvmeTier::open(twice).err().unwrap().kind(),
        ErrorKind::Locked { .. }
    ));
}

#[test]
fn check_finds_what_is_damaged_and_repair_drops_it() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, _) = NvmeTier::open(options(dir.path())).unwrap();
    let slots: Vec<_> = (0..5).map(|n| put(&tier, id(n), 9000)).collect();
    let lost = put(&tier, id(9), 100);
    tier.quarantine(lost, &id(9));
    tier.close(None).unwrap();
    let report = check(dir.path(), false).unwrap();
    assert_eq!(
        (
            report.blocks,
            report.bytes,
            report.corrupt,
            report.quarantined
        ),
        (5, 45_000, 0, 1)
    );
    assert!(report.damaged.is_empty());

    let summary = inspect(dir.path()).unwrap();
    assert_eq!(
        (summary.blocks, summary.bytes, summary.size),
        (5, 45_000, SIZE)
    );
    assert_eq!((summary.used_pages, summary.version), (16, 1));
    let data_area = SIZE - summary.data_bytes;
    let file = OpenOptions::new()
        .write(true)
        .open(data(dir.path()))
        .unwrap();
    file.write_all_at(b"oops", data_area + u64::from(slots[2].start) * 4096 + 5000)
        .unwrap();
    let report = check(dir.path(), false).unwrap();
    assert_eq!((report.blocks, report.corrupt, report.repaired), (5, 1, 0));
    assert!(
        report.damaged[0].contains("does not match its root"),
        "{:?}",
        report.damaged
    );
    assert_eq!(check(dir.path(), true).unwrap().repaired, 1);
    let report = check(dir.path(), false).unwrap();
    assert_eq!((report.blocks, report.corrupt), (4, 0));
    let (_, recovered) = NvmeTier::open(options(dir.path())).unwrap();
    assert!(recovered.iter().all(|r| r.id != id(2)));
}

#[test]
fn repair_tells_blocks_of_one_generation_on_two_paths_apart() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let slots: Vec<_> = dirs
        .iter()
        .zip([1, 2])
        .map(|(dir, n)| {
            let (tier, _) = NvmeTier::open(options(dir.path())).unwrap();
            let slot = put(&tier, id(n), 9000);
            tier.close(None).unwrap();
            slot
        })
        .collect();
    assert_eq!(slots[0].generation, slots[1].generation);
    let data_area = SIZE - inspect(dirs[0].path()).unwrap().data_bytes;
    let file = OpenOptions::new().write(true).open(data(dirs[0].path()));
    file.unwrap()
        .write_all_at(b"oops", data_area + u64::from(slots[0].start) * 4096)
        .unwrap();
    let paths = dirs.each_ref().map(|dir| dir.path().to_owned());
    let reports = check_all(&paths, true).unwrap();
    let repaired: Vec<u64> = reports.iter().map(|report| report.repaired).collect();
    assert_eq!(repaired, [1, 0]);
    let left = |path: &Path| check(path, false).unwrap().blocks;
    assert_eq!((left(&paths[0]), left(&paths[1])), (0, 1));
}

#[test]
fn only_the_last_part_of_a_path_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mnt").join("kv");
    let error = NvmeTier::open(options(&path)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("mount its drive"), "{error}");
    assert!(!dir.path().join("mnt").exists());
    fs::create_dir(dir.path().join("mnt")).unwrap();
    assert!(NvmeTier::open(options(&path)).is_ok());
}

#[test]
fn probe_says_what_there_is_and_why() {
    let dir = tempfile::tempdir().unwrap();
    let found = probe(dir.path());
    assert!(
        found.direct_alignment.is_none_or(|a| a <= 4096),
        "{found:?}"
    );
    assert!(!found.io_uring_reason.is_empty() && !found.direct_reason.is_empty());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    let nowhere = probe(&dir.path().join("nowhere"));
    assert!(!nowhere.io_uring && nowhere.io_uring_reason.contains("cannot open"));
}
