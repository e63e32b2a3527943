//! Eviction policies: they see handles and metadata, never bytes.
//!
//! A policy orders the blocks of one tier. It is told of insertions, hits and removals, and names
//! victims; it never acts. The store and the trace replayer drive the same code.

mod age;
mod arc;
mod auto;
mod departed;
mod frequency;
mod ghosts;
mod importance;
mod leaf;
mod learned;
mod paged;
mod queue;
mod recency;
mod reuse;
mod s3fifo;
mod tinylfu;

pub use arc::Arc;
pub use auto::Auto;
pub use frequency::{Gdsf, Lfu};
pub use importance::Importance;
pub use leaf::Leaf;
pub use recency::{Clock, Fifo, Lru, Sieve};
pub use s3fifo::S3Fifo;
pub use tinylfu::WTinyLfu;

use crate::error::{Error, Kind, Result};

/// A dense number that names a block while it is in the store.
pub type Handle = u32;

/// What a policy is told of a block when it arrives.
#[derive(Clone, Copy, Debug, Default)]
pub struct Meta {
    /// The preceding block of the chain, if it is in the store.
    pub parent: Option<Handle>,
    /// 64 bits of the block's id: recognises it when it comes back under another handle.
    pub fingerprint: u64,
    /// Pages that it takes in this tier.
    pub pages: u32,
    /// The caller's score, 0 if none was given.
    pub importance: f32,
}

