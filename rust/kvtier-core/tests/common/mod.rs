//! Helpers of the store's tests.
#![allow(dead_code, reason = "each test binary uses some of them")]

use std::time::{Duration, Instant};

use kvtier_core::config::{Config, Memory};
use kvtier_core::error::Result;
use kvtier_core::layout::{Layer, Layout, Selection};
use kvtier_core::load::Miss;
use kvtier_core::put::{Block, Put};
use kvtier_core::read::Out;
use kvtier_core::store::{Namespace, Store};

/// A deadline that a working store never reaches.
pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// A store with one DRAM tier.
pub fn dram(size: u64) -> Store {
    Store::open(Config::new(vec![Memory::dram(size)], None)).unwrap()
}

/// A namespace of `layers` layers, 384 bytes a token and plane.
pub fn gqa(layers: usize, block_tokens: u32) -> Namespace {
    let layer = Layer {
        planes: 2,
        token_bytes: 384,
    };
    Namespace::new(
        b"gqa",
        Layout::new(vec![layer; layers], block_tokens).unwrap(),
    )
}

/// A namespace of opaque blocks.
pub fn opaque(identity: &[u8]) -> Namespace {
    Namespace::new(identity, Layout::opaque())
}

/// Key number `n`.
pub fn key(n: u64) -> [u8; 32] {
    std::array::from_fn(|i| if i < 8 { n.to_le_bytes()[i] } else { 0xA5 })
}

/// `len` bytes that depend on `seed` and on their place.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

pub fn try_put_by(
    store: &Store,
    ns: &Namespace,
    key: &[u8],
    data: &[u8],
    parent: Option<&[u8]>,
    deadline: Instant,
) -> Result<Put> {
    let block = Block {
        key,
        data,
        parent,
        replaces: None,
        importance: 0.0,
    };
    store.put(ns, &block, deadline)
}

pub fn try_put(
    store: &Store,
    ns: &Namespace,
    key: &[u8],
    data: &[u8],
    parent: Option<&[u8]>,
) -> Result<Put> {
    try_put_by(store, ns, key, data, parent, soon())
}

pub fn put(store: &Store, ns: &Namespace, key: &[u8], data: &[u8], parent: Option<&[u8]>) -> Put {
    try_put(store, ns, key, data, parent).unwrap()
}

pub fn try_get(
    store: &Store,
    ns: &Namespace,
    key: &[u8],
    len: usize,
    selection: &Selection,
) -> Result<std::result::Result<(Vec<u8>, &'static str), Miss>> {
    let mut out = vec![0u8; len];
    let outs = [Out {
        ptr: out.as_mut_ptr(),
        len,
    }];
    // SAFETY: `out` has `len` bytes and lives through the call.
    let got = unsafe { store.get_into(ns, &[key], &outs, selection, soon()) }?[0];
    Ok(got.map(|tier| (out, tier)))
}

pub fn get_part(
    store: &Store,
    ns: &Namespace,
    key: &[u8],
    len: usize,
    selection: &Selection,
) -> std::result::Result<Vec<u8>, Miss> {
    try_get(store, ns, key, len, selection)
        .unwrap()
        .map(|(bytes, _)| bytes)
}

pub fn get(
    store: &Store,
    ns: &Namespace,
    key: &[u8],
    len: usize,
) -> std::result::Result<Vec<u8>, Miss> {
    get_part(store, ns, key, len, &Selection::default())
}
