//! Admission: whether a block that leaves a tier is worth its place in the next one.

use crate::index::Entry;
use crate::policy::Handle;
use crate::store::Inner;

impl Inner {
    /// Would a block that leaves `tier` only push out what is worth more below, in the last tier?
    /// What others follow goes there in any case: without it they are useless.
    pub(crate) fn is_refused_below(&self, tier: usize, h: Handle, entry: &Entry) -> bool {
        let below = tier + 1;
        if below + 1 < self.tiers() || self.has_room(below, entry.shape.pages()) {
            return false;
        }
        let mut order = self.order.lock();
        let meta = self.meta(&order, below, h, entry);
        !order.has_children(h)
            && !order.expects_child(h)
            && !order.shares.admits(below, h, entry.namespace, &meta)
    }

    /// Could a block of so many pages come to a tier without another that leaves?
    fn has_room(&self, tier: usize, pages: u32) -> bool {
        match (self.memory.get(tier), &self.cold) {
            (Some(memory), _) => memory.arena.free_pages() >= pages,
            (None, Some(cold)) => cold.has_room(),
            (None, None) => false,
        }
    }
}
