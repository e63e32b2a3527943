//! `auto`: learns how soon blocks come back, and keeps those that earn most hits for their time.

use std::collections::VecDeque;
use std::sync::Arc;

use super::learned::{Learned, TIERS};
use super::paged::Paged;
use super::reuse::{AGES, CLASSES};
use super::{Handle, Meta, Policy};
use crate::sync::Mutex;

const NIL: u32 = u32::MAX;
const NOWHERE: u16 = u16::MAX;
/// A block is let in if it is worth more than this share of what is worth least: what is new was
/// asked for just now, and what it would push out may never be.
const MARGIN: f32 = 0.9;
/// The same of a block that another tier holds: for little more a move does not pay.
const MOVE: f32 = 1.25;
/// What was used within so many uses as this part of a tier has blocks is not named while anything else
/// can be, whatever it is worth: its request may go on, and is lost without it. A tier of so few blocks
/// can spare none.
const YOUNG: usize = 16;
const FEW: usize = 256;
/// Blocks that one search passes at most because they are not eligible.
const PATIENCE: usize = 1024;
/// Blocks that one look at what is worth least moves to the lists where they belong at most.
const STALE: usize = 64;
/// Classes whose lists are looked at in a tick, and blocks of one that are moved at most.
const SWEPT: usize = 32;
const MOVED: usize = 4;

#[derive(Clone, Copy, Debug)]
struct Node {
    prev: u32,
    next: u32,
    /// Class and age: the list it is in.
    cell: u16,
    flags: u8,
}

const HERE: u8 = 1;
const HELD: u8 = 2;
const PASSED: u8 = 4;
const QUEUED: u8 = 8;

/// The list of the blocks that a tier above holds too.
const COPIES: usize = CLASSES * AGES;
const _: () = assert!(COPIES < NOWHERE as usize);
/// A copy of what a tier above holds is worth nothing until it is let go of there, and then what leaves
/// there is worth; so now it is worth this share of that.
const COPY: f32 = 0.75;

const ABSENT: Node = Node {
    prev: NIL,
    next: NIL,
    cell: NOWHERE,
    flags: 0,
};

/// May the block be named?
fn is_ready(node: &Node) -> bool {
    node.flags & HERE != 0 && node.flags & (HELD | PASSED) == 0
}

/// The numbers of the bits that are set, from the lowest on.
fn bits(mut set: u128) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lowest = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(lowest)
    })
}

const _: () = assert!(CLASSES <= u128::BITS as usize);

/// Oldest and newest of the list of each age.
type Ends = [(u32, u32); AGES];

const EMPTY: Ends = [(NIL, NIL); AGES];

/// The lists of one class.
#[derive(Clone, Debug)]
struct Class {
    /// `None` until a block is of it.
    ends: Option<Box<Ends>>,
    /// A bit for each age whose list has blocks.
    filled: u64,
    /// The age whose list is worth least, and what it is worth, as of this version of what is
    /// learned; meaningless if `stale`.
    age: usize,
    worth: f32,
    version: u32,
    stale: bool,
}

impl Default for Class {
    fn default() -> Self {
        Class {
            ends: None,
            filled: 0,
            age: 0,
            worth: f32::INFINITY,
            version: 0,
            stale: false,
        }
    }
}

/// Blocks of the same class and age are in one list; the list whose blocks are worth least gives the
/// victim. The class is what is known of a block: the session's turn, the time since the turn
/// before, and whether another block ever followed it. [`Learned`] says what that is worth, and is
/// one for the tiers above one another: what is learned in one is known in all.
#[derive(Debug)]
pub struct Auto {
    tier: usize,
    shared: Arc<Mutex<Shared>>,
    /// Of its tier, as of the last block that came or left.
    len: usize,
    bytes: usize,
}

#[derive(Debug)]
struct Shared {
    learned: Learned,
    tiers: Vec<Lists>,
}

/// What one tier holds. A block that grew older, or that another followed, is moved to the list where
/// it belongs when it comes to the front of the one where it is.
#[derive(Debug)]
struct Lists {
    /// The tiers that are above, a bit each.
    above: u8,
    nodes: Paged<Node>,
    classes: Vec<Class>,
    /// Oldest and newest of the blocks that a tier above holds too, and what they are worth.
    copies: (u32, u32),
    copy: f32,
    /// What the last block that was named was worth.
    named: f32,
    /// A bit for each class that has blocks.
    filled: u128,
    /// Classes that have lists.
    seen: usize,
    /// Blocks of lower ages do not count as worth least of their class.
    young: usize,
    /// Blocks that a search had to pass.
    passed: VecDeque<Handle>,
    sweep: usize,
    /// The tick in which lists were last looked at for blocks that grew older.
    looked: u32,
    len: usize,
    /// Bytes of what is learned that this tier counts.
    learned_bytes: usize,
}

