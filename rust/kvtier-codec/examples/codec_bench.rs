//! How fast each codec is beside `memcpy`, on one thread: blocks of 16 tokens, cold memory.
//!
//! `cargo run --release -p kvtier-codec --example codec_bench [MiB] [dtype] [codec]`: those whose names hold
//! these. The median of five laps.

use std::time::Instant;

use kvtier_codec::form::{Dtype, Form};
use kvtier_codec::frame::{self, Codec};
use kvtier_codec::simd::Level;

fn main() {
    let mib: usize = std::env::args()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .unwrap_or(128);
    let named = |i: usize, name: &str| std::env::args().nth(i).is_none_or(|n| name.contains(&n));
    for (dtype, heads, dim) in [
        (Dtype::Bf16, 3, 64),
        (Dtype::Bf16, 8, 128),
        (Dtype::Fp16, 8, 128),
        (Dtype::Fp32, 8, 128),
    ] {
        if !named(2, dtype.name()) {
            continue;
        }
        let form = Form {
            planes: 2,
            tokens: 16,
            heads,
            dim,
            dtype,
        };
        let len = form.raw_len();
        let count = (mib << 20) / len;
        let src = sample(dtype, len * count);
        let mut back = vec![1u8; src.len()];
        let room = frame::bound(&form).next_multiple_of(64);
        let mut coded = vec![1u8; room * count];
        let rate = |lap: &mut dyn FnMut()| {
            let mut laps: Vec<f64> = (0..5)
                .map(|_| {
                    let begun = Instant::now();
                    lap();
                    src.len() as f64 / begun.elapsed().as_secs_f64() / 1e9
                })
                .collect();
            laps.sort_by(f64::total_cmp);
            laps[2]
        };
        let copy = rate(&mut || {
            for (d, s) in back.chunks_exact_mut(len).zip(src.chunks_exact(len)) {
                d.copy_from_slice(s);
            }
        });
        println!("{dtype:?} {heads}x{dim}, segments of {len}: memcpy {copy:.1} GB/s");
        for codec in Codec::all() {
            for level in Level::all() {
                if !named(3, &codec.to_string()) {
                    continue;
                }
                if level != Level::best()
                    && codec != Codec::ZSTD
                    && codec.to_string().contains("zstd")
                {
                    continue;
                }
                let mut sizes = vec![0; count];
                let encode = rate(&mut || {
                    let to = coded.chunks_exact_mut(room).zip(&mut sizes);
                    for ((d, n), s) in to.zip(src.chunks_exact(len)) {
                        *n = frame::encode_at(level, codec, &form, s, d).0;
                    }
                });
                let decode = rate(&mut || {
                    let from = coded.chunks_exact(room).zip(&sizes);
                    for (d, (s, &n)) in back.chunks_exact_mut(len).zip(from) {
                        frame::decode_at(level, &s[..n], &form, 0..form.tokens, d)
                            .expect("a good frame");
                    }
                });
                let bytes: usize = sizes.iter().sum();
                println!(
                    "  {:18} {:7} encode {encode:5.1} ({:.2}) decode {decode:5.1} ({:.2})  saved {:.1} %",
                    codec.to_string(),
                    level.name(),
                    encode / copy,
                    decode / copy,
                    100.0 * (1.0 - bytes as f64 / src.len() as f64),
                );
            }
        }
    }
}

/// Numbers that look somewhat like keys and values.
fn sample(dtype: Dtype, len: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        ((state >> 40) as f32 / (1 << 24) as f32 - 0.5) * 2.0
    };
    let mut out = Vec::with_capacity(len);
    while out.len() < len {
        let x = next() + next() + next();
        match dtype {
            Dtype::Bf16 => out.extend(kvtier_codec::float::to_bf16(x).to_le_bytes()),
            Dtype::Fp16 => out.extend(kvtier_codec::float::to_f16(x).to_le_bytes()),
            _ => out.extend(x.to_le_bytes()),
        }
    }
    out
}
