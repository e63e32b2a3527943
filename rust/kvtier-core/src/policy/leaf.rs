//! Chain order over any policy: a block leaves only after its children.

use super::{Handle, Meta, Policy};
use crate::index::grow;

const NIL: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Node {
    parent: u32,
    children: u32,
}

/// Lets the inner policy choose among the leaves: blocks without a child in this tier.
///
/// The others are held back, so a search never walks over them. Victims of one call may be a leaf,
/// then its parent, and so on: each is a leaf once those named before it have left.
#[derive(Debug)]
pub struct Leaf<P> {
    inner: P,
    nodes: Vec<Node>,
}

impl<P: Policy> Leaf<P> {
    /// Chain order over `inner`.
    pub fn new(inner: P) -> Self {
        Leaf {
            inner,
            nodes: Vec::new(),
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

    /// Changes how many children count; a block with none is a leaf.
    fn count(&mut self, parent: Handle, change: i32) {
        let node = self.node(parent);
        let before = node.children;
        node.children = before.wrapping_add_signed(change);
        let after = node.children;
        if (before == 0) != (after == 0) {
            self.inner.hold(parent, after > 0);
        }
    }
}

impl<P: Policy> Policy for Leaf<P> {
    fn admit(&mut self, block: Handle, meta: &Meta) -> bool {
        self.inner.admit(block, meta)
    }

    fn on_refuse(&mut self, meta: &Meta) {
        self.inner.on_refuse(meta);
    }

    fn on_insert(&mut self, block: Handle, meta: &Meta) {
        self.inner.on_insert(block, meta);
        let node = self.node(block);
        node.parent = meta.parent.unwrap_or(NIL);
        if node.children > 0 {
            self.inner.hold(block, true); // its children came first
        }
        if let Some(parent) = meta.parent {
            self.count(parent, 1);
        }
    }

    fn on_hit(&mut self, block: Handle) {
        self.inner.on_hit(block);
    }

    fn on_hit_above(&mut self, block: Handle) {
        self.inner.on_hit_above(block);
    }

    fn on_remove(&mut self, block: Handle) {
        let before = self.inner.len();
        self.inner.on_remove(block);
        if self.inner.len() == before {
            return; // it was not here
        }
        let parent = std::mem::replace(&mut self.node(block).parent, NIL);
        if parent != NIL {
            self.count(parent, -1);
        }
    }

    fn defer(&mut self, block: Handle) {
        self.inner.defer(block);
    }

    fn set_importance(&mut self, block: Handle, score: f32) {
        self.inner.set_importance(block, score);
    }

    fn hold(&mut self, block: Handle, held: bool) {
        let children = self.node(block).children;
        self.inner.hold(block, held || children > 0);
    }

    fn victim(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        self.inner.victim(eligible)
    }

    fn victims(
        &mut self,
        n: usize,
        eligible: &mut dyn FnMut(Handle) -> bool,
        out: &mut Vec<Handle>,
    ) {
        let named = out.len();
        while out.len() < named + n {
            let Some(block) = self.inner.victim(eligible) else {
                break;
            };
            out.push(block);
            self.inner.hold(block, true);
            // As if it had left: its parent may be a leaf then.
            let parent = self.nodes[block as usize].parent;
            if parent != NIL {
                self.count(parent, -1);
            }
        }
        for &block in out[named..].iter().rev() {
            let parent = self.nodes[block as usize].parent;
            if parent != NIL {
                self.count(parent, 1);
            }
            self.inner.hold(block, false);
        }
    }

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn memory_bytes(&self) -> usize {
        self.inner.memory_bytes() + self.nodes.capacity() * size_of::<Node>()
    }
}
