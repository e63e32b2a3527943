//! Least recently used among the leaves, exactly.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use hashbrown::HashMap;

use super::{Handle, Meta, Policy};
use crate::index::grow;

const NIL: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Node {
    /// When it was last used, by the policy's own clock.
    touched: u64,
    parent: u32,
    children: u32,
    here: bool,
}

const ABSENT: Node = Node {
    touched: 0,
    parent: NIL,
    children: 0,
    here: false,
};

/// Of the blocks without a child in this tier, the one that was used longest ago leaves first.
///
/// Only leaves are kept in order, so a use of a block inside a chain costs one write, and the search
/// for a victim never walks over the parents of others.
#[derive(Debug, Default)]
pub struct LruLeaf {
    nodes: Vec<Node>,
    leaves: BTreeSet<(u64, Handle)>,
    clock: u64,
    len: usize,
}

impl LruLeaf {
    fn node(&mut self, block: Handle) -> &mut Node {
        grow(&mut self.nodes, block as usize, ABSENT);
        &mut self.nodes[block as usize]
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}

impl Policy for LruLeaf {
    fn on_insert(&mut self, block: Handle, meta: &Meta) {
        let touched = self.tick();
        let node = self.node(block);
        *node = Node {
            touched,
            parent: meta.parent.unwrap_or(NIL),
            here: true,
            ..*node
        };
        if node.children == 0 {
            self.leaves.insert((touched, block));
        }
        self.len += 1;
        if let Some(parent) = meta.parent {
            let node = self.node(parent);
            node.children += 1;
            let key = (node.touched, parent);
            self.leaves.remove(&key);
        }
    }

    fn on_hit(&mut self, block: Handle) {
        let touched = self.tick();
        let Some(node) = self.nodes.get_mut(block as usize).filter(|node| node.here) else {
            return;
        };
        let before = std::mem::replace(&mut node.touched, touched);
        if node.children == 0 {
            self.leaves.remove(&(before, block));
            self.leaves.insert((touched, block));
        }
    }

    fn on_remove(&mut self, block: Handle) {
        let Some(node) = self.nodes.get_mut(block as usize).filter(|node| node.here) else {
            return;
        };
        node.here = false;
        let parent = std::mem::replace(&mut node.parent, NIL);
        let key = (node.touched, block);
        self.leaves.remove(&key);
        self.len -= 1;
        if parent != NIL {
            let node = self.node(parent);
            node.children -= 1;
            if node.children == 0 && node.here {
                let key = (node.touched, parent);
                self.leaves.insert(key);
            }
        }
    }

    fn set_importance(&mut self, _block: Handle, _score: f32) {}

    fn victims(
        &mut self,
        n: usize,
        eligible: &mut dyn FnMut(Handle) -> bool,
        out: &mut Vec<Handle>,
    ) {
        let goal = out.len() + n;
        let mut leaves = self.leaves.iter().copied().peekable();
        // Parents that are leaves once the victims named so far have left.
        let mut bared: BinaryHeap<Reverse<(u64, Handle)>> = BinaryHeap::new();
        let mut named: HashMap<Handle, u32> = HashMap::new();
        while out.len() < goal {
            let from_heap = match (bared.peek(), leaves.peek()) {
                (Some(Reverse(parent)), Some(leaf)) => parent < leaf,
                (parent, _) => parent.is_some(),
            };
            let next = if from_heap {
                bared.pop().map(|Reverse(next)| next)
            } else {
                leaves.next()
            };
            let Some((_, block)) = next else {
                return;
            };
            if !eligible(block) {
                continue;
            }
            out.push(block);
            let parent = self.nodes[block as usize].parent;
            if parent == NIL {
                continue;
            }
            let gone = named.entry(parent).or_default();
            *gone += 1;
            let node = self.nodes[parent as usize];
            if *gone == node.children && node.here {
                bared.push(Reverse((node.touched, parent)));
            }
        }
    }

    fn len(&self) -> usize {
        self.len
    }

    fn memory_bytes(&self) -> usize {
        // A B-tree's nodes are about two thirds full.
        self.nodes.capacity() * size_of::<Node>() + self.leaves.len() * 24
    }
}
