//! A table that grows a page at a time: nothing is moved, and no growth takes longer than another.

use std::ops::{Index, IndexMut};

/// Elements in a page: few, since there are policies of a handful of blocks.
const PAGE: usize = 128;

/// Numbered elements, each with a value from the start.
#[derive(Debug)]
pub struct Paged<T> {
    pages: Vec<Box<[T]>>,
    fill: T,
}

impl<T: Copy> Paged<T> {
    /// Empty; an element that was never set is `fill`.
    pub fn new(fill: T) -> Self {
        Paged {
            pages: Vec::new(),
            fill,
        }
    }

    /// Makes room up to and with this number.
    pub fn reach(&mut self, at: usize) {
        while self.pages.len() <= at / PAGE {
            self.pages.push(vec![self.fill; PAGE].into_boxed_slice());
        }
    }

    /// The element of that number, if there is room for it.
    pub fn get(&self, at: usize) -> Option<&T> {
        Some(&self.pages.get(at / PAGE)?[at % PAGE])
    }

    /// The element of that number, if there is room for it.
    pub fn get_mut(&mut self, at: usize) -> Option<&mut T> {
        Some(&mut self.pages.get_mut(at / PAGE)?[at % PAGE])
    }

    /// Bytes kept in memory.
    pub fn memory_bytes(&self) -> usize {
        self.pages.len() * PAGE * size_of::<T>() + self.pages.capacity() * size_of::<Box<[T]>>()
    }
}

impl<T> Index<usize> for Paged<T> {
    type Output = T;

    fn index(&self, at: usize) -> &T {
        &self.pages[at / PAGE][at % PAGE]
    }
}

impl<T> IndexMut<usize> for Paged<T> {
    fn index_mut(&mut self, at: usize) -> &mut T {
        &mut self.pages[at / PAGE][at % PAGE]
    }
}

/// Where a hash belongs in a table of `len` places, by linear hashing (Litwin, 1980): when the table
/// grows by a place, only what is in one other place can move.
pub fn place_of(hash: u32, len: usize) -> usize {
    let whole = len.next_power_of_two();
    let place = hash as usize & (whole - 1);
    if place < len {
        place
    } else {
        place & (whole / 2 - 1)
    }
}

/// The place from which a table of `len` places (more than one) filled its last.
pub fn split_of(len: usize) -> usize {
    (len - 1) & (len.next_power_of_two() / 2 - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{place_of, split_of};

    proptest! {
        /// A place more takes from one place, and nothing else moves.
        #[test]
        fn one_place_more_moves_what_is_in_one(hash: u32, len in 1usize..5000) {
            let (before, after) = (place_of(hash, len), place_of(hash, len + 1));
            prop_assert!(before < len);
            prop_assert!(before == after || (after == len && before == split_of(len + 1)));
        }
    }
}
