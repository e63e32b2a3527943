//! `auto`: learns how soon blocks come back, and keeps those that earn most hits for their time.

use std::collections::VecDeque;

use super::departed::{Departed, Memory};
use super::paged::Paged;
use super::reuse::{AGES, CLASSES, Reuse, age_begin, age_of, class_of, gap_of};
use super::{Handle, Meta, Policy};

const NIL: u32 = u32::MAX;
const NOWHERE: u16 = u16::MAX;
/// Touches in one tick of the clock.
const TICK: u64 = 16;
/// A block is let in if it is worth more than this share of what is worth least: what is new was
/// asked for just now, and what it would push out may never be.
const MARGIN: f32 = 0.9;
/// Blocks that one search passes at most because they are not eligible.
const PATIENCE: usize = 1024;
/// Blocks that left are remembered: two for each that is here, and at least so many.
const REMEMBERED: usize = 1 << 14;
/// Blocks that one look at what is worth least moves to the lists of their age at most.
const STALE: usize = 64;

#[derive(Clone, Copy, Debug)]
struct Node {
    hash: u32,
    prev: u32,
    next: u32,
    parent: u32,
    /// When it was last used, in ticks.
    touched: u32,
    /// The session's turn in which it came, and how often it was used since.
    turn: u8,
    hits: u8,
    /// Class and age: the list it is in.
    cell: u16,
    gap: u8,
    flags: u8,
}

const HERE: u8 = 1;
const HELD: u8 = 2;
const PASSED: u8 = 4;
const QUEUED: u8 = 8;
/// A block follows it, or did.
const CONTINUED: u8 = 16;
/// Of the blocks that follow it, one was itself continued: whatever follows it next is a new branch.
const SHARED: u8 = 32;

const ABSENT: Node = Node {
    hash: 0,
    prev: NIL,
    next: NIL,
    parent: NIL,
    touched: 0,
    turn: 0,
    hits: 0,
    cell: NOWHERE,
    gap: 0,
    flags: 0,
};

/// May the block be named?
fn is_ready(node: &Node) -> bool {
    node.flags & HERE != 0 && node.flags & (HELD | PASSED) == 0
}

