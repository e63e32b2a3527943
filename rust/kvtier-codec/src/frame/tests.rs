//! Frames against a plain reference, on every instruction set, and against damage.

use proptest::prelude::*;

use super::fuzzing::{decodes, resealed};
use super::*;
use crate::float::{E4m3, E5m2, Fp8, from_bf16, from_f16, to_bf16, to_f16};

fn codecs() -> impl Strategy<Value = Codec> {
    prop::sample::select(Codec::all().collect::<Vec<_>>())
}

fn forms() -> impl Strategy<Value = Form> {
    let dtypes = prop::sample::select(vec![Dtype::Bf16, Dtype::Fp16, Dtype::Fp32]);
    (1u32..=2, 1u32..40, 1u32..4, 1u32..140, dtypes).prop_map(
        |(planes, tokens, heads, dim, dtype)| Form {
            planes,
            tokens,
            heads,
            dim,
            dtype,
        },
    )
}

/// Numbers of many kinds: spread over some magnitude, with outlier channels and equal ones.
fn numbers(form: &Form, seed: u64, magnitude: f32) -> Vec<f32> {
    let mut state = seed;
    let mut next = move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let row = form.row();
    (0..form.planes as usize * form.tokens as usize * row)
        .map(|i| match i % row % 13 {
            3 => 40.0 * magnitude + next() * magnitude,
            5 => magnitude,
            7 => 0.0,
            9 => -(next() + 0.5) * magnitude,
            _ => next() * magnitude,
        })
        .collect()
}

fn to_bytes(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let mut out = Vec::new();
    for &x in values {
        match dtype {
            Dtype::Bf16 => out.extend(to_bf16(x).to_le_bytes()),
            Dtype::Fp16 => out.extend(to_f16(x).to_le_bytes()),
            _ => out.extend(x.to_le_bytes()),
        }
    }
    out
}

fn to_values(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        Dtype::Fp32 => bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect(),
        _ => bytes
            .chunks_exact(2)
            .map(|b| u16::from_le_bytes([b[0], b[1]]))
            .map(|b| {
                if dtype == Dtype::Bf16 {
                    from_bf16(b)
                } else {
                    from_f16(b)
                }
            })
            .collect(),
    }
}

/// The least half, of those whose last `drop` bits are zero, that is not below `x`: by search.
fn half_above(x: f32, drop: u16) -> f32 {
    let step = 1u16 << drop;
    let (mut low, mut high) = (1u16, 0x7c00 >> drop);
    while low < high {
        let middle = low.midpoint(high);
        if from_f16(middle * step) >= x {
            high = middle
        } else {
            low = middle + 1
        }
    }
    from_f16(low * step)
}

/// The greatest half that is not above `x`: by search.
fn half_below(x: f32) -> f32 {
    let near = to_f16(x);
    let all = [near.wrapping_sub(1), near, near.wrapping_add(1)];
    let below = all
        .iter()
        .filter(|&&h| h & 0x7c00 != 0x7c00)
        .map(|&h| from_f16(h));
    below.filter(|&h| h <= x).fold(f32::MIN, f32::max)
}

/// What numbers that share a word become: x ≈ scale · (n − zero), step by step.
fn affine(values: &mut [f32], n: f32) {
    let low = values.iter().copied().fold(0.0, f32::min);
    let high = values.iter().copied().fold(0.0, f32::max);
    let step = (n + 1.0) / 64.0;
    let ideal = if high > low {
        -low * n / (high - low)
    } else {
        0.0
    };
    let mut code = if ideal <= n / 2.0 {
        (ideal / step).ceil()
    } else {
        (ideal / step).floor()
    };
    if high > 0.0 {
        code = code.min(if n == 255.0 { 63.0 } else { 59.0 });
    }
    let zero = code * step;
    let mut scale: f32 = 0.0;
    if high > 0.0 {
        scale = high / (n - zero);
    }
    if low < 0.0 && code > 0.0 {
        scale = scale.max(-low / zero);
    }
    let scale = half_above(scale, 5);
    for x in values {
        let number = (*x * (1.0 / scale) + zero).round_ties_even();
        assert!((0.0..=n).contains(&number));
        *x = scale * (number - zero);
    }
}

