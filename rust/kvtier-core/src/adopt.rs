//! What a restart finds on NVMe becomes part of the index.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kvtier_codec::image::PAGE;
use kvtier_nvme::Recovered;

use crate::index::{Cold, Entry, half};
use crate::order::Known;
use crate::store::Inner;

/// More than index, policies and NVMe tables take for a block.
const ENTRY: usize = 384;

/// How long an open waits for records of what it drops.
const PATIENCE: Duration = Duration::from_secs(5);

impl Inner {
    /// Takes over what the NVMe tier found, the oldest first. Blocks whose parent was lost are
    /// dropped, and so are the oldest where the index would take more than half of the first tier.
    pub(crate) fn adopt(&self, mut recovered: Vec<Recovered>) {
        let Some(cold) = &self.cold else {
            return;
        };
        let most = self.memory[0].arena.mapped_pages() as usize * PAGE / 2 / ENTRY;
        let excess = recovered.len().saturating_sub(most);
        for old in recovered.drain(..excess) {
            cold.tier.remove(old.slot, &old.id);
            cold.stats.evictions.add(1);
        }
        if excess > 0 {
            // The records that wait take memory too. A failure shows when something is written.
            let _ = cold.tier.commit(Some(Instant::now() + PATIENCE));
        }
        let known: Vec<Known> = recovered.iter().map(|r| self.adopt_one(r)).collect();
        self.attach_all(&recovered, &known);
        for (r, (h, epoch)) in recovered.iter().zip(known) {
            let mut shard = self.index.shard(h);
            if self.order.lock().is_attached(h) {
                if let Some(entry) = shard.get_same(h, epoch) {
                    self.insert_order(self.memory.len(), h, entry);
                    cold.tier.set_owner(r.slot, h);
                }
            } else if self.index.remove(&mut shard, h).is_some() {
                cold.tier.remove(r.slot, &r.id);
                self.stats.orphans.add(1);
            }
        }
    }

    fn adopt_one(&self, r: &Recovered) -> Known {
        let mut entry = Entry::new(r.id, r.namespace, r.plain, r.importance);
        entry.set_cold(Cold {
            slot: r.slot,
            root: r.root,
            codec: r.codec,
            stored: r.shape.payload() as u32,
        });
        let mut shard = self.index.of(&r.id);
        let h = self.index.insert(&mut shard, entry);
        (h, shard.get(h).map_or(0, |entry| entry.epoch))
    }

    /// Attaches every block that a root leads to, from the roots down: what is not reached has
    /// lost an ancestor (or, after damage, names itself as one).
    fn attach_all(&self, recovered: &[Recovered], known: &[Known]) {
        let mut children: Vec<([u8; 16], usize)> = recovered
            .iter()
            .enumerate()
            .filter_map(|(i, r)| Some((r.parent?, i)))
            .collect();
        children.sort_unstable();
        let mut order = self.order.lock();
        let mut next: VecDeque<usize> = VecDeque::new();
        for (i, r) in recovered.iter().enumerate() {
            if r.parent.is_none() {
                order.attach(known[i], None, r.namespace);
                next.push_back(i);
            }
        }
        while let Some(parent) = next.pop_front() {
            let name = half(&recovered[parent].id);
            let from = children.partition_point(|child| child.0 < name);
            for &(_, child) in children[from..].iter().take_while(|child| child.0 == name) {
                let tag = recovered[child].namespace;
                order.attach(known[child], Some(known[parent]), tag);
                next.push_back(child);
            }
        }
    }
}
