//! An ordered map from first pages to runs, in about 13 bytes a run.
//!
//! The range is cut into chunks of 512 pages, each a short sorted list: a lookup is an index and a
//! binary search in a line or two of memory, where a tree would follow a pointer a level and keep
//! its nodes half empty.

use crate::slots::{Owner, Run};

const CHUNK: u32 = 512;

#[derive(Clone, Copy, Debug)]
struct Item {
    /// Within the chunk.
    offset: u16,
    pages: u32,
    owner: Owner,
}

/// Runs by their first page.
#[derive(Debug)]
pub(crate) struct Runs {
    chunks: Vec<Vec<Item>>,
    /// One bit a chunk: it is not empty.
    filled: Vec<u64>,
    /// Items that the chunks have room for.
    room: usize,
}

impl Runs {
    /// No runs, in a range of so many pages.
    pub fn new(pages: u32) -> Self {
        let chunks = pages.div_ceil(CHUNK) as usize;
        Runs {
            chunks: vec![Vec::new(); chunks],
            filled: vec![0; chunks.div_ceil(64)],
            room: 0,
        }
    }

    /// Bytes kept in memory.
    pub fn memory_bytes(&self) -> usize {
        self.room * size_of::<Item>()
            + self.chunks.len() * size_of::<Vec<Item>>()
            + self.filled.len() * size_of::<u64>()
    }

    /// The owner of the run that starts at this page.
    pub fn owner_mut(&mut self, start: u32) -> Option<&mut Owner> {
        let chunk = self.chunks.get_mut((start / CHUNK) as usize)?;
        let at = find(chunk, start).ok()?;
        Some(&mut chunk[at].owner)
    }

    /// Adds a run, or replaces the one that starts there. `start` is inside the range.
    pub fn insert(&mut self, start: u32, pages: u32, owner: Owner) {
        let number = (start / CHUNK) as usize;
        let item = Item {
            offset: (start % CHUNK) as u16,
            pages,
            owner,
        };
        let chunk = &mut self.chunks[number];
        match find(chunk, start) {
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
            }
        }
    }

    /// Takes out the run that starts at this page.
    pub fn remove(&mut self, start: u32) -> Option<(u32, Owner)> {
        let number = (start / CHUNK) as usize;
        let chunk = self.chunks.get_mut(number)?;
        let item = chunk.remove(find(chunk, start).ok()?);
        if chunk.is_empty() {
            self.filled[number / 64] &= !(1 << (number % 64));
        }
        Some((item.pages, item.owner))
    }

    /// The runs that start at `from` or above, upwards.
    pub fn up(&self, from: u32) -> impl Iterator<Item = Run> + '_ {
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
                    return Some(run(number, item));
                }
                (number, at) = (self.filled_from(number + 1)?, 0);
            }
        })
    }

    /// The runs that start at `from` or below, downwards.
    pub fn down(&self, from: u32) -> impl Iterator<Item = Run> + '_ {
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
            Some(run(number, &self.chunks[number][left]))
        })
    }

    /// The first chunk with a run, from this one on.
    fn filled_from(&self, number: usize) -> Option<usize> {
        let mut word = number / 64;
        let mut bits = self.filled.get(word)? & (!0 << (number % 64));
        while bits == 0 {
            word += 1;
            bits = *self.filled.get(word)?;
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    /// The last chunk with a run, below this one.
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

fn find(chunk: &[Item], start: u32) -> Result<usize, usize> {
    let offset = (start % CHUNK) as u16;
    chunk.binary_search_by_key(&offset, |item| item.offset)
}

fn run(number: usize, item: &Item) -> Run {
    Run {
        start: number as u32 * CHUNK + u32::from(item.offset),
        pages: item.pages,
        owner: item.owner,
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

    proptest! {
        #[test]
        fn it_is_an_ordered_map(ops in prop::collection::vec((0u8..4, pages()), 1..200)) {
            let (mut runs, mut model) = (Runs::new(PAGES), BTreeMap::new());
            for (n, (op, page)) in (0u32..).zip(ops) {
                match op {
                    0 => prop_assert_eq!(runs.remove(page), model.remove(&page)),
                    1 => {
                        let (mine, its) = (runs.owner_mut(page), model.get_mut(&page));
                        prop_assert_eq!(mine.is_some(), its.is_some());
                        if let (Some(mine), Some((_, its))) = (mine, its) {
                            (*mine, *its) = (n, n);
                        }
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
            prop_assert_eq!(runs.room, runs.chunks.iter().map(Vec::capacity).sum::<usize>());
            prop_assert_eq!(runs.up(PAGES).count(), 0);
            prop_assert_eq!(runs.down(u32::MAX).count(), model.len());
        }
    }
}