fn channel(values: &mut [f32], n: f32) {
    let least = half_below(values.iter().copied().fold(f32::MAX, f32::min));
    let high = values.iter().copied().fold(f32::MIN, f32::max);
    let scale = half_above((high - least) / n, 0);
    for x in values {
        let number = ((*x - least) * (1.0 / scale)).round_ties_even();
        assert!((0.0..=n).contains(&number));
        *x = number * scale + least;
    }
}

fn scaled<F: Fp8>(values: &mut [f32]) {
    let scale = half_above(
        values.iter().fold(0.0, |m: f32, x| m.max(x.abs())) / F::MAX,
        0,
    );
    for x in values {
        *x = F::decode(F::encode(*x * (1.0 / scale))) * scale;
    }
}

/// What a lossy codec makes of an array, element by element.
fn reference(method: Method, form: &Form, bytes: &[u8]) -> Vec<u8> {
    let mut values = to_values(form.dtype, bytes);
    let (tokens, row, dim) = (form.tokens as usize, form.row(), form.dim as usize);
    for (p, plane) in values.chunks_exact_mut(tokens * row).enumerate() {
        let keys = form.planes == 2 && p == 0;
        let by_channel = match method {
            Method::Int8 if keys => Some((16, 255.0)),
            Method::Int4 if keys => Some((32, 15.0)),
            _ => None,
        };
        if let Some((group, n)) = by_channel {
            for tokens in plane.chunks_mut(group * row) {
                for c in 0..row {
                    let mut column: Vec<f32> =
                        tokens.iter().skip(c).step_by(row).copied().collect();
                    channel(&mut column, n);
                    for (x, y) in tokens.iter_mut().skip(c).step_by(row).zip(column) {
                        *x = y;
                    }
                }
            }
            continue;
        }
        for head in plane.chunks_exact_mut(dim) {
            match method {
                Method::Int8 | Method::Int8Token => affine(head, 255.0),
                Method::Int4 => head.chunks_mut(32).for_each(|part| affine(part, 15.0)),
                Method::Fp8E4m3 => scaled::<E4m3>(head),
                Method::Fp8E5m2 => scaled::<E5m2>(head),
                Method::Plain | Method::Planes => {}
            }
        }
    }
    to_bytes(form.dtype, &values)
}

fn encoded(level: Level, codec: Codec, form: &Form, src: &[u8]) -> (Vec<u8>, Method) {
    let mut frame = vec![0; bound(form)];
    let (len, method) = encode_at(level, codec, form, src, &mut frame);
    frame.truncate(len);
    (frame, method)
}

