//! Chain order over any policy: a block leaves only after its children.

use std::collections::VecDeque;

use super::{Handle, Meta, Policy, search};
use crate::index::grow;

const NIL: u32 = u32::MAX;

/// Blocks that stayed and still are not eligible, which one search passes at most.
const PATIENCE: usize = 1024;

#[derive(Clone, Copy, Debug)]
struct Node {
    parent: u32,
    /// In all but the lowest bits, which say whether it is here, and stayed when it was named.
    children: u32,
}

const STAYED: u32 = 1;
const HERE: u32 = 2;
const CHILD: u32 = 4;

/// Lets the inner policy choose among the leaves: blocks without a child in this tier.
///
/// The others are held back, so a search never walks over them. Victims of one call may be a leaf,
/// then its parent, and so on: each is a leaf once those named before it have left. What stayed when it
/// was named is held back too, until as many others were named as there are; where no others are left, it
/// is named in the order in which it stayed. So whoever asks on gets each block once.
#[derive(Debug)]
pub struct Leaf<P> {
    inner: P,
    nodes: Vec<Node>,
    /// What stayed, and the search that may name it again.
    stayed: VecDeque<(Handle, u32)>,
    searches: u32,
}

impl<P: Policy> Leaf<P> {
    /// Chain order over `inner`.
    pub fn new(inner: P) -> Self {
        Leaf {
            inner,
            nodes: Vec::new(),
            stayed: VecDeque::new(),
            searches: 0,
        }
    }

    fn node(&mut self, block: Handle) -> &mut Node {
        let absent = Node {
            parent: NIL,
            children: 0,
        };
        grow(&mut self.nodes, block as usize, absent);
        &mut self.nodes[block as usize]
    }

    /// A child came.
    fn gain(&mut self, parent: Handle) {
        let node = self.node(parent);
        node.children += CHILD;
        if node.children / CHILD == 1 {
            self.inner.hold(parent, true);
        }
    }

    /// A child left; a block with none is a leaf, and may be named at once.
    fn lose(&mut self, parent: Handle) {
        let node = self.node(parent);
        node.children -= CHILD;
        if node.children < CHILD {
            node.children &= HERE;
            self.inner.hold(parent, false);
        }
    }

    /// Is it still so that a block stayed, and that nothing else holds it back?
    fn only_stayed(&self, block: Handle) -> bool {
        self.nodes[block as usize].children == HERE | STAYED
    }

    /// A block that stayed may be named again.
    fn release(&mut self, block: Handle) {
        if self.only_stayed(block) {
            self.inner.hold(block, false);
        }
        self.node(block).children &= !STAYED;
    }

    fn next(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        self.searches = self.searches.wrapping_add(1);
        // In one of two searches: so what still cannot leave costs one more for each.
        if self.searches.is_multiple_of(2)
            && let Some(&(block, due)) = self.stayed.front()
            && due.wrapping_sub(self.searches).cast_signed() <= 0
        {
            self.stayed.pop_front();
            self.release(block);
        }
        let named = search(&mut self.inner, eligible);
        if named.is_some() {
            return named;
        }
        for _ in 0..PATIENCE.min(self.stayed.len()) {
            let (block, due) = self.stayed.pop_front()?;
            let leaf = self.only_stayed(block);
            if leaf && !eligible(block) {
                self.stayed.push_back((block, due));
                continue;
            }
            self.release(block);
            if leaf {
                return Some(block);
            }
        }
        None
    }
}

impl<P: Policy> Policy for Leaf<P> {
    fn admit(&mut self, block: Handle, meta: &Meta) -> bool {
        self.inner.admit(block, meta)
    }

    fn on_refuse(&mut self, meta: &Meta) {
        self.inner.on_refuse(meta);
    }

    fn foresee(&self, fingerprints: &[u64]) {
        self.inner.foresee(fingerprints);
    }

    fn on_insert(&mut self, block: Handle, meta: &Meta) {
        self.inner.on_insert(block, meta);
        let node = self.node(block);
        node.parent = meta.parent.unwrap_or(NIL);
        node.children |= HERE;
        if node.children > HERE {
            self.inner.hold(block, true); // its children came first
        }
        if let Some(parent) = meta.parent {
            self.gain(parent);
        }
    }

    fn on_hit(&mut self, block: Handle) {
        self.inner.on_hit(block);
    }

    fn on_hits(&mut self, blocks: &[Handle]) {
        self.inner.on_hits(blocks);
    }

    fn on_hit_above(&mut self, block: Handle) {
        self.inner.on_hit_above(block);
    }

    fn on_remove(&mut self, block: Handle) {
        let node = self.node(block);
        if node.children & HERE == 0 {
            return;
        }
        node.children &= !(HERE | STAYED);
        let parent = std::mem::replace(&mut node.parent, NIL);
        self.inner.on_remove(block);
        if parent != NIL {
            self.lose(parent);
        }
    }

    fn defer(&mut self, block: Handle) {
        let node = self.node(block);
        if node.children & STAYED == 0 {
            node.children += STAYED;
            self.inner.hold(block, true);
            let due = self.searches.wrapping_add(self.inner.len() as u32);
            self.stayed.push_back((block, due));
        }
    }

    fn set_importance(&mut self, block: Handle, score: f32) {
        self.inner.set_importance(block, score);
    }

    fn hold(&mut self, block: Handle, held: bool) {
        let children = self.node(block).children;
        self.inner.hold(block, held || children > HERE);
    }

    fn victim(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        self.next(eligible)
    }

    fn victims(
        &mut self,
        n: usize,
        eligible: &mut dyn FnMut(Handle) -> bool,
        out: &mut Vec<Handle>,
    ) {
        let named = out.len();
        let mut held = named;
        while out.len() < named + n {
            let Some(block) = self.next(eligible) else {
                break;
            };
            out.push(block);
            if out.len() == named + n {
                break; // the last one need not be told from others
            }
            held = out.len();
            self.inner.hold(block, true);
            // As if it had left: its parent may be a leaf then.
            let parent = self.nodes[block as usize].parent;
            if parent != NIL {
                self.lose(parent);
            }
        }
        for &block in out[named..held].iter().rev() {
            let parent = self.nodes[block as usize].parent;
            if parent != NIL {
                self.gain(parent);
            }
            self.inner.hold(block, false);
        }
    }

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn memory_bytes(&self) -> usize {
        self.inner.memory_bytes()
            + self.nodes.capacity() * size_of::<Node>()
            + self.stayed.capacity() * size_of::<(Handle, u32)>()
    }
}