/// Spreads what an owner numbered in order, and is near enough to a name.
fn hash_of(fingerprint: u64) -> u32 {
    (fingerprint.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32
}

/// The lists of one class.
#[derive(Clone, Copy, Debug)]
struct Class {
    /// A bit for each age whose list has blocks.
    filled: u64,
    /// The age whose list is worth least, and what it is worth; meaningless if `stale`.
    age: usize,
    worth: f32,
    stale: bool,
}

impl Default for Class {
    fn default() -> Self {
        Class {
            filled: 0,
            age: 0,
            worth: f32::INFINITY,
            stale: false,
        }
    }
}

/// Blocks of the same class and age are in one list; the list whose blocks are worth least gives the
/// victim. The class is what is known of a block: the session's turn, the time since the turn
/// before, and whether another block ever followed it. [`Reuse`] says what that is worth.
#[derive(Debug)]
pub struct Auto {
    nodes: Paged<Node>,
    /// Oldest and newest of each list.
    ends: Vec<(u32, u32)>,
    classes: Vec<Class>,
    departed: Memory,
    /// Blocks that a search had to pass, and blocks that stayed when they were named.
    passed: VecDeque<Handle>,
    deferred: VecDeque<Handle>,
    reuse: Reuse,
    touches: u64,
    searches: u64,
    sweep: usize,
    len: usize,
}

impl Default for Auto {
    fn default() -> Self {
        Auto::new()
    }
}

impl Auto {
    /// Nothing is here yet.
    pub fn new() -> Self {
        Auto {
            nodes: Paged::new(ABSENT),
            ends: vec![(NIL, NIL); CLASSES * AGES],
            classes: vec![Class::default(); CLASSES],
            departed: Memory::default(),
            passed: VecDeque::new(),
            deferred: VecDeque::new(),
            reuse: Reuse::default(),
            touches: 0,
            searches: 0,
            sweep: 0,
            len: 0,
        }
    }

    fn now(&self) -> u32 {
        (self.touches / TICK) as u32
    }

    fn class(&self, node: &Node) -> usize {
        let generation = u32::from(node.turn) + u32::from(node.hits);
        class_of(generation, node.gap, node.flags & CONTINUED != 0)
    }

    fn link(&mut self, block: Handle) {
        let node = self.nodes[block as usize];
        let age = age_of(self.now().wrapping_sub(node.touched));
        let cell = self.class(&node) * AGES + age;
        let newest = self.ends[cell].1;
        let node = &mut self.nodes[block as usize];
        (node.prev, node.next, node.cell) = (newest, NIL, cell as u16);
        match newest {
            NIL => self.ends[cell].0 = block,
            _ => self.nodes[newest as usize].next = block,
        }
        self.ends[cell].1 = block;
        let class = &mut self.classes[cell / AGES];
        class.filled |= 1 << age;
        let worth = self.reuse.worth(cell);
        if worth < class.worth {
            (class.age, class.worth) = (age, worth);
        }
    }

    fn unlink(&mut self, block: Handle) {
        let node = &mut self.nodes[block as usize];
        let cell = std::mem::replace(&mut node.cell, NOWHERE);
        if cell == NOWHERE {
            return;
        }
        let (prev, next, cell) = (node.prev, node.next, cell as usize);
        match prev {
            NIL => self.ends[cell].0 = next,
            _ => self.nodes[prev as usize].next = next,
        }
        match next {
            NIL => self.ends[cell].1 = prev,
            _ => self.nodes[next as usize].prev = prev,
        }
        if self.ends[cell].0 == NIL {
            let class = &mut self.classes[cell / AGES];
            class.filled &= !(1 << (cell % AGES));
            class.stale |= class.age == cell % AGES;
        }
    }

    /// Puts a block in the list where it belongs now, if it may be named.
    fn place(&mut self, block: Handle) {
        self.unlink(block);
        if is_ready(&self.nodes[block as usize]) {
            self.link(block);
        }
    }

    /// Moves blocks that grew older to the list of their age: a few of each list of a few classes.
    fn age(&mut self) {
        for _ in 0..4 {
            self.sweep = (self.sweep + 1) % CLASSES;
            let mut ages = self.classes[self.sweep].filled;
            while ages != 0 {
                let cell = self.sweep * AGES + ages.trailing_zeros() as usize;
                ages &= ages - 1;
                for _ in 0..4 {
                    let oldest = self.ends[cell].0;
                    if oldest == NIL || !self.is_older(oldest, cell) {
                        break;
                    }
                    self.place(oldest);
                }
            }
        }
    }

    fn is_older(&self, block: Handle, cell: usize) -> bool {
        let age = cell % AGES;
        age + 1 < AGES
            && self.now().wrapping_sub(self.nodes[block as usize].touched) >= age_begin(age + 1)
    }

    /// The list whose blocks are worth least, and what they are worth.
    fn cheapest(&mut self) -> Option<(usize, f32)> {
        let (mut cell, mut least) = (0, f32::INFINITY);
        for (number, class) in self.classes.iter_mut().enumerate() {
            if class.stale {
                class.stale = false;
                class.worth = f32::INFINITY;
                let mut ages = class.filled;
                while ages != 0 {
                    let age = ages.trailing_zeros() as usize;
                    ages &= ages - 1;
                    let worth = self.reuse.worth(number * AGES + age);
                    if worth < class.worth {
                        (class.age, class.worth) = (age, worth);
                    }
                }
            }
            if class.worth < least {
                (cell, least) = (number * AGES + class.age, class.worth);
            }
        }
        least.is_finite().then_some((cell, least))
    }

    /// As [`Auto::cheapest`], with a block in front that is as old as the list says. Where very many
    /// grew older since the last search, one that is not in its list will do.
    fn least(&mut self) -> Option<(usize, f32)> {
        for _ in 0..STALE {
            let (cell, _) = self.cheapest()?;
            let oldest = self.ends[cell].0;
            if !self.is_older(oldest, cell) {
                break;
            }
            self.place(oldest);
        }
        self.cheapest()
    }

    /// Takes a block that cannot leave now out of the lists; it is asked again later.
    fn set_aside(&mut self, block: Handle, late: bool) {
        self.unlink(block);
        let node = &mut self.nodes[block as usize];
        node.flags |= PASSED;
        if node.flags & QUEUED == 0 {
            node.flags |= QUEUED;
            if late {
                self.deferred.push_back(block);
            } else {
                self.passed.push_back(block);
            }
        }
    }

    /// Tells what is learned that a block was used.
    fn learn(&mut self, node: &Node, class: usize) {
        let now = self.now();
        if let Some(changed) = self.reuse.touch(node.hash, class, now, self.len) {
            self.classes[changed].stale = true;
        }
    }

    fn remember(&mut self, node: &Node) {
        let departed = Departed {
            touched: node.touched,
            generation: node.turn.saturating_add(node.hits),
            flags: node.flags / CONTINUED,
        };
        let wanted = (2 * self.len).max(REMEMBERED);
        self.departed.insert(node.hash, departed, wanted);
    }

    /// A block that arrives, as far as it is known.
    fn arriving(&self, meta: &Meta) -> Node {
        let now = self.now();
        let mut node = Node {
            hash: hash_of(meta.fingerprint),
            parent: meta.parent.unwrap_or(NIL),
            touched: now,
            turn: 1,
            flags: HERE,
            ..ABSENT
        };
        if let Some(departed) = self.departed.get(node.hash) {
            (node.turn, node.hits) = (departed.generation, 1);
            node.gap = gap_of(Memory::since(now, departed.touched));
            node.flags |= departed.flags * CONTINUED;
        } else if let Some(parent) = meta.parent.and_then(|p| self.nodes.get(p as usize)) {
            if parent.hits == 0 {
                (node.turn, node.gap) = (parent.turn, parent.gap);
            } else if parent.flags & SHARED == 0 {
                node.turn = parent.turn.saturating_add(parent.hits);
                node.gap = parent.gap;
            }
        }
        node
    }
}

impl Policy for Auto {
    fn admit(&mut self, meta: &Meta) -> bool {
        let mut node = self.arriving(meta);
        node.flags |= CONTINUED;
        let class = self.class(&node);
        self.age();
        let Some((_, least)) = self.least() else {
            return true;
        };
        if self.reuse.worth(class * AGES) >= least * MARGIN {
            return true;
        }
        self.touches += 1;
        self.learn(&node, class);
        self.remember(&node);
        false
    }

    fn on_insert(&mut self, block: Handle, meta: &Meta) {
        self.touches += 1;
        self.nodes.reach(block as usize);
        let held = self.nodes[block as usize].flags & QUEUED;
        let mut node = self.arriving(meta);
        node.flags |= held;
        self.nodes[block as usize] = node;
        self.len += 1;
        self.learn(&node, self.class(&node));
        self.place(block);
        if let Some(parent) = meta.parent
            && let Some(above) = self.nodes.get_mut(parent as usize)
            && above.flags & CONTINUED == 0
        {
            above.flags |= CONTINUED;
            let (above, above_that) = (*above, above.parent);
            self.reuse.correct(above.hash, self.class(&above));
            if let Some(shared) = self.nodes.get_mut(above_that as usize) {
                shared.flags |= SHARED;
            }
        }
    }

    fn on_hit(&mut self, block: Handle) {
        self.touches += 1;
        let now = self.now();
        let Some(node) = self.nodes.get_mut(block as usize) else {
            return;
        };
        if node.flags & HERE == 0 {
            return;
        }
        node.gap = gap_of(now.wrapping_sub(node.touched));
        node.touched = now;
        node.hits = node.hits.saturating_add(1);
        node.flags &= !PASSED;
        let node = *node;
        self.learn(&node, self.class(&node));
        self.place(block);
    }

    fn on_remove(&mut self, block: Handle) {
        let Some(&node) = self.nodes.get(block as usize) else {
            return;
        };
        if node.flags & HERE == 0 {
            return;
        }
        self.unlink(block);
        self.remember(&node);
        self.nodes[block as usize].flags = node.flags & QUEUED;
        self.len -= 1;
    }

    fn defer(&mut self, block: Handle) {
        // Not a use: nothing is learned from it. It is set aside, so that others are named.
        if self.nodes.get(block as usize).is_some_and(is_ready) {
            self.set_aside(block, true);
        }
    }

    fn hold(&mut self, block: Handle, held: bool) {
        let Some(node) = self.nodes.get_mut(block as usize) else {
            return;
        };
        if node.flags & HERE == 0 || (node.flags & HELD != 0) == held {
            return;
        }
        // Whoever holds it answers for it: released, it may be named, whatever a search met before.
        node.flags = (node.flags ^ HELD) & !PASSED;
        self.place(block);
    }

    fn victim(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        let empty = self.classes.iter().all(|class| class.filled == 0);
        self.searches += 1;
        // What stayed when it was named is not named again until others were.
        let seldom = usize::from(self.searches.is_multiple_of(8));
        for (late, few) in [(false, 2), (true, seldom)] {
            for _ in 0..if empty { PATIENCE } else { few } {
                let queue = if late {
                    &mut self.deferred
                } else {
                    &mut self.passed
                };
                let Some(block) = queue.pop_front() else {
                    break;
                };
                let node = &mut self.nodes[block as usize];
                node.flags &= !QUEUED;
                if node.flags & PASSED == 0 {
                    continue; // it was used or removed since
                }
                if eligible(block) {
                    node.flags &= !PASSED;
                    self.place(block);
                } else {
                    self.set_aside(block, late);
                }
            }
        }
        self.age();
        for _ in 0..PATIENCE {
            let (cell, _) = self.least()?;
            let block = self.ends[cell].0;
            if eligible(block) {
                return Some(block);
            }
            self.set_aside(block, false);
        }
        None
    }

    fn len(&self) -> usize {
        self.len
    }

    fn memory_bytes(&self) -> usize {
        self.nodes.memory_bytes()
            + self.ends.capacity() * size_of::<(u32, u32)>()
            + self.classes.capacity() * size_of::<Class>()
            + self.departed.memory_bytes()
            + (self.passed.capacity() + self.deferred.capacity()) * 4
            + self.reuse.memory_bytes()
    }
}