fn check(codec: Codec, form: &Form, src: &[u8], from: u32, to: u32) {
    let (frame, method) = encoded(Level::BASELINE, codec, form, src);
    let want = reference(method, form, src);
    assert!(method == codec.method || !method.is_lossy());
    for level in Level::all() {
        let (same, _) = encoded(level, codec, form, src);
        assert!(same == frame, "{codec} {level:?} {form:?}: another frame");
        let mut back = vec![0; src.len()];
        decode_at(level, &frame, form, 0..form.tokens, &mut back).unwrap();
        assert!(
            back == want,
            "{codec} {level:?} {form:?}: not the reference"
        );
        let part = form.with_tokens(to - from);
        let mut some = vec![0; part.raw_len()];
        decode_at(level, &frame, form, from..to, &mut some).unwrap();
        let token = form.row() * form.dtype.size();
        let want: Vec<u8> = back
            .chunks_exact(form.plane_len())
            .flat_map(|plane| plane[from as usize * token..to as usize * token].to_vec())
            .collect();
        assert!(some == want, "{codec} {level:?} {form:?}: other tokens");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_codec_is_its_reference_on_every_instruction_set(
        codec in codecs(), form in forms(), seed in any::<u64>(), power in -30i32..20,
        from in any::<prop::sample::Index>(), to in any::<prop::sample::Index>(),
    ) {
        let src = to_bytes(form.dtype, &numbers(&form, seed, 2f32.powi(power)));
        let (a, b) = (from.index(form.tokens as usize + 1), to.index(form.tokens as usize + 1));
        check(codec, &form, &src, a.min(b) as u32, a.max(b) as u32);
    }

    #[test]
    fn bits_of_any_kind_come_back_or_near(codec in codecs(), form in forms(), seed in any::<u64>()) {
        let mut state = seed;
        let src: Vec<u8> = (0..form.raw_len()).map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        }).collect();
        let (frame, method) = encoded(Level::best(), codec, &form, &src);
        let mut back = vec![0; src.len()];
        decode(&frame, &form, &mut back).unwrap();
        let finite = |bytes: &[u8]| to_values(form.dtype, bytes).iter().all(|x| x.is_finite());
        prop_assert!(back == src || (method.is_lossy() && finite(&back)));
    }

    #[test]
    fn any_body_becomes_the_same_on_every_instruction_set(
        codec in codecs(), form in forms(), seed in any::<u64>(),
    ) {
        let src = to_bytes(form.dtype, &numbers(&form, seed, 1.0));
        let (mut frame, _) = encoded(Level::BASELINE, codec, &form, &src);
        let mut state = seed;
        for byte in &mut frame[HEADER..] {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (state >> 56) as u8;
        }
        let frame = resealed(frame);
        let mut want = vec![0; src.len()];
        let result = decode_at(Level::BASELINE, &frame, &form, 0..form.tokens, &mut want);
        for level in Level::all() {
            let mut back = vec![0; src.len()];
            prop_assert_eq!(decode_at(level, &frame, &form, 0..form.tokens, &mut back), result);
            prop_assert!(back == want || result.is_err(), "{} {:?} {:?}", codec, level, form);
        }
    }

    #[test]
    fn every_altered_or_truncated_frame_is_an_error(
        codec in codecs(), form in forms(), seed in any::<u64>(),
        at in any::<prop::sample::Index>(), bit in 0u8..8, cut in any::<prop::sample::Index>(),
    ) {
        let src = to_bytes(form.dtype, &numbers(&form, seed, 1.0));
        let (mut frame, _) = encoded(Level::best(), codec, &form, &src);
        let mut back = vec![0; src.len()];
        prop_assert!(decode(&frame[..cut.index(frame.len())], &form, &mut back).is_err());
        frame.push(0);
        prop_assert!(decode(&frame, &form, &mut back).is_err());
        frame.pop();
        let at = at.index(frame.len());
        frame[at] ^= 1 << bit;
        prop_assert!(decode(&frame, &form, &mut back).is_err());
    }
}

const FORM: Form = Form {
    planes: 2,
    tokens: 16,
    heads: 3,
    dim: 64,
    dtype: Dtype::Bf16,
};

#[test]
fn the_size_of_each_codec_without_zstd_is_as_documented() {
    let src = to_bytes(Dtype::Bf16, &numbers(&FORM, 1, 1.0));
    let raw = src.len();
    for (name, size) in [
        ("int8", 16 * 192 + 4 * 192 + 16 * 192 + 2 * 48),
        ("int8_token", 2 * (16 * 192 + 2 * 48)),
        ("fp8_e4m3", 2 * (16 * 192 + 2 * 48)),
        ("fp8_e5m2", 2 * (16 * 192 + 2 * 48)),
        ("int4", 16 * 96 + 4 * 192 + 16 * 96 + 2 * 96),
    ] {
        let (frame, _) = encoded(Level::best(), name.parse().unwrap(), &FORM, &src);
        assert_eq!(frame.len(), HEADER + size, "{name}");
        assert!(frame.len() < raw);
    }
}

