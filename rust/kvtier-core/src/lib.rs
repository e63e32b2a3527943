//! The core of kvtier: the index, the memory tiers and the movement of blocks between tiers.
//!
//! It knows nothing of Python and nothing of CUDA. [`store::Store`] is the whole of it to a user;
//! its verbs live in [`put`], [`read`] and [`jobs`].

mod account;
mod admission;
mod adopt;
mod ages;
mod ahead;
pub mod arena;
mod budget;
mod claim;
pub mod coding;
mod cold;
pub mod config;
mod direct;
pub mod error;
mod flight;
pub mod fork;
mod frames;
pub mod hbm;
pub mod index;
pub mod jobs;
pub mod key;
pub mod layout;
pub mod lease;
pub mod load;
mod metadata;
mod mover;
pub mod order;
mod pacer;
mod parts;
pub mod pin;
pub mod policy;
pub mod put;
pub mod read;
pub mod reader;
mod region;
mod report;
pub mod shares;
mod space;
mod spent;
pub mod stats;
pub mod store;
mod transfers;
pub mod workers;
mod write;

pub use kvtier_nvme::sync;

pub use kvtier_codec::checksum::kernel as copy_kernel;
pub use kvtier_codec::image::PAGE;