impl Auto {
    /// Policies of so many tiers above one another; `hbm`: but for the last, which holds copies of what
    /// must lie in another too. What they know is kept in memory of so many pages. Nothing is here yet.
    pub fn of_tiers(tiers: usize, hbm: bool, memory: u64) -> Vec<Self> {
        debug_assert!(tiers <= TIERS);
        let above = |tier: usize| match hbm && tier + 1 == tiers {
            true => 0,
            false => (1 << tier) - 1,
        };
        let mut shared = Shared {
            learned: Learned::new(memory),
            tiers: (0..tiers).map(|tier| Lists::new(above(tier))).collect(),
        };
        if let Some(first) = shared.tiers.first_mut() {
            first.learned_bytes = shared.learned.growth();
        }
        let shared = Arc::new(Mutex::new(shared));
        let policy = |tier| {
            let mut policy = Auto {
                tier,
                shared: shared.clone(),
                len: 0,
                bytes: 0,
            };
            (policy.len, policy.bytes) = policy.with(|_, lists| lists.size());
            policy
        };
        (0..tiers).map(policy).collect()
    }

    /// Does something with what is learned, and with this tier's lists.
    fn with<T>(&self, act: impl FnOnce(&mut Learned, &mut Lists) -> T) -> T {
        let mut shared = self.shared.lock();
        let Shared { learned, tiers } = &mut *shared;
        if let Some(above) = self.tier.checked_sub(1) {
            tiers[self.tier].copy = tiers[above].named * COPY;
        }
        act(learned, &mut tiers[self.tier])
    }

    /// Puts a block where it belongs in every tier that holds it, from this one on.
    fn place_from(first: usize, learned: &Learned, tiers: &mut [Lists], block: Handle) {
        for tier in bits(learned.tiers(block).into()) {
            if tier >= first {
                tiers[tier].place(learned, block);
            }
        }
    }
}

impl Lists {
    fn new(above: u8) -> Self {
        Lists {
            above,
            nodes: Paged::new(ABSENT),
            classes: vec![Class::default(); CLASSES],
            copies: (NIL, NIL),
            copy: f32::MAX,
            named: f32::MAX,
            filled: 0,
            seen: 0,
            young: 0,
            passed: VecDeque::new(),
            sweep: 0,
            looked: 0,
            len: 0,
            learned_bytes: 0,
        }
    }

    /// The list where a block belongs. Young ones are not told apart by age: they are in order of use.
    fn cell(&self, learned: &Learned, block: Handle) -> usize {
        if learned.tiers(block) & self.above != 0 {
            return COPIES;
        }
        let cell = learned.cell(block);
        match cell % AGES < self.young {
            true => cell - cell % AGES,
            false => cell,
        }
    }

    fn is_here(&self, block: Handle) -> bool {
        self.nodes
            .get(block as usize)
            .is_some_and(|node| node.flags & HERE != 0)
    }

    /// The oldest block of a list; of none, `NIL`.
    fn oldest(&self, cell: usize) -> u32 {
        if cell == COPIES {
            return self.copies.0;
        }
        let ends = &self.classes[cell / AGES].ends;
        ends.as_ref().map_or(NIL, |ends| ends[cell % AGES].0)
    }

    fn ends(&mut self, cell: usize) -> &mut (u32, u32) {
        if cell == COPIES {
            return &mut self.copies;
        }
        let ends = self.classes[cell / AGES].ends.get_or_insert_with(|| {
            self.seen += 1;
            Box::new(EMPTY)
        });
        &mut ends[cell % AGES]
    }

    fn link(&mut self, learned: &Learned, block: Handle) {
        let cell = self.cell(learned, block);
        let newest = self.ends(cell).1;
        let node = &mut self.nodes[block as usize];
        (node.prev, node.next, node.cell) = (newest, NIL, cell as u16);
        match newest {
            NIL => self.ends(cell).0 = block,
            _ => self.nodes[newest as usize].next = block,
        }
        self.ends(cell).1 = block;
        if cell == COPIES {
            return;
        }
        self.filled |= 1 << (cell / AGES);
        let class = &mut self.classes[cell / AGES];
        class.filled |= 1 << (cell % AGES);
        let (age, worth) = (cell % AGES, learned.worth(cell));
        if age >= self.young && (worth, age) < (class.worth, class.age) {
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
            NIL => self.ends(cell).0 = next,
            _ => self.nodes[prev as usize].next = next,
        }
        match next {
            NIL => self.ends(cell).1 = prev,
            _ => self.nodes[next as usize].prev = prev,
        }
        if cell != COPIES && self.oldest(cell) == NIL {
            let class = &mut self.classes[cell / AGES];
            class.filled &= !(1 << (cell % AGES));
            class.stale |= class.age == cell % AGES;
            self.filled &= !(u128::from(class.filled == 0) << (cell / AGES));
        }
    }

