//! Drives one policy over a trace.

use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_core::error::Result;
use kvtier_core::policy::{self, Meta};

use crate::trace::Trace;

/// In which order a request uses the blocks of its chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// From the head to the tail.
    Forward,
    /// From the tail to the head, so that the head is the last to leave. Under chain order: first
    /// what is there from its tail, then what is new from its head.
    Reverse,
}

/// What a replay counted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Blocks asked for.
    pub references: u64,
    /// Of these, found when they were used, each by itself.
    pub plain_hits: u64,
    /// Of these, found at the request's start with all that precede them.
    pub prefix_hits: u64,
    /// Tokens of the latter.
    pub token_hits: u64,
    /// Tokens of all prompts.
    pub tokens: u64,
    /// Tokens found, by request.
    pub hit_tokens: Vec<u32>,
}

impl Outcome {
    /// Counts what a request finds.
    pub(crate) fn note(&mut self, trace: &Trace, request: usize, prefix: usize) {
        let tokens = trace.tokens(request);
        let found = (prefix as u64 * trace.block_tokens).min(tokens);
        self.references += trace.chain(request).len() as u64;
        self.prefix_hits += prefix as u64;
        self.token_hits += found;
        self.tokens += tokens;
        self.hit_tokens.push(found as u32);
    }
}

/// Spreads a block's number over 64 bits, as an id's hash would.
fn fingerprint(block: u32) -> u64 {
    let x = (u64::from(block) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) ^ (x >> 32)
}

/// Replays a trace against the policy of that name in a tier of `capacity` blocks. `done` follows
/// the references.
pub fn replay(
    trace: &Trace,
    name: &str,
    capacity: usize,
    touch: Touch,
    done: &AtomicU64,
) -> Result<Outcome> {
    let mut policy = policy::by_name(name, capacity as u64)?;
    let chained = policy::keeps_chains(name);
    let mut here = vec![false; trace.unique()];
    let mut used = 0;
    let mut outcome = Outcome::default();
    let mut order = Vec::new();
    for request in 0..trace.len() {
        let chain = trace.chain(request);
        let prefix = chain.iter().take_while(|&&b| here[b as usize]).count();
        outcome.note(trace, request, prefix);
        order.clear();
        order.extend_from_slice(chain);
        if touch == Touch::Reverse {
            // Under chain order what is new cannot come before its parent.
            let until = if chained { prefix } else { order.len() };
            order[..until].reverse();
        }
        for &block in &order {
            if here[block as usize] {
                outcome.plain_hits += 1;
                policy.on_hit(block);
                continue;
            }
            let parent = trace.parent(block);
            if chained && parent.is_some_and(|parent| !here[parent as usize]) {
                continue; // no block without its parent
            }
            let meta = Meta {
                parent,
                fingerprint: fingerprint(block),
                pages: 1,
                importance: 0.0,
            };
            if !policy.admit(&meta) {
                continue;
            }
            if used == capacity {
                // The parent is needed for the block that comes.
                let Some(victim) = policy.victim(&mut |b| !chained || Some(b) != parent) else {
                    continue;
                };
                policy.on_remove(victim);
                here[victim as usize] = false;
                used -= 1;
            }
            policy.on_insert(block, &meta);
            here[block as usize] = true;
            used += 1;
        }
        done.fetch_add(chain.len() as u64, Ordering::Relaxed);
    }
    Ok(outcome)
}
