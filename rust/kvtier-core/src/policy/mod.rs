//! Eviction policies: they see handles and metadata, never bytes.
//!
//! A policy orders the blocks of one tier. It is told of insertions, hits and removals, and names
//! victims; it never acts. The store and the trace replayer drive the same code.

mod leaf;
mod list;
mod lru;
mod lru_leaf;
mod s3fifo;

pub use leaf::Leaf;
pub use lru::Lru;
pub use lru_leaf::LruLeaf;
pub use s3fifo::S3Fifo;

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
pub trait Policy: Send {
    /// A block arrived. It was not there before.
    fn on_insert(&mut self, block: Handle, meta: &Meta);
    /// A block was used.
    fn on_hit(&mut self, block: Handle);
    /// A block left, as a victim or otherwise. Unknown blocks are ignored.
    fn on_remove(&mut self, block: Handle);
    /// The caller's score of a block changed.
    fn set_importance(&mut self, block: Handle, score: f32);
    /// Appends up to `n` distinct blocks for which `eligible` holds, the first to leave first. They
    /// stay until [`Policy::on_remove`].
    fn victims(
        &mut self,
        n: usize,
        eligible: &mut dyn FnMut(Handle) -> bool,
        out: &mut Vec<Handle>,
    );
    /// Blocks known.
    fn len(&self) -> usize;
    /// No block is known.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Bytes kept in memory.
    fn memory_bytes(&self) -> usize;
}

/// The policies that can be chosen by name.
pub const NAMES: [&str; 4] = ["lru-leaf", "s3-fifo-leaf", "lru", "s3-fifo"];

/// The policy of that name, for a tier of `pages` pages.
pub fn by_name(name: &str, pages: u64) -> Result<Box<dyn Policy>> {
    Ok(match name {
        "lru" => Box::new(Lru::default()),
        "s3-fifo" => Box::new(S3Fifo::new(pages)),
        "lru-leaf" => Box::new(LruLeaf::default()),
        "s3-fifo-leaf" => Box::new(Leaf::new(S3Fifo::new(pages))),
        _ => {
            return Err(Error::new(
                Kind::Config,
                format!(
                    "policy {name:?} was given; choose one of {}",
                    NAMES.join(", ")
                ),
            ));
        }
    })
}

#[cfg(test)]
mod tests;