    /// Puts a block in the list where it belongs now, if it may be named.
    fn place(&mut self, learned: &Learned, block: Handle) {
        self.unlink(block);
        if is_ready(&self.nodes[block as usize]) {
            self.link(learned, block);
        }
    }

    /// Moves blocks that grew older to the list of their age, once a tick: what is no longer young, and a few of
    /// each list of some classes. (Those that are worth more than the least, too: it rises.)
    fn age(&mut self, learned: &Learned) {
        if std::mem::replace(&mut self.looked, learned.now()) == learned.now() {
            return;
        }
        self.grow_up(learned);
        for _ in 0..SWEPT {
            self.sweep = (self.sweep + 1) % CLASSES;
            let mut ages = self.classes[self.sweep].filled;
            while ages != 0 {
                let cell = self.sweep * AGES + ages.trailing_zeros() as usize;
                ages &= ages - 1;
                for _ in 0..MOVED {
                    let oldest = self.oldest(cell);
                    if oldest == NIL || self.cell(learned, oldest) == cell {
                        break;
                    }
                    self.place(learned, oldest);
                }
            }
        }
    }

    /// The list whose blocks are worth least, and what they are worth; of young ones only if there are
    /// no others.
    fn cheapest(&mut self, learned: &Learned) -> Option<(usize, f32)> {
        let copies = (self.copies.0 != NIL).then_some((COPIES, self.copy));
        if copies.is_some() && self.filled == 0 {
            return copies;
        }
        let own = self.cheapest_own(learned);
        match (own, copies) {
            (Some(own), Some(copies)) if copies.1 <= own.1 => Some(copies),
            (own, copies) => own.or(copies),
        }
    }

    fn cheapest_own(&mut self, learned: &Learned) -> Option<(usize, f32)> {
        self.set_young(Learned::age_after(self.len.saturating_sub(FEW) / YOUNG));
        loop {
            let grown = self.cheapest_grown(learned);
            if grown.is_some() || self.young == 0 {
                return grown;
            }
            if !self.grow_up(learned) {
                self.set_young(0);
            }
        }
    }

    fn set_young(&mut self, young: usize) {
        if young != self.young {
            self.young = young;
            self.classes.iter_mut().for_each(|class| class.stale = true);
        }
    }

    /// Moves a few blocks of each class that are no longer young. False: all are.
    fn grow_up(&mut self, learned: &Learned) -> bool {
        let mut moved = false;
        for class in bits(self.filled) {
            for _ in 0..MOVED {
                if !self.grow(learned, class) {
                    break;
                }
                moved = true;
            }
        }
        moved
    }

    /// Moves the oldest young block of a class, if it is no longer young.
    fn grow(&mut self, learned: &Learned, class: usize) -> bool {
        let cell = class * AGES;
        let oldest = self.oldest(cell);
        let grown = self.young > 0 && oldest != NIL && self.cell(learned, oldest) != cell;
        if grown {
            self.place(learned, oldest);
        }
        grown
    }

