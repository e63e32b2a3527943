//! The arena: one mapping, made at start and kept, divided into pinned slots.
//!
//! A slot is a run of 4 KiB pages at an offset, never a pointer in anybody's hands for longer than
//! its [`Pin`]. The arena is unmapped when the last pin and the store are gone, so a lease outlives
//! the store that gave it.

pub mod backing;
mod waiters;

use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use crate::sync::{Mutex, MutexGuard};
use kvtier_codec::checksum::{prefetch, prefetch_lines};
use kvtier_codec::image::PAGE;
use kvtier_nvme::slots::{BUSY, FREE, LOST, Owner, Run, Slots};

use crate::error::{Error, Result};
use crate::pin::{PinWord, Unpinned};
use backing::Backing;
use waiters::Waiters;

pub use waiters::Waiter;

/// A mapping divided into slots, with a pin word for each.
pub struct Arena {
    backing: Box<dyn Backing>,
    slots: Mutex<Slots>,
    /// One word a page; a slot uses that of its first page.
    words: Vec<PinWord>,
    ceded: AtomicU32,
    /// All pages from here on are ceded, or lost.
    top: AtomicU32,
    lost: AtomicU32,
    prefaulted: AtomicUsize,
    /// Set under the lock of `slots`.
    closed: AtomicBool,
    waiters: Waiters,
}

/// A slot that stays where it is, and keeps its bytes, while this lives.
pub struct Pin {
    arena: Arc<Arena>,
    start: u32,
}

impl Arena {
    /// Divides `backing` into pages, all free.
    pub fn new(backing: Box<dyn Backing>) -> Arc<Self> {
        let pages = (backing.size() / PAGE) as u32;
        Arc::new(Arena {
            backing,
            slots: Mutex::new(Slots::new(pages)),
            words: (0..pages).map(|_| PinWord::default()).collect(),
            ceded: AtomicU32::new(0),
            top: AtomicU32::new(pages),
            lost: AtomicU32::new(0),
            prefaulted: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            waiters: Waiters::default(),
        })
    }

    /// Pages that may hold blocks: what is neither ceded nor lost.
    pub fn pages(&self) -> u32 {
        self.words.len() as u32
            - self.ceded.load(Ordering::Relaxed)
            - self.lost.load(Ordering::Relaxed)
    }

    /// Pages mapped.
    pub fn mapped_pages(&self) -> u32 {
        self.words.len() as u32
    }

    /// Pages ceded to the index.
    pub fn ceded_pages(&self) -> u32 {
        self.ceded.load(Ordering::Relaxed)
    }

    /// Pages of slots whose bytes were found changed, never used again.
    pub fn lost_pages(&self) -> u32 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Pages that no slot uses.
    pub fn free_pages(&self) -> u32 {
        self.slots.lock().free_pages()
    }

    /// Bytes that the arena keeps beside its pages.
    pub fn overhead_bytes(&self) -> usize {
        self.words.len() * size_of::<PinWord>() + self.slots.lock().memory_bytes()
    }

    /// Bytes from the beginning up to the pages at the end that were ceded.
    pub fn usable_bytes(&self) -> usize {
        self.top.load(Ordering::Relaxed) as usize * PAGE
    }

    /// The whole mapping, for registering it with a device.
    pub fn range(&self) -> (*mut u8, usize) {
        (self.backing.base().as_ptr(), self.backing.size())
    }

    /// Takes a slot of `pages` pages, pinned once, owned by nobody yet. `None`: no hole is that
    /// large.
    pub fn alloc(self: &Arc<Self>, pages: u32) -> Option<Pin> {
        let mut slots = self.open()?;
        let start = slots.alloc(pages, BUSY)?;
        Some(self.start(start))
    }

    /// As [`Arena::alloc`], outside the pages `[from, to)`.
    pub fn alloc_outside(self: &Arc<Self>, pages: u32, from: u32, to: u32) -> Option<Pin> {
        let mut slots = self.open()?;
        let start = slots.alloc_outside(pages, BUSY, from, to)?;
        Some(self.start(start))
    }

