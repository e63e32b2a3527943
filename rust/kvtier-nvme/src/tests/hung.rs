//! A device that never answers, under both engines.
//!
//! Under io_uring a pipe stands for it: reads of an empty pipe hang until somebody writes to it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::common::{answer, id, put, start_put};
use super::model::{BYTES, open, sim, soon};
use crate::device::lock::{self, Lock};
use crate::device::sim::{Fault, Op as SimOp, SimDevice};
use crate::open::{Opener, all};
use crate::{Device, EngineKind, ErrorKind, NvmeTier, Options, Pages, Read};

/// Metadata goes to the simulated device, what the ring does to the pipe.
struct Pipe {
    sim: Arc<SimDevice>,
    pipe: File,
}

impl Pipe {
    /// A pipe that answers one read of a page, the one that proves io_uring.
    fn new(dir: &Path) -> Arc<Self> {
        let path = dir.join("pipe");
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a valid path.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let mut pipe = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .unwrap();
        pipe.write_all(&[0; 4096]).unwrap();
        Arc::new(Pipe { sim: sim(1), pipe })
    }
}

impl Device for Pipe {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.sim.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        self.sim.write_at(buf, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.sim.sync()
    }

    fn len(&self) -> u64 {
        self.sim.len()
    }

    fn raw_fd(&self) -> Option<RawFd> {
        Some(self.pipe.as_raw_fd())
    }
}

#[test]
fn a_hung_device_under_io_uring_does_not_hang_close_and_keeps_lock_and_memory() {
    let dir = tempfile::tempdir().unwrap();
    let device = Pipe::new(dir.path());
    crate::recover::format(&*device, BYTES, "pipe").unwrap();
    let mut options = Options::new(vec![], BYTES);
    options.engine = EngineKind::IoUring;
    let (opened, home) = (device.clone(), dir.path().to_owned());
    let opener: Opener = Box::new(move || Ok((opened, Some(Lock::directory(&home)?))));
    let opened = match all([("pipe".into(), opener)].into_iter(), BYTES, &options) {
        Ok(opened) => opened,
        Err(e) => return eprintln!("skipped: no io_uring on this machine ({e})"),
    };
    let (tier, _) = NvmeTier::over(opened, &options).unwrap();
    assert_eq!(tier.engine_name(), "io_uring");
    let slot = tier.reserve(4).unwrap();
    let pages = Arc::new(Pages::new(4));
    let (done, read) = answer();
    tier.read(Read {
        slot,
        offset: 0,
        len: 4 * 4096,
        // SAFETY: the memory is not looked at before the answer.
        buf: unsafe { pages.io() },
        hold: tier.hold(slot),
        urgent: true,
        attended: None,
        done,
    });
    let closed = tier.close(soon()).unwrap_err();
    assert_eq!(closed.kind(), ErrorKind::Deadline, "{closed}");
    assert!(read.try_recv().is_err(), "the read is still in flight");
    assert!(Arc::strong_count(&pages) > 1, "and keeps its memory");
    drop(tier);
    let locked = Lock::directory(dir.path()).unwrap_err();
    assert!(matches!(locked.kind(), ErrorKind::Locked { .. }));
    assert_eq!(lock::holder(dir.path()), Some(std::process::id()));
    // The device comes back to life: the read completes, and its memory is given back.
    (&device.pipe).write_all(&[7; 4 * 4096]).unwrap();
    read.recv().unwrap().unwrap();
    while Arc::strong_count(&pages) > 1 {
        std::thread::yield_now();
    }
    assert!(pages.iter().all(|&b| b == 7));
}

#[test]
fn a_path_that_hangs_does_not_keep_the_others_from_being_closed_well() {
    for op in [SimOp::Write, SimOp::Sync] {
        let devices = [sim(1), sim(2)];
        let (tier, _) = open(&devices);
        devices[0].inject(op, devices[0].count(op), Fault::Hang);
        // Both paths get some; none of it is flushed.
        let mut answers = Vec::new();
        while answers.iter().filter(|(path, _)| *path == 1).count() < 3 {
            let (slot, answer) = start_put(&tier, id(answers.len() as u64), 5000).unwrap();
            answers.push((slot.path, answer));
        }
        for (_, answer) in answers.iter().filter(|(path, _)| *path == 1) {
            answer.recv().unwrap().unwrap();
        }
        assert_eq!(tier.close(soon()).unwrap_err().kind(), ErrorKind::Deadline);
        // The other path's committer needs nobody to wait for it.
        while open_crashed(&devices[1]) < 3 {
            std::thread::yield_now();
        }
        devices[0].release();
    }
}

fn open_crashed(device: &SimDevice) -> usize {
    let crashed = device.crash();
    let (superblock, _) = crate::recover::superblock(&crashed, "sim").unwrap();
    crate::recover::recover(&crashed, &superblock).blocks.len()
}

#[test]
fn a_device_that_hangs_while_it_is_opened_is_given_up_in_time() {
    for op in [SimOp::Read, SimOp::Sync] {
        let devices = [sim(1), sim(2)];
        let (tier, _) = open(&devices);
        put(&tier, id(1), 5000);
        put(&tier, id(2), 5000);
        tier.close(None).unwrap();
        devices[0].inject(op, devices[0].count(op), Fault::Hang);
        let mut options = Options::new(vec![], 2 * BYTES);
        options.patience = Duration::from_millis(500);
        let as_devices = || {
            devices
                .iter()
                .map(|d| d.clone() as Arc<dyn Device>)
                .collect()
        };
        let alone = vec![devices[0].clone() as Arc<dyn Device>];
        let half = Options {
            size: BYTES,
            ..options.clone()
        };
        let (tier, recovered) = NvmeTier::open_on(as_devices(), options).unwrap();
        assert_eq!((tier.stats().failed_paths, recovered.len()), (1, 1));
        let other = put(&tier, id(3), 5000);
        assert_eq!(other.path, 0, "slots count the paths that are there");
        tier.close(None).unwrap();
        devices[0].inject(op, devices[0].count(op), Fault::Hang);
        let error = NvmeTier::open_on(alone, half).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Deadline, "{error}");
        devices[0].release();
    }
}

#[test]
fn slow_and_late_requests_complete_in_any_order_and_all_of_them() {
    let device = sim(1);
    let (tier, _) = open(std::slice::from_ref(&device));
    let first = device.count(SimOp::Write);
    for nth in [0, 2, 3] {
        device.inject(SimOp::Write, first + nth, Fault::Hang);
    }
    let answers: Vec<_> = (0..8)
        .map(|n| start_put(&tier, id(n), 9000).unwrap())
        .collect();
    // Those behind the slow ones go ahead of them.
    let mut early = 0;
    while early < 5 {
        early += answers
            .iter()
            .filter(|(_, answer)| answer.try_recv().is_ok())
            .count();
        std::thread::yield_now();
    }
    assert_eq!(tier.flush(soon()).unwrap_err().kind(), ErrorKind::Deadline);
    device.release();
    tier.flush(Some(Instant::now() + Duration::from_secs(60)))
        .unwrap();
    assert_eq!(open_crashed(&device), 8);
}
