//! The NVMe tier: one preallocated file or block device per path.

pub mod bare;
mod buf;
mod check;
mod checkpoint;
mod clock;
mod commit;
pub mod device;
pub mod engine;
mod error;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzzing;
mod health;
mod journal;
mod open;
mod place;
mod record;
mod recover;
mod runs;
pub mod slots;
mod state;
mod superblock;
pub mod sync;
mod tier;
mod units;
mod volume;

pub use buf::{IoBuf, Pages};
pub use check::{CheckReport, Inspection, Probe, check, check_all, inspect, probe};
pub use clock::{Clock, SystemClock};
pub use device::Device;
pub use engine::EngineKind;
pub use error::{Error, ErrorKind};
pub use health::{Health, STALL};
pub use tier::{
    Done, NvmeTier, Options, Read, Recovered, Registration, Slot, SlotHold, Stats, Write,
};
pub use units::Bytes;

#[cfg(test)]
extern crate self as kvtier_nvme; // the common helpers of the tests are written from outside

#[cfg(test)]
mod tests;
