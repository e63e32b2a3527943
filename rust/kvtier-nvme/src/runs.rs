//! Ordered maps by page, in little more memory than what they hold: runs, by their first page.
//!
//! The range is cut into chunks of 256 pages, each a short sorted list: a lookup is an index and a
//! binary search in a line or two of memory, where a tree would follow a pointer a level and keep
//! its nodes half empty.

use crate::slots::{Owner, Run};

const CHUNK: u32 = 256;

/// With a value that needs no alignment, an item has no gaps.
#[derive(Clone, Copy, Debug)]
struct Item<V> {
    /// Within the chunk.
    offset: u8,
    value: V,
}

/// Values by page.
#[derive(Debug)]
pub struct Pages<V> {
    chunks: Vec<Vec<Item<V>>>,
    /// One bit a chunk: it is not empty.
    filled: Vec<u64>,
    /// Items that the chunks have room for.
    room: usize,
    len: usize,
}

impl<V: Copy> Pages<V> {
    /// No values, in a range of so many pages.
    pub fn new(pages: u32) -> Self {
        let chunks = pages.div_ceil(CHUNK) as usize;
        Pages {
            chunks: vec![Vec::new(); chunks],
            filled: vec![0; chunks.div_ceil(64)],
            room: 0,
            len: 0,
        }
    }

    /// Values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes kept in memory.
    pub fn memory_bytes(&self) -> usize {
        self.room * size_of::<Item<V>>()
            + self.chunks.len() * size_of::<Vec<Item<V>>>()
            + self.filled.len() * size_of::<u64>()
    }

    /// The value of a page.
    pub fn get(&self, page: u32) -> Option<V> {
        let chunk = self.chunks.get((page / CHUNK) as usize)?;
        Some(chunk[find(chunk, page).ok()?].value)
    }

    /// The value of a page.
    pub fn get_mut(&mut self, page: u32) -> Option<&mut V> {
        let chunk = self.chunks.get_mut((page / CHUNK) as usize)?;
        let at = find(chunk, page).ok()?;
        Some(&mut chunk[at].value)
    }

    /// Gives a page inside the range a value.
    pub fn insert(&mut self, page: u32, value: V) {
        let number = (page / CHUNK) as usize;
        let item = Item {
            offset: (page % CHUNK) as u8,
            value,
        };
        let chunk = &mut self.chunks[number];
        match find(chunk, page) {
            Ok(at) => chunk[at] = item,
            Err(at) => {
                if chunk.len() == chunk.capacity() {
                    // It never shrinks: what is taken out comes back.
                    let before = chunk.capacity();
                    chunk.reserve_exact(chunk.len() / 16 + 1);
                    self.room += chunk.capacity() - before;
                }
                chunk.insert(at, item);
                self.filled[number / 64] |= 1 << (number % 64);
                self.len += 1;
            }
        }
    }

    /// Takes the value of a page out.
    pub fn remove(&mut self, page: u32) -> Option<V> {
        let number = (page / CHUNK) as usize;
        let chunk = self.chunks.get_mut(number)?;
        let item = chunk.remove(find(chunk, page).ok()?);
        if chunk.is_empty() {
            self.filled[number / 64] &= !(1 << (number % 64));
        }
        self.len -= 1;
        Some(item.value)
    }