/// The order in which the blocks of one tier leave it.
///
/// Whatever is pinned, a search for a victim looks at a bounded number of blocks: those that it
/// must pass are set aside and asked again a few at a time.
pub trait Policy: Send {
    /// A block is about to arrive where it must push out another. False: that one is worth more.
    fn admit(&mut self, _block: Handle, _meta: &Meta) -> bool {
        true
    }
    /// A block was used that no tier held, nor any admitted. The first tier is told.
    fn on_refuse(&mut self, _meta: &Meta) {}
    /// Blocks that these fingerprints recognise arrive soon: has the processor fetch what that needs.
    fn foresee(&self, _fingerprints: &[u64]) {}
    /// A block arrived in this tier, where it was not: it was used, or it comes from a tier that
    /// holds it still.
    fn on_insert(&mut self, block: Handle, meta: &Meta);
    /// A block was used.
    fn on_hit(&mut self, block: Handle);
    /// Blocks were used, in this order.
    fn on_hits(&mut self, blocks: &[Handle]) {
        blocks.iter().for_each(|&block| self.on_hit(block));
    }
    /// A block was used in a tier above, which was told: this copy must not grow old meanwhile.
    fn on_hit_above(&mut self, block: Handle) {
        self.on_hit(block);
    }
    /// A block left, as a victim or otherwise. Unknown blocks are ignored.
    fn on_remove(&mut self, block: Handle);
    /// A block that was named stays, because somebody holds it: it is named again after as many others as
    /// there are, or all. [`Leaf`] sees to it.
    fn defer(&mut self, _block: Handle) {}
    /// The caller's score of a block changed.
    fn set_importance(&mut self, _block: Handle, _score: f32) {}
    /// From now on the block is not named, or may be named again; its place in the order stays.
    fn hold(&mut self, block: Handle, held: bool);
    /// The block to leave next, of those for which `eligible` holds. It stays until
    /// [`Policy::on_remove`].
    fn victim(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle>;
    /// Appends up to `n` distinct victims, the first to leave first.
    fn victims(
        &mut self,
        n: usize,
        eligible: &mut dyn FnMut(Handle) -> bool,
        out: &mut Vec<Handle>,
    ) {
        let named = out.len();
        while out.len() < named + n {
            let Some(block) = search(self, eligible) else {
                break;
            };
            out.push(block);
            self.hold(block, true);
        }
        for &block in &out[named..] {
            self.hold(block, false);
        }
    }
    /// Blocks known.
    fn len(&self) -> usize;
    /// No block is known.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Bytes kept in memory.
    fn memory_bytes(&self) -> usize;
}

/// The next victim, looked for once more where there seems to be none: a search that set aside all that it
/// met is followed by one that asks all that is set aside.
fn search<P: Policy + ?Sized>(
    policy: &mut P,
    eligible: &mut dyn FnMut(Handle) -> bool,
) -> Option<Handle> {
    let named = policy.victim(eligible);
    if named.is_some() {
        return named;
    }
    policy.victim(eligible)
}

/// What every policy over one `queue` does alike; an expression counts what else it keeps.
macro_rules! forward_to_queue {
    ($($rest:expr)?) => {
        fn hold(&mut self, block: Handle, held: bool) {
            self.queue.hold(block, held);
        }

        fn len(&self) -> usize {
            self.queue.len()
        }

        fn memory_bytes(&self) -> usize {
            let rest: &[fn(&Self) -> usize] = &[$($rest)?];
            self.queue.memory_bytes() + rest.iter().map(|count| count(self)).sum::<usize>()
        }
    };
}
use forward_to_queue;

/// The policies that can be chosen by name.
pub const NAMES: [&str; 20] = [
    "auto",
    "importance",
    "fifo",
    "lru",
    "lfu",
    "clock",
    "sieve",
    "s3-fifo",
    "arc",
    "w-tinylfu",
    "gdsf",
    "fifo-leaf",
    "lru-leaf",
    "lfu-leaf",
    "clock-leaf",
    "sieve-leaf",
    "s3-fifo-leaf",
    "arc-leaf",
    "w-tinylfu-leaf",
    "gdsf-leaf",
];

/// These know chains themselves, and there is no other form of them.
const ALWAYS_IN_CHAINS: [&str; 2] = ["auto", IMPORTANCE];
const IMPORTANCE: &str = "importance";

/// Of `importance:SLOPE`, what each block before one adds to what it costs to compute it.
fn parameter(name: &str) -> Option<Result<f32>> {
    let slope = name.strip_prefix(IMPORTANCE)?.strip_prefix(':')?;
    let slope = slope.parse().ok();
    let slope = slope.filter(|slope: &f32| slope.is_finite() && *slope >= 0.0);
    Some(slope.ok_or_else(|| unknown(name)))
}

/// The policy of that name, for a tier of `pages` pages.
pub fn by_name(name: &str, pages: u64) -> Result<Box<dyn Policy>> {
    let mut policies = for_tiers(name, &[pages])?;
    policies.pop().ok_or_else(|| unknown(name))
}

/// The policies of that name for tiers above one another, which are of so many pages, the fastest first.
pub fn for_tiers(name: &str, pages: &[u64]) -> Result<Vec<Box<dyn Policy>>> {
    build(name, pages, false, u64::MAX, keeps_chains(name))
}

/// As [`for_tiers`], in chain order whether or not the name says so: what a store uses. What policies
/// know is kept in the first tier. `hbm`: the last is not below the others, it holds copies of what lies there.
pub fn in_chains(name: &str, pages: &[u64], hbm: bool) -> Result<Vec<Box<dyn Policy>>> {
    let memory = pages.first().copied().unwrap_or(0);
    build(name, pages, hbm, memory, true)
}

fn unknown(name: &str) -> Error {
    Error::new(
        Kind::Config,
        format!(
            "policy {name:?} was given; choose one of {}, or importance:SLOPE with a number of at least 0",
            NAMES.join(", ")
        ),
    )
}

fn build(
    name: &str,
    pages: &[u64],
    hbm: bool,
    memory: u64,
    leaf: bool,
) -> Result<Vec<Box<dyn Policy>>> {
    fn either<P: Policy + 'static>(policy: P, leaf: bool) -> Box<dyn Policy> {
        if leaf {
            Box::new(Leaf::new(policy))
        } else {
            Box::new(policy)
        }
    }
    let (plain, slope) = match parameter(name) {
        Some(slope) => (IMPORTANCE, slope?),
        None => (name, importance::SLOPE),
    };
    let base = match plain.strip_suffix("-leaf") {
        Some(base) if !ALWAYS_IN_CHAINS.contains(&base) => base,
        _ => plain,
    };
    let each = |make: &dyn Fn(u64) -> Box<dyn Policy>| pages.iter().map(|&n| make(n)).collect();
    Ok(match base {
        "fifo" => each(&|_| either(Fifo::default(), leaf)),
        "lru" => each(&|_| either(Lru::default(), leaf)),
        "lfu" => each(&|_| either(Lfu::default(), leaf)),
        "clock" => each(&|_| either(Clock::default(), leaf)),
        "sieve" => each(&|_| either(Sieve::default(), leaf)),
        "s3-fifo" => each(&|pages| either(S3Fifo::new(pages), leaf)),
        "arc" => each(&|_| either(Arc::default(), leaf)),
        "w-tinylfu" => each(&|pages| either(WTinyLfu::new(pages), leaf)),
        IMPORTANCE => each(&|_| either(Importance::new(slope), leaf)),
        "gdsf" => each(&|_| either(Gdsf::default(), leaf)),
        "auto" => {
            let policies = Auto::of_tiers(pages.len(), hbm, memory).into_iter();
            policies.map(|policy| either(policy, leaf)).collect()
        }
        _ => return Err(unknown(name)),
    })
}

/// Does the policy of that name let a block leave only after its children?
pub fn keeps_chains(name: &str) -> bool {
    name.ends_with("-leaf") || ALWAYS_IN_CHAINS.contains(&name) || parameter(name).is_some()
}

#[cfg(test)]
mod tests;
