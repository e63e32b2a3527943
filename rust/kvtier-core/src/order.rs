//! The order in which blocks leave: the chains between them, and the policies of each tier.
//!
//! One lock guards it, taken after an index shard's and before the allocator's, and held for the
//! time of a few array accesses.

use hashbrown::HashSet;

use crate::index::grow;
use crate::policy::{Handle, Meta};
use crate::shares::Shares;

const NIL: u32 = u32::MAX;

/// A block's place in the tree of prefixes.
#[derive(Clone, Copy, Debug)]
struct Link {
    parent: u32,
    first: u32,
    next: u32,
    prev: u32,
    epoch: u32,
    state: State,
    /// Blocks on their way that follow it.
    expected: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    Alive,
    /// It is being removed with all its descendants: nothing may be attached any more.
    Dying,
}

const ABSENT: Link = Link {
    parent: NIL,
    first: NIL,
    next: NIL,
    prev: NIL,
    epoch: 0,
    state: State::Absent,
    expected: 0,
};

/// A block, and which use of its handle is meant.
pub type Known = (Handle, u32);

/// Chains and policies.
pub struct Order {
    links: Vec<Link>,
    /// The policies, by tier: memory tiers first, then NVMe.
    pub(crate) shares: Shares,
}

impl Order {
    /// No blocks yet.
    pub fn new(shares: Shares) -> Self {
        Order {
            links: Vec::new(),
            shares,
        }
    }

    fn alive(&self, (h, epoch): Known) -> bool {
        self.links
            .get(h as usize)
            .is_some_and(|link| link.epoch == epoch && link.state == State::Alive)
    }

    /// Adds a block of this namespace to the tree. False: the parent is gone, or going, and nothing
    /// was added.
    pub fn attach(&mut self, (h, epoch): Known, parent: Option<Known>, namespace: u64) -> bool {
        if parent.is_some_and(|parent| !self.alive(parent)) {
            return false;
        }
        let at = h as usize;
        grow(&mut self.links, at, ABSENT);
        debug_assert_eq!(self.links[at].state, State::Absent);
        let mut link = Link {
            epoch,
            state: State::Alive,
            ..ABSENT
        };
        if let Some((parent, _)) = parent {
            link.parent = parent;
            link.next = std::mem::replace(&mut self.links[parent as usize].first, h);
            if link.next != NIL {
                self.links[link.next as usize].prev = h;
            }
        }
        self.links[at] = link;
        self.shares.attach(h, namespace);
        true
    }

    /// Is the block in the tree?
    pub fn is_attached(&self, h: Handle) -> bool {
        self.links
            .get(h as usize)
            .is_some_and(|link| link.state != State::Absent)
    }

    /// Takes a block without children out of the tree.
    pub fn detach(&mut self, h: Handle) {
        let link = std::mem::replace(&mut self.links[h as usize], ABSENT);
        debug_assert_eq!(link.first, NIL, "children are removed before their parent");
        if link.next != NIL {
            self.links[link.next as usize].prev = link.prev;
        }
        if link.prev != NIL {
            self.links[link.prev as usize].next = link.next;
        } else if link.parent != NIL {
            self.links[link.parent as usize].first = link.next;
        }
        self.shares.detach(h);
    }

    /// A block is on its way that follows this one, which does not leave the store before others do until
    /// [`Order::expect_no_more`]. False: it is gone, or going.
    pub fn expect_child(&mut self, parent: Known) -> bool {
        let alive = self.alive(parent);
        if alive {
            self.links[parent.0 as usize].expected += 1;
        }
        alive
    }

    /// It came, or never will.
    pub fn expect_no_more(&mut self, (h, epoch): Known) {
        let link = &mut self.links[h as usize];
        if link.epoch == epoch && link.state != State::Absent {
            link.expected -= 1;
        }
    }

    /// Is a block on its way that follows this one?
    pub fn expects_child(&self, h: Handle) -> bool {
        self.links
            .get(h as usize)
            .is_some_and(|link| link.expected > 0)
    }

    /// Does any block in the store follow this one?
    pub fn has_children(&self, h: Handle) -> bool {
        self.links
            .get(h as usize)
            .is_some_and(|link| link.first != NIL)
    }

    /// The parent of a block in the store.
    pub fn parent(&self, h: Handle) -> Option<Handle> {
        let link = self.links.get(h as usize)?;
        Some(link.parent).filter(|&p| p != NIL)
    }

    /// As [`Order::parent`], of just this use of a handle; `None` if it is gone or going.
    pub fn parent_of(&self, block: Known) -> Option<Option<Known>> {
        let known = |h: Handle| (h, self.links[h as usize].epoch);
        self.alive(block).then(|| self.parent(block.0).map(known))
    }

    /// The block and all that follow it, descendants first. Empty if it is not in the tree.
    pub fn descendants(&self, root: Known) -> Vec<Known> {
        let mut tree = Vec::new();
        let link = self.links.get(root.0 as usize);
        if link.is_some_and(|link| link.epoch == root.1 && link.state != State::Absent) {
            tree.push(root);
        }
        let mut next = 0;
        while let Some(&(h, _)) = tree.get(next) {
            let mut child = self.links[h as usize].first;
            while child != NIL {
                let link = self.links[child as usize];
                tree.push((child, link.epoch));
                child = link.next;
            }
            next += 1;
        }
        tree.reverse();
        tree
    }