    /// The pages from `from` on that have a value, upwards.
    pub fn up(&self, from: u32) -> impl Iterator<Item = (u32, V)> + '_ {
        let mut number = (from / CHUNK) as usize;
        let mut at = match self.chunks.get(number) {
            Some(chunk) => find(chunk, from).unwrap_or_else(|at| at),
            None => 0,
        };
        std::iter::from_fn(move || {
            loop {
                let chunk = self.chunks.get(number)?;
                if let Some(item) = chunk.get(at) {
                    at += 1;
                    return Some(paged(number, item));
                }
                (number, at) = (self.filled_from(number + 1)?, 0);
            }
        })
    }

    /// The pages up to `from` that have a value, downwards.
    pub fn down(&self, from: u32) -> impl Iterator<Item = (u32, V)> + '_ {
        let mut number = (from / CHUNK) as usize;
        // Those of the chunk that are still to come.
        let mut left = match self.chunks.get(number) {
            Some(chunk) => find(chunk, from).map_or_else(|at| at, |at| at + 1),
            None => {
                number = self.chunks.len();
                0
            }
        };
        std::iter::from_fn(move || {
            if left == 0 {
                number = self.filled_below(number)?;
                left = self.chunks[number].len();
            }
            left -= 1;
            Some(paged(number, &self.chunks[number][left]))
        })
    }

    /// The first chunk with a value, from this one on.
    fn filled_from(&self, number: usize) -> Option<usize> {
        let mut word = number / 64;
        let mut bits = self.filled.get(word)? & (!0 << (number % 64));
        while bits == 0 {
            word += 1;
            bits = *self.filled.get(word)?;
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    /// The last chunk with a value, below this one.
    fn filled_below(&self, number: usize) -> Option<usize> {
        let mut word = number / 64;
        let mut bits = match self.filled.get(word) {
            Some(bits) => bits & !(!0 << (number % 64)),
            None => 0,
        };
        while bits == 0 {
            word = word.checked_sub(1)?;
            bits = self.filled[word];
        }
        Some(word * 64 + bits.ilog2() as usize)
    }
}

fn find<V>(chunk: &[Item<V>], page: u32) -> Result<usize, usize> {
    let offset = (page % CHUNK) as u8;
    chunk.binary_search_by_key(&offset, |item| item.offset)
}

fn paged<V: Copy>(number: usize, item: &Item<V>) -> (u32, V) {
    (number as u32 * CHUNK + u32::from(item.offset), item.value)
}

#[derive(Clone, Copy, Debug)]
#[repr(C, packed)]
struct Extent {
    pages: u32,
    owner: Owner,
}

/// Runs by their first page.
#[derive(Debug)]
pub(crate) struct Runs(Pages<Extent>);

impl Runs {
    /// No runs, in a range of so many pages.
    pub fn new(pages: u32) -> Self {
        Runs(Pages::new(pages))
    }

    /// Bytes kept in memory.
    pub fn memory_bytes(&self) -> usize {
        self.0.memory_bytes()
    }

    /// The owner of the run that starts at this page.
    pub fn owner(&self, start: u32) -> Option<Owner> {
        self.0.get(start).map(|extent| extent.owner)
    }

    /// Changes it.
    pub fn set_owner(&mut self, start: u32, owner: Owner) {
        if let Some(extent) = self.0.get_mut(start) {
            extent.owner = owner;
        }
    }

    /// Adds a run, or replaces the one that starts there. `start` is inside the range.
    pub fn insert(&mut self, start: u32, pages: u32, owner: Owner) {
        self.0.insert(start, Extent { pages, owner });
    }

    /// Takes out the run that starts at this page.
    pub fn remove(&mut self, start: u32) -> Option<(u32, Owner)> {
        self.0.remove(start).map(|e| (e.pages, e.owner))
    }

    /// The runs that start at `from` or above, upwards.
    pub fn up(&self, from: u32) -> impl Iterator<Item = Run> + '_ {
        self.0.up(from).map(run)
    }

    /// The runs that start at `from` or below, downwards.
    pub fn down(&self, from: u32) -> impl Iterator<Item = Run> + '_ {
        self.0.down(from).map(run)
    }
}

fn run((start, Extent { pages, owner }): (u32, Extent)) -> Run {
    Run {
        start,
        pages,
        owner,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const PAGES: u32 = 70 * 64 * CHUNK;

    fn pages() -> impl Strategy<Value = u32> {
        // Neighbours within a chunk, and chunks within and beyond a word of the bits.
        (0u32..70, 0u32..3, 0u32..3)
            .prop_map(|(word, chunk, page)| (word * 64 + chunk) * CHUNK + page)
    }

    #[test]
    fn an_item_has_no_gaps() {
        assert_eq!(size_of::<Item<Extent>>(), 9);
        assert_eq!(size_of::<Item<crate::state::Use>>(), 10);
    }

    proptest! {
        #[test]
        fn it_is_an_ordered_map(ops in prop::collection::vec((0u8..4, pages()), 1..200)) {
            let (mut runs, mut model) = (Runs::new(PAGES), BTreeMap::new());
            for (n, (op, page)) in (0u32..).zip(ops) {
                match op {
                    0 => prop_assert_eq!(runs.remove(page), model.remove(&page)),
                    1 => {
                        runs.set_owner(page, n);
                        if let Some((_, its)) = model.get_mut(&page) {
                            *its = n;
                        }
                        prop_assert_eq!(runs.owner(page), model.get(&page).map(|run| run.1));
                    }
                    _ => {
                        runs.insert(page, n + 1, n);
                        model.insert(page, (n + 1, n));
                    }
                }
                let as_run = |(&start, &(pages, owner)): (&u32, &(u32, u32))| Run { start, pages, owner };
                prop_assert!(runs.up(page).eq(model.range(page..).map(as_run)));
                prop_assert!(runs.down(page).eq(model.range(..=page).rev().map(as_run)));
            }
            let room = runs.0.chunks.iter().map(Vec::capacity).sum::<usize>();
            prop_assert_eq!((runs.0.room, runs.0.len()), (room, model.len()));
            prop_assert_eq!(runs.up(PAGES).count(), 0);
            prop_assert_eq!(runs.down(u32::MAX).count(), model.len());
        }
    }
}
