//! What `auto` knows of the traffic and of each block: one memory for tiers above one another.

use kvtier_codec::checksum::prefetch;

use super::departed::{Departed, Memory};
use super::paged::Paged;
use super::reuse::{AGES, Reuse, age_of, class_of, gap_of};
use super::{Handle, Meta};

/// Touches in one tick of the clock.
const TICK: u64 = 16;
/// Blocks that left are remembered: two for each that is here, and at least so many.
const REMEMBERED: u64 = 1 << 14;
/// Of little memory, one is remembered, and one followed, for a page, which is less than a hundredth of it;
/// but at least so many.
const FEWEST: u64 = 1 << 11;

const NIL: u32 = u32::MAX;

/// A block, as far as it is known.
#[derive(Clone, Copy, Debug)]
struct Block {
    hash: u32,
    parent: u32,
    /// When it was last used, in ticks.
    touched: u32,
    /// The session's turn in which it came, and how often it was used since.
    turn: u8,
    hits: u8,
    gap: u8,
    /// Flags, and above them a bit for each tier that holds it.
    state: u8,
}

/// A block follows it, or did.
const CONTINUED: u8 = 1;
/// Of the blocks that follow it, one was itself continued: whatever follows it next is a new branch.
const SHARED: u8 = 2;
const FLAGS: u8 = CONTINUED | SHARED;
/// The first tier holds it.
const FIRST: u8 = FLAGS + 1;
/// So many tiers there are at most.
pub const TIERS: usize = FIRST.leading_zeros() as usize + 1;

const UNKNOWN: Block = Block {
    hash: 0,
    parent: NIL,
    touched: 0,
    turn: 0,
    hits: 0,
    gap: 0,
    state: 0,
};

impl Block {
    fn class(&self) -> usize {
        let generation = u32::from(self.turn) + u32::from(self.hits);
        class_of(generation, self.gap, self.state & CONTINUED != 0)
    }
}

