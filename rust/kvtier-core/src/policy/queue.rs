//! Blocks by rank, then by when they got it, without those that are held back.

use std::collections::{BTreeSet, VecDeque};

use super::Handle;
use crate::index::grow;

/// How many blocks that may not leave one search passes, or asks again.
const PATIENCE: usize = 1024;

/// A block's rank, and when it got it: the smallest key leaves first.
pub type Key<R> = (R, u64);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Absent,
    /// In the tree: it can be named.
    Ready,
    /// Somebody holds it back.
    Held,
    /// A search passed it, because it was not eligible.
    Passed,
}

/// What is known of a block, in as few bytes as there are anything to say.
#[derive(Clone, Copy, Debug, Default)]
struct Place<R> {
    rank: R,
    /// When it got its rank, above three bits: its state, and whether it has an entry among those
    /// set aside, perhaps a stale one.
    word: u64,
}

impl<R: Copy> Place<R> {
    fn key(&self) -> Key<R> {
        (self.rank, self.word >> 3)
    }

    fn set_key(&mut self, (rank, time): Key<R>) {
        (self.rank, self.word) = (rank, time << 3 | self.word & 7);
    }

    fn state(&self) -> State {
        match self.word & 3 {
            0 => State::Absent,
            1 => State::Ready,
            2 => State::Held,
            _ => State::Passed,
        }
    }

    /// The state it had before.
    fn set_state(&mut self, state: State) -> State {
        let before = self.state();
        self.word = self.word & !3 | state as u64;
        before
    }

    fn is_queued(&self) -> bool {
        self.word & 4 != 0
    }

    fn set_queued(&mut self, queued: bool) {
        self.word = self.word & !4 | u64::from(queued) << 2;
    }
}

/// Blocks of the lowest rank leave first; of one rank, the one that has had it for longest.
///
/// Blocks that a search must pass are set aside, keep their key, and are asked again a few at a
/// time: whatever is pinned, a search looks at a bounded number of blocks.
#[derive(Debug, Default)]
pub struct Queue<R = ()> {
    places: Vec<Place<R>>,
    ready: BTreeSet<(Key<R>, Handle)>,
    passed: VecDeque<Handle>,
    len: usize,
    clock: u64,
}

impl<R: Copy + Ord + Default> Queue<R> {
    /// The rank of a block that is here.
    pub fn rank(&self, block: Handle) -> Option<R> {
        let place = self.places.get(block as usize)?;
        (place.state() != State::Absent).then_some(place.rank)
    }

    /// Blocks here.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Puts a block here, or moves it: behind all others of its rank.
    pub fn put(&mut self, block: Handle, rank: R) {
        self.clock += 1;
        let key = (rank, self.clock);
        grow(&mut self.places, block as usize, Place::default());
        let place = &mut self.places[block as usize];
        let before = place.key();
        place.set_key(key);
        match place.state() {
            State::Held => return,
            State::Ready => {
                self.ready.remove(&(before, block));
            }
            State::Absent => self.len += 1,
            State::Passed => {}
        }
        place.set_state(State::Ready);
        self.ready.insert((key, block));
    }

    /// Moves a block that is here behind all others of its rank.
    pub fn renew(&mut self, block: Handle) {
        if let Some(rank) = self.rank(block) {
            self.put(block, rank);
        }
    }

    /// Takes a block out. Returns the rank it had.
    pub fn remove(&mut self, block: Handle) -> Option<R> {
        let place = self.places.get_mut(block as usize)?;
        let key = place.key();
        match place.set_state(State::Absent) {
            State::Absent => return None,
            State::Ready => {
                self.ready.remove(&(key, block));
            }
            State::Held | State::Passed => {}
        }
        self.len -= 1;
        Some(key.0)
    }

    /// Holds a block back from now on, or lets it be named again, in its old place.
    pub fn hold(&mut self, block: Handle, held: bool) {
        let Some(place) = self.places.get_mut(block as usize) else {
            return;
        };
        let key = place.key();
        match (place.state(), held) {
            (State::Absent, _) | (State::Held, true) | (State::Ready | State::Passed, false) => {}
            (State::Ready, true) => {
                place.set_state(State::Held);
                self.ready.remove(&(key, block));
            }
            (State::Passed, true) => {
                place.set_state(State::Held);
            }
            (State::Held, false) => {
                place.set_state(State::Ready);
                self.ready.insert((key, block));
            }
        }
    }

    /// The first block with a key of at least `from`, and its key.
    pub fn first_from(&self, from: Key<R>) -> Option<(Key<R>, Handle)> {
        self.ready.range((from, 0)..).next().copied()
    }

    /// The first eligible block with a key of at least `from`. Those before it are set aside.
    pub fn find(
        &mut self,
        from: Key<R>,
        eligible: &mut dyn FnMut(Handle) -> bool,
    ) -> Option<(Key<R>, Handle)> {
        for _ in 0..PATIENCE {
            let (key, block) = self.first_from(from)?;
            if eligible(block) {
                return Some((key, block));
            }
            self.ready.remove(&(key, block));
            let place = &mut self.places[block as usize];
            place.set_state(State::Passed);
            if !place.is_queued() {
                place.set_queued(true);
                self.passed.push_back(block);
            }
        }
        None
    }

    /// Asks a few of those that were set aside whether they can be named again: two, or all (within
    /// reason) where nothing else is left.
    pub fn ask_again(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) {
        let count = if self.ready.is_empty() { PATIENCE } else { 2 };
        for _ in 0..count.min(self.passed.len()) {
            let Some(block) = self.passed.pop_front() else {
                return;
            };
            let place = &mut self.places[block as usize];
            if place.state() != State::Passed {
                place.set_queued(false); // it was used, held or removed since
            } else if eligible(block) {
                place.set_queued(false);
                place.set_state(State::Ready);
                self.ready.insert((place.key(), block));
            } else {
                self.passed.push_back(block);
            }
        }
    }

    /// The first eligible block: all there is to a policy whose ranks say everything.
    pub fn first(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        self.ask_again(eligible);
        self.find(Key::default(), eligible).map(|(_, block)| block)
    }

    /// Bytes kept in memory; a B-tree's nodes are about two thirds full.
    pub fn memory_bytes(&self) -> usize {
        self.places.capacity() * size_of::<Place<R>>()
            + self.ready.len() * size_of::<(Key<R>, Handle)>() * 3 / 2
            + self.passed.capacity() * size_of::<Handle>()
    }
}
