//! The pin word under every order of steps: nobody frees a slot that somebody reads, and exactly one
//! frees it.

use kvtier_races::pin::{PinWord, Unpinned};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

/// A slot, and the entry of the index that names it while it is there.
struct Slot {
    named: Mutex<bool>,
    word: PinWord,
    /// loom sees it when one writes while another reads.
    bytes: UnsafeCell<u32>,
    freed: AtomicUsize,
}

impl Slot {
    fn published() -> Arc<Self> {
        let word = PinWord::default();
        word.start();
        assert_eq!(word.unpin(), Unpinned::Idle);
        Arc::new(Slot {
            named: Mutex::new(true),
            word,
            bytes: UnsafeCell::new(7),
            freed: AtomicUsize::new(0),
        })
    }

    /// Whoever frees it may write to it: it is the next one's memory.
    fn free(&self) {
        assert_eq!(self.freed.fetch_add(1, Ordering::Relaxed), 0, "freed twice");
        self.bytes.with_mut(|bytes| unsafe { *bytes = 0 });
    }

    fn let_go(&self) {
        if self.word.unpin() == Unpinned::Free {
            self.free();
        }
    }

    /// A reader: finds it, pins it, reads it.
    fn read(&self) {
        let pinned = {
            let named = self.named.lock().unwrap();
            *named && self.word.pin()
        };
        if pinned {
            self.bytes.with(|bytes| assert_eq!(unsafe { *bytes }, 7));
            self.let_go();
        }
    }

    /// Whoever removes the block.
    fn remove(&self) {
        let mut named = self.named.lock().unwrap();
        if std::mem::replace(&mut *named, false) && self.word.retire() {
            self.free();
        }
    }

    /// Whoever evicts it, if nobody reads it.
    fn evict(&self) {
        let mut named = self.named.lock().unwrap();
        if *named && self.word.retire_if(0) {
            *named = false;
            self.free();
        }
    }
}

fn all(works: &[fn(&Slot)], at_the_end: fn(&Slot)) {
    let works = works.to_vec();
    kvtier_races::model(move || {
        let slot = Slot::published();
        let threads: Vec<_> = works
            .iter()
            .map(|&work| {
                let slot = slot.clone();
                thread::spawn(move || work(&slot))
            })
            .collect();
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        at_the_end(&slot);
    });
}

fn is_free(slot: &Slot) {
    assert_eq!(slot.freed.load(Ordering::Relaxed), 1, "freed once");
    assert_eq!(slot.word.pins(), 0);
}

#[test]
fn a_removed_slot_is_freed_once_and_by_its_last_reader() {
    all(&[Slot::read, Slot::read, Slot::remove], is_free);
}

#[test]
fn a_reader_and_an_eviction_exclude_each_other() {
    all(&[Slot::read, Slot::read, Slot::evict], |slot| {
        let freed = slot.freed.load(Ordering::Relaxed) == 1;
        assert_ne!(freed, *slot.named.lock().unwrap());
        assert_eq!(slot.word.pins(), 0);
    });
}

#[test]
fn eviction_and_removal_free_it_once() {
    all(&[Slot::evict, Slot::remove, Slot::read], is_free);
}

#[test]
fn a_copy_of_a_pin_keeps_a_retired_slot() {
    let hold_twice: fn(&Slot) = |slot| {
        let pinned = *slot.named.lock().unwrap() && slot.word.pin();
        if pinned {
            slot.word.pin_held();
            slot.let_go();
            slot.bytes.with(|bytes| assert_eq!(unsafe { *bytes }, 7));
            slot.let_go();
        }
    };
    all(&[hold_twice, Slot::remove], is_free);
}