    fn cheapest_grown(&mut self, learned: &Learned) -> Option<(usize, f32)> {
        let (mut cell, mut least) = (0, f32::INFINITY);
        for number in bits(self.filled) {
            let class = &mut self.classes[number];
            let version = learned.version(number);
            if class.stale || class.version != version {
                (class.stale, class.version) = (false, version);
                class.worth = f32::INFINITY;
                let mut ages = class.filled >> self.young << self.young;
                while ages != 0 {
                    let age = ages.trailing_zeros() as usize;
                    ages &= ages - 1;
                    let worth = learned.worth(number * AGES + age);
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

    /// As [`Lists::cheapest`], with a block in front that belongs there. Where very many do not
    /// since the last search, one that does not will do.
    fn least(&mut self, learned: &Learned) -> Option<(usize, f32)> {
        for _ in 0..STALE {
            let (cell, worth) = self.cheapest(learned)?;
            let oldest = self.oldest(cell);
            if self.cell(learned, oldest) == cell {
                return Some((cell, worth));
            }
            self.place(learned, oldest);
        }
        self.cheapest(learned)
    }

    /// Takes a block that cannot leave now out of the lists; it is asked again later.
    fn set_aside(&mut self, block: Handle) {
        self.unlink(block);
        let node = &mut self.nodes[block as usize];
        node.flags |= PASSED;
        if node.flags & QUEUED == 0 {
            node.flags |= QUEUED;
            self.passed.push_back(block);
        }
    }

    fn victim(
        &mut self,
        learned: &Learned,
        eligible: &mut dyn FnMut(Handle) -> bool,
    ) -> Option<Handle> {
        let empty = self.filled == 0 && self.copies.0 == NIL;
        let again = if empty { PATIENCE } else { 2 };
        for _ in 0..again.min(self.passed.len()) {
            let Some(block) = self.passed.pop_front() else {
                break;
            };
            let node = &mut self.nodes[block as usize];
            node.flags &= !QUEUED;
            if node.flags & PASSED == 0 {
                continue; // it was used or removed since
            }
            if eligible(block) {
                node.flags &= !PASSED;
                self.place(learned, block);
            } else {
                self.set_aside(block);
            }
        }
        self.age(learned);
        for _ in 0..PATIENCE {
            let (cell, worth) = self.least(learned)?;
            let block = self.oldest(cell);
            if eligible(block) {
                self.named = worth;
                if cell != COPIES {
                    self.grow(learned, cell / AGES);
                }
                return Some(block);
            }
            self.set_aside(block);
        }
        None
    }

    /// Blocks, and bytes kept in memory.
    fn size(&self) -> (usize, usize) {
        let bytes = self.learned_bytes
            + self.nodes.memory_bytes()
            + self.classes.capacity() * size_of::<Class>()
            + self.seen * size_of::<Ends>()
            + self.passed.capacity() * size_of::<Handle>();
        (self.len, bytes)
    }
}

impl Policy for Auto {
    fn admit(&mut self, block: Handle, meta: &Meta) -> bool {
        self.with(|learned, lists| {
            lists.age(learned);
            let Some((_, least)) = lists.least(learned) else {
                return true;
            };
            let (cell, margin) = match learned.is_held(block) {
                true => (learned.cell(block), MOVE),
                false => (learned.cell_of(meta), MARGIN),
            };
            learned.worth(cell) >= least * margin
        })
    }

    fn on_refuse(&mut self, meta: &Meta) {
        self.with(|learned, _| learned.refuse(meta));
    }

    fn foresee(&self, fingerprints: &[u64]) {
        self.with(|learned, _| learned.foresee_arrivals(fingerprints));
    }

    fn on_insert(&mut self, block: Handle, meta: &Meta) {
        let mut shared = self.shared.lock();
        let Shared { learned, tiers } = &mut *shared;
        learned.enter(self.tier, block, meta);
        let lists = &mut tiers[self.tier];
        lists.nodes.reach(block as usize);
        let node = &mut lists.nodes[block as usize];
        node.flags = node.flags & QUEUED | HERE;
        lists.len += 1;
        lists.learned_bytes += learned.growth();
        Self::place_from(self.tier, learned, tiers, block);
        (self.len, self.bytes) = tiers[self.tier].size();
    }

    fn on_hit(&mut self, block: Handle) {
        self.on_hits(&[block]);
    }

    fn on_hits(&mut self, blocks: &[Handle]) {
        let mut shared = self.shared.lock();
        let Shared { learned, tiers } = &mut *shared;
        for (i, &block) in blocks.iter().enumerate() {
            learned.foresee(&blocks[i + 1..]);
            if !tiers[self.tier].is_here(block) {
                continue;
            }
            for tier in bits(learned.hit(block).into()) {
                let lists = &mut tiers[tier];
                lists.nodes[block as usize].flags &= !PASSED;
                lists.place(learned, block);
            }
        }
    }

    /// All tiers know it already.
    fn on_hit_above(&mut self, _block: Handle) {}

    fn on_remove(&mut self, block: Handle) {
        let mut shared = self.shared.lock();
        let Shared { learned, tiers } = &mut *shared;
        let lists = &mut tiers[self.tier];
        if !lists.is_here(block) {
            return;
        }
        learned.leave(self.tier, block);
        lists.unlink(block);
        lists.nodes[block as usize].flags &= QUEUED;
        lists.len -= 1;
        lists.learned_bytes += learned.growth();
        (self.len, self.bytes) = lists.size();
        Self::place_from(self.tier + 1, learned, tiers, block);
    }

    fn hold(&mut self, block: Handle, held: bool) {
        self.with(|learned, lists| {
            let Some(node) = lists.nodes.get_mut(block as usize) else {
                return;
            };
            if node.flags & HERE == 0 || (node.flags & HELD != 0) == held {
                return;
            }
            // Whoever holds it answers for it: released, it may be named, whatever a search met before.
            node.flags = (node.flags ^ HELD) & !PASSED;
            lists.place(learned, block);
        });
    }

    fn victim(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        self.with(|learned, lists| lists.victim(learned, eligible))
    }

    fn len(&self) -> usize {
        self.len
    }

    fn memory_bytes(&self) -> usize {
        self.bytes
    }
}
