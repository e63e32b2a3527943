//! The bytes of a block: how they are copied, checksummed and laid out in a slot.
//!
//! Nothing here knows of tiers, files or Python. [`checksum`] moves bytes and hashes them in the
//! same pass; [`image`] says what a slot holds and how a reader proves that it is what was put.

pub mod checksum;
pub mod image;