/// Spreads what an owner numbered in order, and is near enough to a name.
fn hash_of(fingerprint: u64) -> u32 {
    (fingerprint.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32
}

/// See the module. A block is *used* when it is asked for, wherever it is found; that it comes to
/// another tier, or leaves one of several, is no use, and nothing is learned from it.
#[derive(Debug)]
pub struct Learned {
    blocks: Paged<Block>,
    /// Blocks that a tier holds.
    held: usize,
    departed: Memory,
    /// So many that left are remembered at least.
    remembered: usize,
    reuse: Reuse,
    touches: u64,
    /// Bytes of memory that a tier counts already.
    counted: usize,
}

impl Learned {
    /// Nothing is known yet; there is memory of so many pages, of which this takes a small part.
    pub fn new(memory: u64) -> Self {
        let many = memory.max(FEWEST);
        Learned {
            blocks: Paged::new(UNKNOWN),
            held: 0,
            departed: Memory::default(),
            remembered: many.min(REMEMBERED) as usize,
            reuse: Reuse::new(many as usize),
            touches: 0,
            counted: 0,
        }
    }

    /// The tick.
    pub fn now(&self) -> u32 {
        (self.touches / TICK) as u32
    }

    /// Class and age of a block that a tier holds: what [`Learned::worth`] goes by.
    pub fn cell(&self, block: Handle) -> usize {
        let block = &self.blocks[block as usize];
        block.class() * AGES + age_of(self.now().wrapping_sub(block.touched))
    }

    /// The age of a block that was used so many uses ago.
    pub fn age_after(uses: usize) -> usize {
        age_of((uses as u64 / TICK) as u32)
    }

    /// What a tick of keeping a block of this class and age is worth, in hits.
    pub fn worth(&self, cell: usize) -> f32 {
        self.reuse.worth(cell)
    }

    /// Changes whenever the worth of a class does.
    pub fn version(&self, class: usize) -> u32 {
        self.reuse.version(class)
    }

    /// The tiers that hold this block, a bit each.
    pub fn tiers(&self, block: Handle) -> u8 {
        self.blocks[block as usize].state / FIRST
    }

    /// Does a tier hold this block?
    pub fn is_held(&self, block: Handle) -> bool {
        self.held(block).is_some()
    }

    fn held(&self, block: Handle) -> Option<&Block> {
        let block = self.blocks.get(block as usize)?;
        (block.state >= FIRST).then_some(block)
    }

    /// The class and age that a block would have which no tier holds, and which is used now.
    pub fn cell_of(&self, meta: &Meta) -> usize {
        // Its request is not over: another may follow.
        let mut block = self.arriving(meta);
        block.state |= CONTINUED;
        block.class() * AGES
    }

    /// A block that no tier holds and that is used now.
    fn arriving(&self, meta: &Meta) -> Block {
        let now = self.now();
        let mut block = Block {
            hash: hash_of(meta.fingerprint),
            parent: meta.parent.unwrap_or(NIL),
            touched: now,
            turn: 1,
            ..UNKNOWN
        };
        if let Some(departed) = self.departed.get(block.hash) {
            (block.turn, block.hits) = (departed.generation, 1);
            block.gap = gap_of(Memory::since(now, departed.touched));
            block.state = departed.flags;
        } else if let Some(parent) = meta.parent.and_then(|p| self.held(p)) {
            if parent.hits == 0 {
                (block.turn, block.gap) = (parent.turn, parent.gap);
            } else if parent.state & SHARED == 0 {
                block.turn = parent.turn.saturating_add(parent.hits);
                block.gap = parent.gap;
            }
        }
        block
    }

    /// Blocks that no tier holds arrive soon: has the processor fetch what that needs.
    pub fn foresee_arrivals(&self, fingerprints: &[u64]) {
        let hashes = || fingerprints.iter().map(|&fingerprint| hash_of(fingerprint));
        for hash in hashes() {
            self.departed.foresee(hash);
            self.reuse.foresee(None, Some(hash));
        }
        for hash in hashes() {
            self.reuse.foresee(Some(hash), None);
        }
    }

    /// A block arrived in a tier: it was used, unless another tier holds it already.
    pub fn enter(&mut self, tier: usize, block: Handle, meta: &Meta) {
        self.blocks.reach(block as usize);
        if self.held(block).is_none() {
            let used = self.arriving(meta);
            self.blocks[block as usize] = used;
            self.held += 1;
            self.touches += 1;
            self.learn(&used);
            self.follow(used.parent);
        }
        self.blocks[block as usize].state |= FIRST << tier;
    }

    /// A block follows this one now.
    fn follow(&mut self, parent: u32) {
        let Some(above) = self.blocks.get_mut(parent as usize) else {
            return;
        };
        if above.state < FIRST || above.state & CONTINUED != 0 {
            return;
        }
        above.state |= CONTINUED;
        let above = *above;
        self.reuse.correct(above.hash, above.class());
        if let Some(shared) = self.blocks.get_mut(above.parent as usize) {
            shared.state |= SHARED;
        }
    }

    /// Blocks are used next, in this order: has the processor fetch what that needs.
    pub fn foresee(&self, next: &[Handle]) {
        let block = |ahead: usize| self.blocks.get(*next.get(ahead)? as usize);
        let (near, far) = (block(1), block(4));
        self.reuse
            .foresee(near.map(|b| b.hash), far.map(|b| b.hash));
        block(7).inspect(|block| prefetch(*block));
    }

    /// A block that a tier holds was used. Says which tiers do, a bit each.
    pub fn hit(&mut self, block: Handle) -> u8 {
        self.touches += 1;
        let now = self.now();
        let block = &mut self.blocks[block as usize];
        block.gap = gap_of(now.wrapping_sub(block.touched));
        block.touched = now;
        block.hits = block.hits.saturating_add(1);
        let used = *block;
        self.learn(&used);
        used.state / FIRST
    }

    /// A block left a tier; it is remembered where that was the last to hold it.
    pub fn leave(&mut self, tier: usize, block: Handle) {
        let block = &mut self.blocks[block as usize];
        block.state &= !(FIRST << tier);
        let left = *block;
        if left.state < FIRST {
            self.remember(&left);
            self.held -= 1;
        }
    }

    /// A block was used that no tier held, nor any took.
    pub fn refuse(&mut self, meta: &Meta) {
        let mut block = self.arriving(meta);
        block.state |= CONTINUED;
        self.touches += 1;
        self.learn(&block);
        self.remember(&block);
    }

    fn learn(&mut self, block: &Block) {
        let now = self.now();
        self.reuse.touch(block.hash, block.class(), now, self.held);
    }

    fn remember(&mut self, block: &Block) {
        let departed = Departed {
            touched: block.touched,
            generation: block.turn.saturating_add(block.hits),
            flags: block.state & FLAGS,
        };
        let wanted = (2 * self.held).max(self.remembered);
        self.departed.insert(block.hash, departed, wanted);
    }

    /// Bytes of memory more than when last asked: each is counted by the tier for which it came.
    pub fn growth(&mut self) -> usize {
        let bytes =
            self.blocks.memory_bytes() + self.departed.memory_bytes() + self.reuse.memory_bytes();
        bytes - std::mem::replace(&mut self.counted, bytes)
    }
}
