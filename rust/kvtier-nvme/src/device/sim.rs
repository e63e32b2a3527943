//! A device in memory that fails on purpose, the same way for the same seed.
//!
//! Writes land in a volatile cache. [`SimDevice::crash`] keeps, for every 512-byte sector, either
//! what the last barrier made durable or any one of the versions written since: any subset of
//! writes survives, in any order, torn anywhere between sectors.

use std::collections::BTreeMap;
use std::io;

use crate::sync::{Condvar, Mutex};

use super::Device;

const SECTOR: usize = 512;
const PAGE: u64 = 4096;

/// What kind of request a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Op {
    /// A read.
    Read,
    /// A write.
    Write,
    /// A barrier.
    Sync,
}

/// What goes wrong with one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It fails with this `errno` and does nothing.
    Errno(i32),
    /// It moves at most so many bytes, and says so.
    Short(usize),
    /// It says that all is well and does nothing (a lost write, a lying barrier).
    Lost,
    /// It goes to another place, so many bytes away.
    Misdirected(i64),
    /// It says that all is well, but only the first so many bytes arrive.
    Torn(usize),
    /// It and all after it fail: the power is gone. A write may still be in the cache.
    Crash,
    /// It waits for [`SimDevice::release`].
    Hang,
}

/// A simulated device.
pub struct SimDevice {
    len: u64,
    state: Mutex<State>,
    released: Condvar,
}

struct State {
    /// What reads see.
    current: Vec<u8>,
    /// What the last barrier made durable, of the sectors written since, with every later version.
    volatile: BTreeMap<usize, Vec<[u8; SECTOR]>>,
    faults: BTreeMap<(Op, u64), Fault>,
    /// Pages that cannot be read until they are written.
    bad: BTreeMap<u64, i32>,
    counts: [u64; 3],
    dead: bool,
    released: bool,
    random: u64,
}

impl SimDevice {
    /// A device of `bytes` zeros.
    pub fn new(bytes: u64, seed: u64) -> Self {
        Self::from_image(vec![0; bytes as usize], seed)
    }

    /// A device that holds `image`, all of it durable.
    pub fn from_image(image: Vec<u8>, seed: u64) -> Self {
        SimDevice {
            len: image.len() as u64,
            state: Mutex::new(State {
                current: image,
                volatile: BTreeMap::new(),
                faults: BTreeMap::new(),
                bad: BTreeMap::new(),
                counts: [0; 3],
                dead: false,
                released: false,
                random: seed,
            }),
            released: Condvar::new(),
        }
    }

    /// Strikes the request of this kind with number `nth` (the first is 0) with `fault`.
    pub fn inject(&self, op: Op, nth: u64, fault: Fault) {
        self.state.lock().faults.insert((op, nth), fault);
    }

    /// Takes back [`SimDevice::inject`].
    pub fn forget(&self, op: Op, nth: u64) {
        self.state.lock().faults.remove(&(op, nth));
    }

    /// Requests of this kind so far.
    pub fn count(&self, op: Op) -> u64 {
        self.state.lock().counts[op as usize]
    }

    /// Flips one bit of the medium.
    pub fn rot(&self, byte: u64, bit: u8) {
        self.state.lock().current[byte as usize] ^= 1 << (bit % 8);
    }

    /// Makes every read of this 4 KiB page fail until it is written.
    pub fn fail_page(&self, page: u64, errno: i32) {
        self.state.lock().bad.insert(page, errno);
    }

    /// Lets all hanging requests go on, now and later.
    pub fn release(&self) {
        self.state.lock().released = true;
        self.released.notify_all();
    }

    /// What reads see now.
    pub fn image(&self) -> Vec<u8> {
        self.state.lock().current.clone()
    }

    /// The device after a loss of power: what survived, with no faults set.
    pub fn crash(&self) -> SimDevice {
        let mut state = self.state.lock();
        let mut image = state.current.clone();
        let volatile = std::mem::take(&mut state.volatile);
        for (sector, versions) in &volatile {
            let pick = state.random(versions.len() as u64) as usize;
            image[sector * SECTOR..][..SECTOR].copy_from_slice(&versions[pick]);
        }
        let seed = state.random(u64::MAX);
        state.volatile = volatile;
        SimDevice::from_image(image, seed)
    }

