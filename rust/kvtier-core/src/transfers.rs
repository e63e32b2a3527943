//! Copies to a device: who asked for which block, and what waits for the thread that copies. One
//! copy a block, whoever asks. It knows nothing of what is copied: `P` is the copy, and only one ever
//! gets it.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};

use crate::sync::{Condvar, Mutex};

/// Told once how a copy ended, on whatever thread ends it. It must not block.
pub type Told<E> = Box<dyn FnOnce(Result<(), E>) + Send>;

struct State<K, P, E> {
    /// Blocks whose copy is being prepared, waits, or runs; and who is told of it.
    under_way: BTreeMap<K, Vec<Told<E>>>,
    queue: VecDeque<P>,
    /// Set for good: everybody gets this.
    stopped: Option<E>,
}

/// What is asked for and not yet there.
pub struct Transfers<K, P, E> {
    state: Mutex<State<K, P, E>>,
    changed: Condvar,
}

impl<K, P, E> Default for Transfers<K, P, E> {
    fn default() -> Self {
        Transfers {
            state: Mutex::new(State {
                under_way: BTreeMap::new(),
                queue: VecDeque::new(),
                stopped: None,
            }),
            changed: Condvar::new(),
        }
    }
}

impl<K: Ord + Copy, P, E: Copy> Transfers<K, P, E> {
    /// Has `told` called when the copy of `block` ends. True: nobody is at it, so the caller
    /// prepares the copy and [`Transfers::push`]es it, or [`Transfers::end`]s it.
    #[must_use]
    pub fn begin(&self, block: K, told: Told<E>) -> bool {
        let mut state = self.state.lock();
        if let Some(end) = state.stopped {
            drop(state);
            told(Err(end));
            return false;
        }
        match state.under_way.entry(block) {
            Entry::Vacant(first) => {
                first.insert(vec![told]);
                true
            }
            Entry::Occupied(mut others) => {
                others.get_mut().push(told);
                false
            }
        }
    }

    /// Queues a copy that was prepared. After [`Transfers::stop`] it comes back.
    pub fn push(&self, copy: P) -> Result<(), P> {
        let mut state = self.state.lock();
        if state.stopped.is_some() {
            return Err(copy);
        }
        state.queue.push_back(copy);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Up to `most` copies, in the order in which they were queued. With `wait`, blocks until there is
    /// one; without, there may be none. `None`: stopped.
    pub fn take(&self, most: usize, wait: bool) -> Option<Vec<P>> {
        let mut state = self.state.lock();
        while wait && state.queue.is_empty() && state.stopped.is_none() {
            self.changed.wait(&mut state);
        }
        if state.stopped.is_some() {
            return None;
        }
        let count = most.min(state.queue.len());
        Some(state.queue.drain(..count).collect())
    }

    /// The copy of `block` has ended, and what came of it is visible.
    pub fn end(&self, block: K, how: Result<(), E>) {
        let told = self.state.lock().under_way.remove(&block);
        for told in told.into_iter().flatten() {
            told(how);
        }
    }

    /// Nobody waits any more for what is under way: all who do are told this. It goes on.
    pub fn give_up(&self, how: Result<(), E>) {
        let mut state = self.state.lock();
        let waiting = state.under_way.values_mut().map(std::mem::take);
        let told: Vec<_> = waiting.flatten().collect();
        drop(state);
        for told in told {
            told(how);
        }
    }

    /// Ends it all: everybody is told `end`, now and from now on. Returns what nobody had taken; who
    /// has taken a copy ends it as ever, though nobody listens.
    pub fn stop(&self, end: E) -> Vec<P> {
        let mut state = self.state.lock();
        state.stopped = Some(end);
        let left = std::mem::take(&mut state.queue);
        let under_way = std::mem::take(&mut state.under_way);
        drop(state);
        self.changed.notify_all();
        for told in under_way.into_values().flatten() {
            told(Err(end));
        }
        left.into()
    }

    /// Blocks whose copy is being prepared, waits, or runs.
    pub fn under_way(&self) -> usize {
        self.state.lock().under_way.len()
    }

    /// Has it been stopped?
    pub fn is_stopped(&self) -> bool {
        self.state.lock().stopped.is_some()
    }
}
