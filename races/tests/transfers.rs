//! Copies to a device under every order of steps: their completion against eviction, removal, readers,
//! a second asker, and the end of the store.

use kvtier_races::pin::{PinWord, Unpinned};
use kvtier_races::transfers::Transfers;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

type Queue = Transfers<u32, u32, u8>;

const CANCELLED: u8 = 9;

fn told(count: &Arc<AtomicUsize>) -> Box<dyn FnOnce(Result<(), u8>) + Send> {
    let count = count.clone();
    Box::new(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
    })
}

/// Whoever asks: prepares the copy if nobody has.
fn ask(queue: &Queue, count: &Arc<AtomicUsize>, prepared: &AtomicUsize) {
    if queue.begin(7, told(count)) {
        prepared.fetch_add(1, Ordering::Relaxed);
        if queue.push(7).is_err() {
            queue.end(7, Err(CANCELLED));
        }
    }
}

/// The thread that copies, until it has copied so often or is stopped.
fn copy(queue: &Queue, times: usize) -> usize {
    let mut copied = 0;
    while copied < times {
        let Some(batch) = queue.take(4, true) else {
            break;
        };
        for block in batch {
            copied += 1;
            queue.end(block, Ok(()));
        }
    }
    copied
}

#[test]
fn who_is_given_up_is_told_once_and_asks_again_for_the_same_copy() {
    kvtier_races::model(|| {
        let queue = Arc::new(Queue::default());
        let (count, prepared) = (Arc::new(AtomicUsize::new(0)), AtomicUsize::new(0));
        ask(&queue, &count, &prepared);
        let batch = queue.take(4, false).unwrap();
        let other = {
            let queue = queue.clone();
            thread::spawn(move || queue.give_up(Err(CANCELLED)))
        };
        ask(&queue, &count, &prepared);
        assert_eq!(prepared.load(Ordering::Relaxed), 1);
        for block in batch {
            queue.end(block, Ok(()));
        }
        other.join().unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 2);
        assert_eq!(queue.under_way(), 0);
    });
}

#[test]
fn everybody_who_asks_is_told_once_of_one_copy_or_two_that_follow() {
    kvtier_races::model(|| {
        let queue = Arc::new(Queue::default());
        let (count, prepared) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let other = {
            let (queue, count, prepared) = (queue.clone(), count.clone(), prepared.clone());
            thread::spawn(move || ask(&queue, &count, &prepared))
        };
        ask(&queue, &count, &prepared);
        // One copy is enough for both, unless the first one ended before the second was asked for.
        let copied = copy(&queue, 1);
        other.join().unwrap();
        let rest: usize = queue
            .take(4, false)
            .unwrap()
            .into_iter()
            .map(|b| queue.end(b, Ok(())))
            .count();
        assert_eq!(copied + rest, prepared.load(Ordering::Relaxed));
        assert_eq!(count.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn stopping_tells_everybody_and_leaves_no_copy_behind() {
    kvtier_races::model(|| {
        let queue = Arc::new(Queue::default());
        let (count, prepared) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let asker = {
            let (queue, count, prepared) = (queue.clone(), count.clone(), prepared.clone());
            thread::spawn(move || ask(&queue, &count, &prepared))
        };
        let copier = {
            let queue = queue.clone();
            thread::spawn(move || copy(&queue, 1))
        };
        drop(queue.stop(CANCELLED));
        asker.join().unwrap();
        copier.join().unwrap(); // it does not wait for ever
        assert_eq!(count.load(Ordering::Relaxed), 1);
        assert!(queue.take(1, true).is_none());
        assert_eq!(queue.under_way(), 0);
        assert!(
            queue.stop(CANCELLED).is_empty(),
            "its memory would be held for ever"
        );
    });
}

/// A slot in HBM, and the index's name of it.
struct Slot {
    /// The block is in the index; and its place in HBM is named there.
    entry: Mutex<(bool, bool)>,
    word: PinWord,
    /// loom sees it when one writes while another reads.
    bytes: UnsafeCell<u32>,
    freed: AtomicUsize,
}

impl Slot {
    /// Whoever is given it next writes to it.
    fn free(&self) {
        assert_eq!(self.freed.fetch_add(1, Ordering::Relaxed), 0, "freed twice");
        self.bytes.with_mut(|bytes| unsafe { *bytes = 0 });
    }

    fn let_go(&self) {
        if self.word.unpin() == Unpinned::Free {
            self.free();
        }
    }

    /// The copy ends: it is published, or its slot is given back.
    fn complete(&self, ok: bool) {
        self.bytes.with_mut(|bytes| unsafe { *bytes = 7 });
        let mut entry = self.entry.lock().unwrap();
        let published = ok && entry.0;
        entry.1 = published;
        drop(entry);
        if !published {
            assert!(!self.word.retire(), "its writer holds it");
        }
        self.let_go();
    }

    /// Somebody wants room: drops it if nobody uses it.
    fn evict(&self) {
        let mut entry = self.entry.lock().unwrap();
        if entry.1 && self.word.retire_if(0) {
            entry.1 = false;
            self.free();
        }
    }

    fn remove(&self) {
        let mut entry = self.entry.lock().unwrap();
        entry.0 = false;
        if std::mem::replace(&mut entry.1, false) && self.word.retire() {
            self.free();
        }
    }

    fn read(&self) {
        let entry = self.entry.lock().unwrap();
        let pinned = entry.1 && self.word.pin();
        drop(entry);
        if pinned {
            self.bytes.with(|bytes| assert_eq!(unsafe { *bytes }, 7));
            self.let_go();
        }
    }
}

fn race(ok: bool, other: fn(&Slot), third: fn(&Slot)) {
    kvtier_races::model(move || {
        let word = PinWord::default();
        word.start(); // the copy's own pin
        let slot = Arc::new(Slot {
            entry: Mutex::new((true, false)),
            word,
            bytes: UnsafeCell::new(0),
            freed: AtomicUsize::new(0),
        });
        let threads = [other, third].map(|run| {
            let slot = slot.clone();
            thread::spawn(move || run(&slot))
        });
        slot.complete(ok);
        threads.into_iter().for_each(|t| t.join().unwrap());
        slot.evict();
        slot.remove();
        assert_eq!(
            slot.freed.load(Ordering::Relaxed),
            1,
            "it was never given back"
        );
    });
}

#[test]
fn completion_against_eviction_and_a_reader() {
    race(true, Slot::evict, Slot::read);
}

#[test]
fn completion_against_removal_and_a_reader() {
    race(true, Slot::remove, Slot::read);
}

#[test]
fn completion_against_removal_and_eviction() {
    race(true, Slot::remove, Slot::evict);
}

#[test]
fn failure_against_eviction_and_removal() {
    race(false, Slot::evict, Slot::remove);
}
