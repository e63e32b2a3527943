//! Drives one policy over a trace.

use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_core::error::Result;

use crate::tiers::Tiers;
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
    /// The prefix hits of each tier.
    pub tier_hits: Vec<u64>,
    /// Blocks that came into each tier from the one above.
    pub demoted: Vec<u64>,
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

/// Replays a trace against the policy of that name in tiers of these capacities in blocks, the
/// fastest first. What leaves a tier is offered to the next one; a hit brings a block up. At most
/// `budget` blocks a day are written to the last of several tiers. `done` follows the references.
pub fn replay(
    trace: &Trace,
    name: &str,
    capacities: &[usize],
    touch: Touch,
    budget: Option<f64>,
    done: &AtomicU64,
) -> Result<Outcome> {
    let mut tiers = Tiers::new(trace, name, capacities, budget)?;
    let mut outcome = Outcome {
        tier_hits: vec![0; capacities.len()],
        ..Outcome::default()
    };
    let mut order = Vec::new();
    for request in 0..trace.len() {
        let chain = trace.chain(request);
        tiers.advance(trace.seconds(request));
        let found = chain.iter().map_while(|&block| tiers.tier_of(block));
        let prefix = found.map(|tier| outcome.tier_hits[tier] += 1).count();
        outcome.note(trace, request, prefix);
        order.clear();
        order.extend_from_slice(chain);
        if touch == Touch::Reverse {
            // Under chain order what is new cannot come before its parent.
            let until = if tiers.is_chained() {
                prefix
            } else {
                order.len()
            };
            order[..until].reverse();
        }
        for &block in &order {
            outcome.plain_hits += u64::from(tiers.tier_of(block).is_some());
            tiers.touch(block);
        }
        done.fetch_add(chain.len() as u64, Ordering::Relaxed);
    }
    outcome.demoted = tiers.demoted;
    Ok(outcome)
}
