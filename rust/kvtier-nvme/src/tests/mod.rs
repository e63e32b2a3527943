//! Tests that reach inside: every order of failures that a device can have.

#[path = "../../tests/common/mod.rs"]
pub mod common;
mod crash;
mod faults;
mod fuzz;
mod hung;
mod model;
mod paths;

/// A small generator of repeatable numbers.
pub struct Random(pub u64);

impl Random {
    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// How many rounds of a kind to go: `KVTIER_ROUNDS` times as many as by default.
pub fn rounds(default: u64) -> u64 {
    let more = std::env::var("KVTIER_ROUNDS").ok();
    default * more.and_then(|n| n.parse().ok()).unwrap_or(1)
}