#[test]
fn what_is_not_finite_or_too_large_is_kept_as_it_is() {
    for dtype in [Dtype::Bf16, Dtype::Fp16, Dtype::Fp32] {
        let form = Form { dtype, ..FORM };
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38] {
            for at in [0, 200, 16 * 192 + 7, 2 * 16 * 192 - 1] {
                let mut src = to_bytes(dtype, &numbers(&form, 1, 1.0));
                let size = dtype.size();
                match dtype {
                    Dtype::Fp16 if bad.is_nan() => {
                        src[at * size..][..2].copy_from_slice(&[1, 0x7e])
                    }
                    Dtype::Fp16 => src[at * size..][..2].copy_from_slice(&[0, 0xfc]),
                    _ => src[at * size..][..size].copy_from_slice(&to_bytes(dtype, &[bad])),
                }
                for codec in Codec::all() {
                    let (frame, method) = encoded(Level::best(), codec, &form, &src);
                    assert!(!method.is_lossy(), "{codec} {bad} {dtype:?}");
                    let mut back = vec![0; src.len()];
                    decode(&frame, &form, &mut back).unwrap();
                    assert!(back == src, "{codec} {bad} {dtype:?}");
                }
            }
        }
    }
}

#[test]
fn plain_bytes_are_never_made_lossy() {
    let form = Form::bytes(5000);
    let src: Vec<u8> = (0..5000u32).map(|i| (i / 100) as u8).collect();
    for codec in Codec::all() {
        let (frame, method) = encoded(Level::best(), codec, &form, &src);
        assert!(!method.is_lossy());
        let mut back = vec![0; src.len()];
        decode(&frame, &form, &mut back).unwrap();
        assert_eq!(back, src);
    }
}

#[test]
fn a_frame_of_another_array_or_version_is_refused() {
    let src = to_bytes(Dtype::Bf16, &numbers(&FORM, 1, 1.0));
    let (mut frame, _) = encoded(Level::best(), Codec::ZSTD, &FORM, &src);
    let mut back = vec![0; src.len()];
    let other = Form {
        heads: 1,
        dim: 192,
        ..FORM
    };
    assert_eq!(decode(&frame, &other, &mut back), Err(Bad::Form));
    frame[4] = 2;
    assert_eq!(decode(&frame, &FORM, &mut back), Err(Bad::Version));
}

#[test]
fn a_forged_frame_is_an_error_or_some_numbers() {
    let src = to_bytes(Dtype::Bf16, &numbers(&FORM, 1, 1.0));
    let mut back = vec![0; src.len()];
    for codec in Codec::all() {
        let (frame, _) = encoded(Level::best(), codec, &FORM, &src);
        for at in (0..HEADER - 8).chain((HEADER..frame.len()).step_by(97)) {
            for value in [0, 1, 0x7f, 0xff] {
                let mut forged = frame.clone();
                forged[at] = value;
                let _ = decode(&resealed(forged), &FORM, &mut back);
            }
        }
        let mut short = frame.clone();
        short.truncate(frame.len() - 5);
        let body = (short.len() - HEADER) as u32;
        short[20..24].copy_from_slice(&body.to_le_bytes());
        assert!(
            decode(&resealed(short), &FORM, &mut back).is_err(),
            "{codec}"
        );
    }
}

#[test]
fn rubbish_is_an_error_or_some_numbers() {
    let mut state = 1u64;
    for len in (0..400).chain([4000, 9000]) {
        let mut data: Vec<u8> = (0..len)
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        decodes(&data);
        if len >= HEADER {
            data[..5].copy_from_slice(b"KVCF\x01");
            for method in 0..8 {
                let body = ((len - HEADER) as u32).to_le_bytes();
                data[5..8].copy_from_slice(&[method, (len % 2) as u8, 0x11]);
                data[20..24].copy_from_slice(&body);
                for (at, n) in [(8, 2u32), (12, 3), (16, len as u32)] {
                    data[at..at + 4].copy_from_slice(&n.to_le_bytes());
                }
                decodes(&data);
            }
        }
    }
}

#[test]
fn names_and_numbers_are_one_to_one() {
    let all: Vec<Codec> = Codec::all().collect();
    assert_eq!(all.len(), 11);
    for codec in all {
        assert_eq!(codec.to_string().parse(), Ok(codec));
        assert_eq!(Codec::from_id(codec.id()), Some(codec));
        assert_ne!(codec.id(), 0);
    }
    assert_eq!(Codec::from_id(0), None);
    assert!("gzip".parse::<Codec>().is_err());
}