    /// As [`Order::descendants`]. From now on nothing can be attached to any of them.
    pub fn condemn(&mut self, root: Known) -> Vec<Known> {
        let tree = self.descendants(root);
        for &(h, _) in &tree {
            self.links[h as usize].state = State::Dying;
        }
        tree
    }

    /// These blocks and their ancestors, each after its parent.
    pub fn parents_first(&self, blocks: &[Known]) -> Vec<Known> {
        let mut seen = HashSet::new();
        let mut out = Vec::with_capacity(blocks.len());
        for &(h, epoch) in blocks {
            if !self.alive((h, epoch)) {
                continue;
            }
            let from = out.len();
            let mut next = Some(h);
            while let Some(at) = next.filter(|&at| seen.insert(at)) {
                out.push((at, self.links[at as usize].epoch));
                next = self.parent(at);
            }
            out[from..].reverse();
        }
        out
    }

    /// What a policy is told of a block that arrives.
    pub fn meta(&self, h: Handle, fingerprint: u64, pages: u32, importance: f32) -> Meta {
        Meta {
            parent: self.parent(h),
            fingerprint,
            pages,
            importance,
        }
    }

    /// Bytes kept in memory.
    pub fn memory_bytes(&self) -> usize {
        self.links.capacity() * size_of::<Link>() + self.shares.memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::{Need, Quota, Search};

    #[test]
    fn a_parent_stays_for_a_block_on_its_way_but_not_for_another_use_of_its_handle() {
        let mut order = Order::new(Shares::new("lru-leaf", Vec::new(), false).unwrap());
        assert!(order.attach((0, 1), None, 0));
        assert!(order.expect_child((0, 1)) && !order.expect_child((0, 2)));
        assert!(order.expects_child(0));
        order.detach(0); // removed on request, whoever waits for it
        assert!(order.attach((0, 2), None, 0) && !order.expects_child(0));
        order.expect_no_more((0, 1));
        assert!(order.expect_child((0, 2)) && order.expects_child(0));
        order.expect_no_more((0, 2));
        assert!(!order.expects_child(0));
    }

    #[test]
    fn each_tier_is_told_of_its_own_hits_in_their_order() {
        let mut shares = Shares::new("lru-leaf", vec![16; 2], false).unwrap();
        let meta = |h| Meta {
            fingerprint: h,
            pages: 1,
            ..Meta::default()
        };
        for h in 0..4 {
            (0..2).for_each(|tier| shares.enter(tier, h, 0, &meta(h.into())));
        }
        shares.on_hits([(0, 1), (0, 0), (1, 2), (0, 3), (1, 0)].into_iter());
        for (tier, order) in [[2, 1, 0, 3], [1, 3, 2, 0]].into_iter().enumerate() {
            let mut victims = Vec::new();
            let mut search = Search::new(tier, Need::Tier);
            shares.victims(&mut search, 4, &mut |_| true, &mut victims);
            assert_eq!(victims, order, "tier {tier}");
        }
    }

    #[test]
    fn whose_blocks_are_used_keeps_them_longer() {
        let mut shares = Shares::new("lru-leaf", vec![64], false).unwrap();
        let quota = Quota {
            cap: vec![Some(1 << 20)],
            ..Quota::default()
        };
        for (tag, h) in [(1, 0), (2, 1)] {
            shares
                .set_quota(tag, &quota, &[("dram", 64 << 12)])
                .unwrap();
            shares.attach(h, tag);
            let meta = Meta {
                pages: 1,
                ..Meta::default()
            };
            shares.enter(0, h, tag, &meta);
        }
        // Where both are as much used, it is the first one.
        for (used, victim) in [(0, 1), (1, 0), (1, 0), (0, 0), (0, 1)] {
            shares.on_hits([(0, used); 3].into_iter());
            let mut victims = Vec::new();
            let mut search = Search::new(0, Need::Tier);
            shares.victims(&mut search, 1, &mut |_| true, &mut victims);
            assert_eq!(victims, [victim]);
        }
    }

    #[test]
    fn a_condemned_tree_names_descendants_first_and_takes_no_more() {
        let mut order = Order::new(Shares::new("lru-leaf", Vec::new(), false).unwrap());
        for (h, parent) in [
            (0, None),
            (1, Some(0)),
            (2, Some(1)),
            (3, Some(0)),
            (4, None),
        ] {
            assert!(order.attach((h, 7), parent.map(|p| (p, 7)), 0));
        }
        assert!(
            !order.attach((5, 7), Some((0, 6)), 0),
            "another use of the handle"
        );
        let tree: Vec<Handle> = order.condemn((0, 7)).iter().map(|k| k.0).collect();
        assert_eq!(tree.len(), 4);
        let at = |h| tree.iter().position(|&x| x == h).unwrap();
        assert!(at(2) < at(1) && at(1) < at(0) && at(3) < at(0));
        assert!(!order.attach((5, 7), Some((1, 7)), 0));
        for h in tree {
            order.detach(h);
        }
        assert!(order.attach((1, 8), Some((4, 7)), 0) && order.has_children(4));
        order.detach(1);
        assert!(!order.has_children(4));
    }
}