    fn open(&self) -> Option<MutexGuard<'_, Slots>> {
        let slots = self.slots.lock();
        (!self.closed.load(Ordering::Relaxed)).then_some(slots)
    }

    /// Gives out no slot any more. Free memory goes back to the machine now, the rest as it gets
    /// free; a file or device is free for others once none of it is in use.
    pub fn close(&self) {
        let slots = self.slots.lock();
        self.closed.store(true, Ordering::Relaxed);
        for run in slots.iter(0, u32::MAX).filter(|run| run.owner == FREE) {
            self.forget(run.start, run.pages);
        }
        self.release_if_unused(&slots);
    }

    /// In a closed arena: lets others have the file if nobody uses any of it.
    fn release_if_unused(&self, slots: &Slots) {
        let unused = |run: Run| match run.owner {
            FREE => true,
            LOST => !self.is_pinned(run.start),
            _ => false,
        };
        if slots.iter(0, u32::MAX).all(unused) {
            self.backing.release();
        }
    }

    /// Drops the contents of pages that belong to no slot.
    fn forget(&self, start: u32, pages: u32) {
        if self.backing.is_private() {
            let at = start as usize * PAGE;
            let at = self.backing.base().as_ptr().wrapping_add(at);
            // SAFETY: the pages belong to no slot, and the lock of `slots` is held or they never
            // will again: nobody uses them. They stay mapped.
            unsafe { libc::madvise(at.cast(), pages as usize * PAGE, libc::MADV_DONTNEED) };
        }
    }

    fn start(self: &Arc<Self>, start: u32) -> Pin {
        self.words[start as usize].start();
        Pin {
            arena: self.clone(),
            start,
        }
    }

    /// Names the owner of a slot, so that a window over it can be cleared.
    pub fn set_owner(&self, start: u32, owner: Owner) {
        self.slots.lock().set_owner(start, owner);
    }

    /// Pins the slot at `start`; `None` if it is retired. Call it where the slot cannot be freed
    /// meanwhile: under the lock of the index shard that names it.
    pub fn pin(self: &Arc<Self>, start: u32) -> Option<Pin> {
        self.words[start as usize].pin().then(|| Pin {
            arena: self.clone(),
            start,
        })
    }

    /// Has the processor fetch what reading the slot needs first.
    pub(crate) fn prefetch(&self, start: u32) {
        const BEGIN: usize = 2048; // from there on a copy fetches ahead of itself
        prefetch(&self.words[start as usize]);
        let at = start as usize * PAGE;
        prefetch_lines(self.backing.base().as_ptr().wrapping_add(at), BEGIN);
    }

    /// Is the slot pinned by anybody?
    pub fn is_pinned(&self, start: u32) -> bool {
        self.pins(start) > 0
    }

    /// How many pins the slot has.
    pub fn pins(&self, start: u32) -> u32 {
        self.words[start as usize].pins()
    }

    /// Forbids new pins; frees the slot now, or with its last pin.
    pub fn retire(&self, start: u32) {
        if self.words[start as usize].retire() {
            self.free(start);
        }
    }

    /// Frees the slot if nobody has it pinned.
    pub fn retire_idle(&self, start: u32) -> bool {
        let idle = self.words[start as usize].retire_if(0);
        if idle {
            self.free(start);
        }
        idle
    }

    /// Makes the slot a fresh one, pinned once and owned by nobody yet, if nobody has it pinned.
    pub fn take_over(self: &Arc<Self>, start: u32) -> Option<Pin> {
        let mut slots = self.open()?;
        if slots.owner(start) == Some(LOST) || !self.words[start as usize].retire_if(0) {
            return None;
        }
        slots.set_owner(start, BUSY);
        Some(self.start(start))
    }

    /// Takes the slot out of use for good: its memory did not keep what was written. The pages of
    /// a slot that others still read are lost all the same; their pins stay valid. False: it was
    /// lost before.
    pub fn quarantine(&self, start: u32) -> bool {
        let mut slots = self.slots.lock();
        let run = slots.iter(start, start + 1).find(|run| run.start == start);
        let Some(run) = run.filter(|run| run.owner != LOST) else {
            return false;
        };
        slots.set_owner(start, LOST);
        self.lost.fetch_add(run.pages, Ordering::Relaxed);
        true
    }

    fn free(&self, start: u32) {
        let mut slots = self.slots.lock();
        let lost = slots.owner(start) == Some(LOST);
        let freed = (!lost).then(|| slots.free(start));
        if self.closed.load(Ordering::Relaxed) {
            freed.inspect(|&pages| self.forget(start, pages));
            self.release_if_unused(&slots);
        }
        let free = slots.free_pages();
        drop(slots);
        self.waiters.tell(Some(free));
    }

    /// The cheapest stretch to clear for a slot of `pages` pages, with the runs in it.
    pub fn window(&self, pages: u32) -> Option<(u32, u32, Vec<Run>)> {
        const TRIES: usize = 32;
        let slots = self.slots.lock();
        let (from, to) = slots.window(pages, TRIES, |run| !self.is_pinned(run.start))?;
        let runs = slots.iter(from, to).collect();
        Some((from, to, runs))
    }

    /// The highest `pages` pages that are not ceded, and the runs in them.
    pub fn top(&self, pages: u32) -> (u32, u32, Vec<Run>) {
        let to = self.top.load(Ordering::Relaxed);
        let from = to.saturating_sub(pages);
        (from, to, self.slots.lock().iter(from, to).collect())
    }

    /// Hands up to `pages` free pages over to the index for good, those at the highest addresses;
    /// `scattered` ones only if it must be, since none can be moved out of the way of a large hole.
    /// Returns how many.
    pub fn cede(&self, pages: u32, scattered: bool) -> u32 {
        const LOOK: u32 = 1024; // pages looked through at a time
        let mut slots = self.slots.lock();
        let mut at = self.top.load(Ordering::Relaxed);
        let mut taken: Vec<(u32, u32)> = Vec::new();
        let (mut left, mut solid) = (pages, true);
        while at > 0 && left > 0 && (solid || scattered) {
            let runs: Vec<Run> = slots.iter(at.saturating_sub(LOOK), at).collect();
            for run in runs.into_iter().rev() {
                solid &= run.owner == FREE || run.owner == LOST;
                if left == 0 || !(solid || scattered) {
                    break;
                }
                let n = if run.owner == FREE {
                    run.pages.min(left)
                } else {
                    0
                };
                let from = run.start + run.pages - n;
                if n > 0 && slots.alloc_at(from, n, LOST) {
                    left -= n;
                    taken.push((from, n));
                }
                at = if n > 0 { from } else { run.start };
                if solid {
                    self.top.store(at, Ordering::Relaxed);
                }
            }
        }
        self.ceded.fetch_add(pages - left, Ordering::Relaxed);
        drop(slots);
        for (from, n) in taken {
            self.forget(from, n);
        }
        pages - left
    }

    /// Announces that the caller looks for room: from now on it is told of what changes.
    pub fn waiter(&self) -> Waiter<'_> {
        self.waiters.waiter()
    }

    /// Does anybody look for room?
    pub fn is_awaited(&self) -> bool {
        self.waiters.is_awaited()
    }

    /// Has all who wait for room look again.
    pub fn notify(&self) {
        self.waiters.tell(None);
    }

    /// Bytes that are known to be backed by memory.
    pub fn prefaulted_bytes(&self) -> usize {
        self.prefaulted.load(Ordering::Relaxed)
    }

    /// Backs every page that is not ceded with memory, on `threads` threads; `progress` is told
    /// (done, total) in bytes. `stop` ends it early. Blocks until done.
    pub fn prefault(
        &self,
        threads: usize,
        stop: &(dyn Fn() -> bool + Sync),
        progress: &(dyn Fn(usize, usize) + Sync),
    ) {
        const CHUNK: usize = 16 << 20;
        let (base, len) = (self.backing.base().as_ptr() as usize, self.backing.size());
        let next = AtomicUsize::new(0);
        let work = || loop {
            let at = next.fetch_add(CHUNK, Ordering::Relaxed);
            let usable = self.usable_bytes();
            if at >= usable || stop() {
                return;
            }
            let n = CHUNK.min(usable - at);
            // SAFETY: the range lies in our mapping; populating does not change contents.
            let rc = unsafe { libc::madvise((base + at) as *mut _, n, libc::MADV_POPULATE_WRITE) };
            if rc != 0 {
                for page in (at..at + n).step_by(PAGE) {
                    // SAFETY: inside the mapping. Slots may be in use already, so the touch is an
                    // atomic that leaves the byte as it is.
                    let byte = unsafe { AtomicU8::from_ptr((base + page) as *mut u8) };
                    byte.fetch_or(0, Ordering::Relaxed);
                }
            }
            let done = self.prefaulted.fetch_add(n, Ordering::Relaxed) + n;
            progress(done, len);
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.max(1) {
                // Where no thread can be started, this one does it all.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
    }

    /// The NUMA nodes on which the first, middle and last touched pages lie.
    pub fn nodes(&self) -> Result<Vec<i32>> {
        let base = self.backing.base().as_ptr() as usize;
        let len = self.backing.size();
        if len == 0 {
            return Err(Error::os("an empty arena lies nowhere"));
        }
        let pages: Vec<*const u8> = [0, len / 2 / PAGE * PAGE, len - PAGE]
            .iter()
            .map(|at| (base + at) as *const u8)
            .collect();
        backing::nodes_of(&pages)
    }
}

impl Pin {
    /// The slot's first page.
    pub fn start(&self) -> u32 {
        self.start
    }

    /// The slot's memory. Valid while the pin lives; how many bytes are the slot's is known to
    /// whoever allocated it.
    pub fn ptr(&self) -> *mut u8 {
        let at = self.start as usize * PAGE;
        self.arena.backing.base().as_ptr().wrapping_add(at)
    }

    /// The first `len` bytes of the slot.
    ///
    /// # Safety
    /// The slot must be at least `len` bytes long and hold a complete image: published, or not
    /// written by anybody else while the slice lives.
    pub unsafe fn bytes(&self, len: usize) -> &[u8] {
        // SAFETY: inside the mapping by the caller's contract; pinned slots do not move.
        unsafe { std::slice::from_raw_parts(self.ptr(), len) }
    }

    /// The first `len` bytes of a slot that its writer fills.
    ///
    /// # Safety
    /// As for [`Pin::bytes`], and nobody else reads or writes the slot meanwhile.
    #[expect(
        clippy::mut_from_ref,
        reason = "the pin names memory, it does not own it"
    )]
    pub unsafe fn bytes_mut(&self, len: usize) -> &mut [u8] {
        // SAFETY: the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(self.ptr(), len) }
    }

    /// Gives the slot up: it is freed with its last pin, which this is unless others hold it.
    pub fn discard(self) {
        self.arena.retire(self.start);
    }

    /// For memory that is never published: the slot is freed with its last pin.
    pub fn temporary(self) -> Pin {
        self.arena.retire(self.start);
        self
    }

    /// Frees the slot if this is its only pin; gives the pin back if not.
    pub fn discard_if_only(self) -> std::result::Result<(), Pin> {
        if !self.arena.words[self.start as usize].retire_if(1) {
            return Err(self);
        }
        // The pin was consumed with the word: its arena alone is left to let go of.
        let pin = std::mem::ManuallyDrop::new(self);
        // SAFETY: `pin` is not used, and its fields are not dropped, after this.
        let arena = unsafe { std::ptr::read(&pin.arena) };
        arena.free(pin.start);
        Ok(())
    }
}

