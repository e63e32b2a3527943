//! MIN (Belady, 1966): what a policy that knows the future reaches.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::replay::Outcome;
use crate::trace::Trace;

/// Replays a trace with a tier of `capacity` blocks from which the block leaves that is needed
/// last. With `bypass`, a block that would be that one itself does not come in at all.
pub fn min(trace: &Trace, capacity: usize, bypass: bool, done: &AtomicU64) -> Outcome {
    // When each reference's block is used next; those never used again come last, and in no
    // particular order.
    let blocks = trace.blocks();
    let mut next = vec![0; blocks.len()];
    let mut seen = vec![usize::MAX; trace.unique()];
    for (at, &block) in blocks.iter().enumerate().rev() {
        next[at] = seen[block as usize];
        seen[block as usize] = at;
    }
    let mut due = vec![None; trace.unique()]; // of the blocks here
    let mut order: BTreeSet<(usize, u32)> = BTreeSet::new();
    let mut outcome = Outcome::default();
    let mut at = 0;
    for request in 0..trace.len() {
        let chain = trace.chain(request);
        let prefix = chain.iter().take_while(|&&b| due[b as usize].is_some());
        outcome.note(trace, request, prefix.count());
        for &block in chain {
            let mine = next[at];
            at += 1;
            if let Some(before) = due[block as usize] {
                outcome.plain_hits += 1;
                order.remove(&(before, block));
            } else if order.len() == capacity {
                let Some(&last) = order.last() else {
                    continue; // no room at all
                };
                if bypass && mine >= last.0 {
                    continue;
                }
                order.remove(&last);
                due[last.1 as usize] = None;
            }
            due[block as usize] = Some(mine);
            order.insert((mine, block));
        }
        done.fetch_add(chain.len() as u64, Ordering::Relaxed);
    }
    outcome.tier_hits = vec![outcome.prefix_hits];
    outcome.demoted = vec![0];
    outcome
}
