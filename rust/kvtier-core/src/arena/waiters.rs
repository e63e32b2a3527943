//! Who waits for room in an arena, and is told of what changes.

use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex};

/// Those who wait for room.
#[derive(Default)]
pub(super) struct Waiters {
    waiting: AtomicUsize,
    changes: Mutex<Changes>,
    changed: Condvar,
}

#[derive(Default)]
struct Changes {
    count: u64,
    /// The fewest free pages that somebody sleeps for.
    least: Option<u32>,
}

impl Waiters {
    /// Announces somebody.
    pub(super) fn waiter(&self) -> Waiter<'_> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        Waiter(self)
    }

    /// Does anybody look for room?
    pub(super) fn is_awaited(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Counts a change, and wakes those for whom so many pages that are free now are enough.
    pub(super) fn tell(&self, free: Option<u32>) {
        if !self.is_awaited() {
            return;
        }
        let mut changes = self.changes.lock();
        changes.count += 1;
        let enough = |least| free.is_none_or(|free| free >= least);
        if changes.least.is_some_and(enough) {
            changes.least = None;
            drop(changes);
            self.changed.notify_all();
        }
    }
}

/// Somebody who looks for room, and is told of every slot that is freed or let go while it lives.
pub struct Waiter<'a>(&'a Waiters);

impl Waiter<'_> {
    /// A number that grows with each change. Read it, look for room, then [`Waiter::wait`].
    pub fn seen(&self) -> u64 {
        self.0.changes.lock().count
    }

    /// Waits until something changed since `seen`, or until `deadline`. Slots that are freed do not
    /// end the wait before `least` pages are free: who needs many takes them at once.
    pub fn wait(&self, seen: u64, least: u32, deadline: std::time::Instant) {
        let mut changes = self.0.changes.lock();
        changes.least = Some(changes.least.map_or(least, |other| other.min(least)));
        while changes.count == seen {
            if self
                .0
                .changed
                .wait_until(&mut changes, deadline)
                .timed_out()
            {
                return;
            }
        }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}