    /// Counts the request and finds its fault; waits if it hangs.
    fn enter(&self, op: Op) -> io::Result<(crate::sync::MutexGuard<'_, State>, Option<Fault>)> {
        let mut state = self.state.lock();
        let nth = state.counts[op as usize];
        state.counts[op as usize] += 1;
        let fault = state.faults.remove(&(op, nth));
        if state.dead {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        match fault {
            Some(Fault::Errno(errno)) => return Err(io::Error::from_raw_os_error(errno)),
            Some(Fault::Hang) => {
                while !state.released {
                    self.released.wait(&mut state);
                }
            }
            _ => {}
        }
        Ok((state, fault))
    }
}

impl State {
    /// SplitMix64, below `bound`.
    fn random(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    fn write(&mut self, buf: &[u8], offset: usize) {
        for (i, piece) in buf.chunks(SECTOR).enumerate() {
            let at = offset + i * SECTOR;
            let old = &mut self.current[at..at + SECTOR];
            let versions = self.volatile.entry(at / SECTOR).or_insert_with(|| {
                let mut durable = [0; SECTOR];
                durable.copy_from_slice(old);
                vec![durable]
            });
            old[..piece.len()].copy_from_slice(piece);
            let mut new = [0; SECTOR];
            new.copy_from_slice(old);
            versions.push(new);
        }
    }
}

/// Where a request goes: misdirected ones stay inside the device and aligned.
fn place(fault: Option<Fault>, offset: u64, len: usize, device: u64) -> usize {
    let room = (device as i64 - len as i64).max(0);
    match fault {
        Some(Fault::Misdirected(by)) => (offset as i64 + by).clamp(0, room) as usize,
        _ => offset as usize,
    }
}

impl Device for SimDevice {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let (mut state, fault) = self.enter(Op::Read)?;
        if fault == Some(Fault::Crash) {
            state.dead = true;
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let at = place(fault, offset, buf.len(), self.len);
        let mut n = buf.len().min(state.current.len().saturating_sub(at));
        let pages = at as u64 / PAGE..(at + n).div_ceil(PAGE as usize) as u64;
        if let Some((_, &errno)) = state.bad.range(pages).next() {
            return Err(io::Error::from_raw_os_error(errno));
        }
        match fault {
            Some(Fault::Short(most)) => n = n.min(most),
            Some(Fault::Lost) => return Ok(n),
            _ => {}
        }
        let arrive = if let Some(Fault::Torn(most)) = fault {
            n.min(most)
        } else {
            n
        };
        buf[..arrive].copy_from_slice(&state.current[at..at + arrive]);
        Ok(n)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        let (mut state, fault) = self.enter(Op::Write)?;
        let at = place(fault, offset, buf.len(), self.len);
        if at + buf.len() > state.current.len() {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let (arrive, say) = match fault {
            Some(Fault::Short(most)) => (buf.len().min(most), buf.len().min(most)),
            Some(Fault::Torn(most)) => (buf.len().min(most), buf.len()),
            Some(Fault::Lost) => (0, buf.len()),
            _ => (buf.len(), buf.len()),
        };
        state.write(&buf[..arrive], at);
        let written = at as u64 / PAGE..(at + arrive) as u64 / PAGE;
        state.bad.retain(|page, _| !written.contains(page));
        if fault == Some(Fault::Crash) {
            state.dead = true;
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(say)
    }

    fn sync(&self) -> io::Result<()> {
        let (mut state, fault) = self.enter(Op::Sync)?;
        match fault {
            Some(Fault::Crash) => {
                state.dead = true;
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            Some(Fault::Lost) => {}
            _ => state.volatile.clear(),
        }
        Ok(())
    }

    fn len(&self) -> u64 {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_keeps_what_was_synced_and_some_of_the_rest() {
        let device = SimDevice::new(8 * SECTOR as u64, 1);
        device.write_at(&[1; 4 * SECTOR], 0).unwrap();
        device.sync().unwrap();
        device.write_at(&[2; 4 * SECTOR], 0).unwrap();
        device.write_at(&[3; 4 * SECTOR], 0).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..64 {
            let image = device.crash().image();
            assert!(image[4 * SECTOR..].iter().all(|&b| b == 0));
            for sector in image[..4 * SECTOR].chunks(SECTOR) {
                assert!(sector.iter().all(|&b| b == sector[0]), "sectors are whole");
                seen.insert(sector[0]);
            }
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn faults_strike_the_request_they_name() {
        let device = SimDevice::new(4 * SECTOR as u64, 1);
        device.inject(Op::Write, 1, Fault::Errno(libc::ENOSPC));
        device.inject(Op::Write, 2, Fault::Short(SECTOR));
        device.inject(Op::Write, 3, Fault::Lost);
        device.inject(Op::Write, 4, Fault::Misdirected(SECTOR as i64));
        device.inject(Op::Write, 5, Fault::Crash);
        let write = |byte| device.write_at(&[byte; 2 * SECTOR], 0);
        assert_eq!(write(1).unwrap(), 2 * SECTOR);
        assert_eq!(write(2).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(write(3).unwrap(), SECTOR);
        assert_eq!(write(4).unwrap(), 2 * SECTOR);
        assert_eq!(write(5).unwrap(), 2 * SECTOR);
        assert!(write(6).is_err() && device.sync().is_err());
        let first = |image: Vec<u8>| [image[0], image[SECTOR], image[2 * SECTOR]];
        assert_eq!(first(device.image()), [6, 6, 5]);
        assert_eq!(device.count(Op::Write), 6);
    }
}
