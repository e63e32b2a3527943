//! The bytes of a block: how they are copied, checksummed, coded and laid out in a slot.
//!
//! Nothing here knows of tiers, files or Python. [`checksum`] moves bytes and hashes them in the
//! same pass; [`image`] says what a slot holds and how a reader proves that it is what was put;
//! [`frame`] makes segments smaller and brings them back.

pub mod checksum;
pub mod float;
pub mod form;
pub mod frame;
pub mod image;
pub mod many;
pub mod planes;
mod quant;
pub mod simd;
pub mod zstd;
