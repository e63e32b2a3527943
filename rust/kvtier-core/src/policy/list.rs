//! A doubly linked list over handles, in one growing array.

use super::Handle;
use crate::index::grow;

const NIL: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
    /// Which list the handle is in, counted from 1; 0 if none.
    list: u8,
}

const UNLINKED: Link = Link {
    prev: NIL,
    next: NIL,
    list: 0,
};

/// `N` lists that share one array of links; a handle is in at most one of them.
#[derive(Debug)]
pub struct Lists<const N: usize> {
    links: Vec<Link>,
    ends: [(u32, u32); N], // (oldest, newest)
    len: [usize; N],
}

impl<const N: usize> Default for Lists<N> {
    fn default() -> Self {
        Lists {
            links: Vec::new(),
            ends: [(NIL, NIL); N],
            len: [0; N],
        }
    }
}

impl<const N: usize> Lists<N> {
    /// The list that holds the handle.
    pub fn list_of(&self, h: Handle) -> Option<usize> {
        let link = self.links.get(h as usize)?;
        (link.list as usize).checked_sub(1)
    }

    /// Handles in this list.
    pub fn len(&self, list: usize) -> usize {
        self.len[list]
    }

    /// The handle that has been there longest.
    pub fn oldest(&self, list: usize) -> Option<Handle> {
        Some(self.ends[list].0).filter(|&h| h != NIL)
    }

    /// The handle that came just after `h`.
    pub fn newer(&self, h: Handle) -> Option<Handle> {
        Some(self.links[h as usize].next).filter(|&h| h != NIL)
    }

    /// Puts a handle that is in no list at the newest end.
    pub fn push(&mut self, list: usize, h: Handle) {
        grow(&mut self.links, h as usize, UNLINKED);
        debug_assert_eq!(self.links[h as usize].list, 0);
        let newest = self.ends[list].1;
        self.links[h as usize] = Link {
            prev: newest,
            next: NIL,
            list: list as u8 + 1,
        };
        match newest {
            NIL => self.ends[list].0 = h,
            _ => self.links[newest as usize].next = h,
        }
        self.ends[list].1 = h;
        self.len[list] += 1;
    }

    /// Takes the handle out of its list, and says which that was.
    pub fn remove(&mut self, h: Handle) -> Option<usize> {
        let list = self.list_of(h)?;
        let Link { prev, next, .. } = self.links[h as usize];
        match prev {
            NIL => self.ends[list].0 = next,
            _ => self.links[prev as usize].next = next,
        }
        match next {
            NIL => self.ends[list].1 = prev,
            _ => self.links[next as usize].prev = prev,
        }
        self.links[h as usize] = UNLINKED;
        self.len[list] -= 1;
        Some(list)
    }

    /// Bytes kept in memory.
    pub fn memory_bytes(&self) -> usize {
        self.links.capacity() * size_of::<Link>()
    }
}
