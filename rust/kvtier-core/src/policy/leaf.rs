//! Chain order over any policy: a block leaves only after its children.

use hashbrown::HashMap;

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
/// Victims of one call may be a leaf, then its parent, and so on: each is a leaf once those named
/// before it have left.
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
        let at = block as usize;
        let absent = Node {
            parent: NIL,
            children: 0,
        };
        grow(&mut self.nodes, at, absent);
        &mut self.nodes[at]
    }
}

impl<P: Policy> Policy for Leaf<P> {
    fn on_insert(&mut self, block: Handle, meta: &Meta) {
        self.node(block).parent = meta.parent.unwrap_or(NIL);
        if let Some(parent) = meta.parent {
            self.node(parent).children += 1;
        }
        self.inner.on_insert(block, meta);
    }

    fn on_hit(&mut self, block: Handle) {
        self.inner.on_hit(block);
    }

    fn on_remove(&mut self, block: Handle) {
        let before = self.inner.len();
        self.inner.on_remove(block);
        if self.inner.len() == before {
            return; // it was not here
        }
        let parent = std::mem::replace(&mut self.node(block).parent, NIL);
        if parent != NIL {
            self.node(parent).children -= 1;
        }
    }

    fn set_importance(&mut self, block: Handle, score: f32) {
        self.inner.set_importance(block, score);
    }

    fn victims(
        &mut self,
        n: usize,
        eligible: &mut dyn FnMut(Handle) -> bool,
        out: &mut Vec<Handle>,
    ) {
        // How many children of a block were named already, in this call.
        let mut named: HashMap<Handle, u32> = HashMap::new();
        let mut chosen: hashbrown::HashSet<Handle> = hashbrown::HashSet::new();
        let mut pass = Vec::new();
        while chosen.len() < n {
            pass.clear();
            let nodes = &self.nodes;
            self.inner.victims(
                n - chosen.len(),
                &mut |block| {
                    let children = nodes[block as usize].children;
                    children == named.get(&block).copied().unwrap_or(0)
                        && !chosen.contains(&block)
                        && eligible(block)
                },
                &mut pass,
            );
            if pass.is_empty() {
                return;
            }
            for &block in &pass {
                chosen.insert(block);
                out.push(block);
                let parent = self.nodes[block as usize].parent;
                if parent != NIL {
                    *named.entry(parent).or_default() += 1;
                }
            }
        }
    }

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn memory_bytes(&self) -> usize {
        self.inner.memory_bytes() + self.nodes.capacity() * size_of::<Node>()
    }
}
