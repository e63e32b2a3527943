//! Tests that reach inside: every order of failures that a device can have.

#[path = "../../tests/common/mod.rs"]
pub mod common;
mod crash;
mod model;
