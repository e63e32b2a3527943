//! Replays traces of requests against the store's own policies, without bytes.

mod offline;
mod replay;
mod tiers;
mod trace;

pub use offline::min;
pub use replay::{Outcome, Touch, replay};
pub use trace::Trace;