impl Clone for Pin {
    fn clone(&self) -> Self {
        // A held slot can be retired, and then takes no new pins; but a copy of a pin that is held
        // must not fail, and cannot resurrect a slot that was freed.
        let word = &self.arena.words[self.start as usize];
        word.pin_held();
        Pin {
            arena: self.arena.clone(),
            start: self.start,
        }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        match self.arena.words[self.start as usize].unpin() {
            Unpinned::Held => {}
            Unpinned::Idle => self.arena.notify(),
            Unpinned::Free => self.arena.free(self.start),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::backing::{HugePages, anonymous, file};
    use super::*;

    fn arena(pages: usize) -> Arc<Arena> {
        Arena::new(anonymous(pages * PAGE, HugePages::Off, None).unwrap())
    }

    #[test]
    fn no_way_to_end_a_pin_keeps_the_arena() {
        let arena = arena(8);
        let pin = || arena.alloc(1).unwrap();
        drop(pin());
        pin().discard();
        drop(pin().temporary());
        assert!(pin().discard_if_only().is_ok());
        let one = pin();
        let other = one.clone();
        assert!(one.discard_if_only().is_err());
        drop(other);
        assert_eq!(Arc::strong_count(&arena), 1);
    }

    #[test]
    fn a_pinned_slot_is_freed_with_its_last_pin() {
        let arena = arena(8);
        let writer = arena.alloc(3).unwrap();
        let reader = arena.pin(writer.start()).unwrap();
        let copy = reader.clone();
        arena.retire(writer.start());
        assert!(arena.pin(writer.start()).is_none());
        drop((writer, reader));
        assert_eq!(arena.free_pages(), 5);
        drop(copy);
        assert_eq!(arena.free_pages(), 8);
    }

    #[test]
    fn a_slot_is_taken_over_only_where_nobody_holds_it_and_its_memory_is_good() {
        let arena = arena(4);
        let pin = arena.alloc(4).unwrap();
        arena.set_owner(0, 7);
        assert!(arena.take_over(0).is_none(), "its writer holds it");
        drop(pin);
        let heir = arena.take_over(0).unwrap();
        assert_eq!((heir.start(), arena.pins(0), arena.free_pages()), (0, 1, 0));
        assert_eq!(arena.top(1).2[0].owner, BUSY, "nobody moves it");
        drop(heir);
        assert!(arena.quarantine(0) && arena.take_over(0).is_none());
        let other = super::tests::arena(1);
        drop(other.alloc(1).unwrap());
        other.close();
        assert!(
            other.take_over(0).is_none(),
            "a closed arena gives none out"
        );
    }

    #[test]
    fn memory_outlives_the_store_under_a_pin() {
        let arena = arena(4);
        let pin = arena.alloc(1).unwrap();
        drop(arena);
        // SAFETY: the slot is one page and ours alone.
        unsafe {
            pin.bytes_mut(PAGE).fill(7);
            assert!(pin.bytes(PAGE).iter().all(|&b| b == 7));
        }
    }

    #[test]
    fn ceded_and_lost_pages_are_never_handed_out() {
        let arena = arena(8);
        let pin = arena.alloc(7).unwrap();
        assert_eq!(arena.cede(2, false), 1, "only what is free");
        pin.discard();
        assert_eq!(arena.cede(1, false), 1);
        assert_eq!((arena.pages(), arena.free_pages()), (6, 6));
        assert_eq!(arena.top(2).0, 4);
        let bad = arena.alloc(2).unwrap();
        arena.quarantine(bad.start());
        bad.discard();
        assert_eq!((arena.pages(), arena.free_pages()), (4, 4));
        assert!(arena.alloc(5).is_none());
    }

    #[test]
    fn pages_are_ceded_past_slots_that_stay() {
        let arena = arena(10);
        let low = arena.alloc(4).unwrap();
        let held = arena.alloc(3).unwrap();
        let lost = arena.alloc(2).unwrap();
        assert!(arena.quarantine(lost.start()) && !arena.quarantine(lost.start()));
        lost.discard();
        assert_eq!((arena.cede(1, false), arena.cede(1, false)), (1, 0));
        assert_eq!(
            arena.top(1),
            (6, 7, arena.top(1).2),
            "the quarantined slot is passed over"
        );
        low.discard();
        assert_eq!(arena.cede(1, false), 0, "a held slot is in the way");
        assert_eq!(
            (arena.cede(1, true), arena.pages(), arena.free_pages()),
            (1, 6, 3)
        );
        assert!(arena.alloc(3).is_some_and(|pin| pin.start() == 0));
        held.discard();
        assert_eq!(arena.free_pages(), 3);
    }

    #[test]
    fn a_temporary_slot_is_freed_with_its_last_pin() {
        let arena = arena(4);
        let pin = arena.alloc(2).unwrap().temporary();
        let copy = pin.clone();
        drop(pin);
        assert_eq!(arena.free_pages(), 2);
        drop(copy);
        assert_eq!(arena.free_pages(), 4);
    }

    #[test]
    fn who_waits_for_room_is_told_of_a_slot_that_is_let_go() {
        let arena = arena(4);
        let pin = arena.alloc(4).unwrap();
        let waiter = arena.waiter();
        let seen = waiter.seen();
        drop(pin);
        assert_ne!(waiter.seen(), seen);
        waiter.wait(
            seen,
            0,
            std::time::Instant::now() + std::time::Duration::from_secs(60),
        );
    }

    #[test]
    fn binding_to_node_zero_puts_pages_there() {
        let arena = Arena::new(anonymous(64 * PAGE, HugePages::Off, Some(0)).unwrap());
        arena.prefault(2, &|| false, &|_, _| ());
        assert_eq!(arena.nodes().unwrap(), [0, 0, 0]);
        assert!(anonymous(PAGE, HugePages::Off, Some(1000)).is_err());
    }

    #[test]
    fn a_file_can_lie_under_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cxl");
        let arena = Arena::new(file(&path, 16 * PAGE).unwrap());
        let pin = arena.alloc(16).unwrap();
        // SAFETY: the slot is ours alone.
        unsafe { pin.bytes_mut(16 * PAGE).fill(3) };
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 16 * PAGE as u64);
    }

    #[test]
    fn prefaulting_reports_progress_and_keeps_bytes() {
        let arena = arena(16);
        let pin = arena.alloc(1).unwrap();
        // SAFETY: the slot is ours alone.
        unsafe { pin.bytes_mut(PAGE).fill(9) };
        let last = AtomicUsize::new(0);
        arena.prefault(2, &|| false, &|done, _| {
            last.fetch_max(done, Ordering::Relaxed);
        });
        assert_eq!(last.into_inner(), 16 * PAGE);
        // SAFETY: as above.
        assert!(unsafe { pin.bytes(PAGE) }.iter().all(|&b| b == 9));
    }
}
