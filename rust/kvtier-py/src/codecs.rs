//! The codecs by hand, and their speed.

use std::hint::black_box;
use std::time::Instant;

use kvtier_codec::float::{E4m3, E5m2, Fp8, from_bf16};
use kvtier_codec::form::{Dtype, Form};
use kvtier_codec::frame::{self, Bad, Codec, Header};
use kvtier_codec::simd::Level;
use kvtier_codec::{many, planes, zstd};
use kvtier_core::coding::Coding;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffers::View;
use crate::errors::raise;

/// Planes, tokens, heads, elements of a head: an array's shape.
type Dims = (u32, u32, u32, u32);

fn config<T>(py: Python<'_>, found: Result<T, String>) -> PyResult<T> {
    found.map_err(|why| raise(py, "ConfigError", why))
}

/// The dtype of that name; of any other, its bytes.
fn dtype(name: &str) -> Dtype {
    let known = Dtype::ALL.into_iter().find(|dtype| dtype.name() == name);
    known.unwrap_or(Dtype::Bytes)
}

fn form(py: Python<'_>, element: &str, dims: Dims) -> PyResult<Form> {
    let (planes, tokens, heads, dim) = dims;
    let form = Form {
        planes,
        tokens,
        heads,
        dim,
        dtype: dtype(element),
    };
    if form.is_valid() {
        return Ok(form);
    }
    let why = format!(
        "a segment of {dims:?} (planes, tokens, heads, elements a head) in {element} was given; it has 1 or 2 planes, and 1 byte to 256 MiB. Give another shape"
    );
    Err(raise(py, "InvalidBlockError", why))
}

fn bad(py: Python<'_>, why: Bad) -> PyErr {
    let text = format!("{why}. Give the whole bytes that encode returned");
    raise(py, "CorruptError", text)
}

/// How a namespace's blocks are coded.
pub fn coding(
    py: Python<'_>,
    codec: &str,
    element: &str,
    layers: &[(u32, u32, u32)],
) -> PyResult<Coding> {
    let codec: Codec = config(py, codec.parse())?;
    let forms = layers
        .iter()
        .map(|&(planes, heads, dim)| form(py, element, (planes, 1, heads, dim)))
        .collect::<PyResult<Vec<Form>>>()?;
    config(
        py,
        Coding::new(codec, forms).ok_or_else(|| "a layout without layers".into()),
    )
}

/// The name, number, and lossiness of each codec.
#[pyfunction]
pub fn codec_list() -> Vec<(String, u16, bool)> {
    Codec::all()
        .map(|codec| (codec.to_string(), codec.id(), codec.is_lossy()))
        .collect()
}

/// The instruction set that codecs use on this machine.
#[pyfunction]
pub fn codec_kernel() -> &'static str {
    Level::best().name()
}

/// The frames of equal arrays that lie one after another.
#[pyfunction]
pub fn codec_encode<'py>(
    py: Python<'py>,
    codec: &str,
    element: &str,
    dims: Dims,
    src: &Bound<'py, PyAny>,
    threads: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    let codec: Codec = config(py, codec.parse())?;
    let form = form(py, element, dims)?;
    let src = View::raw(src, false)?;
    if !src.len().is_multiple_of(form.raw_len()) {
        let why = format!(
            "{} bytes were given; segments of {} bytes are needed. Check shape and dtype",
            src.len(),
            form.raw_len()
        );
        return Err(raise(py, "InvalidBlockError", why));
    }
    let frames = py.detach(|| many::encode_all(codec, &form, src.bytes(), threads));
    Ok(PyBytes::new(py, &frames))
}

/// What each of some frames says of itself: first byte, bytes, method, zstd, dtype, shape.
#[pyfunction]
#[expect(clippy::type_complexity, reason = "one row of a table")]
pub fn codec_frames(
    py: Python<'_>,
    frames: &Bound<'_, PyAny>,
) -> PyResult<Vec<(usize, usize, String, bool, &'static str, Dims)>> {
    let frames = View::raw(frames, false)?;
    let found = many::headers(frames.bytes()).map_err(|why| bad(py, why))?;
    let row = |(at, header): (std::ops::Range<usize>, Header)| {
        let form = header.form;
        (
            at.start,
            at.len(),
            header.method.name().to_owned(),
            header.zstd,
            form.dtype.name(),
            (form.planes, form.tokens, form.heads, form.dim),
        )
    };
    Ok(found.into_iter().map(row).collect())
}

/// Decodes the frames `layers`, and of each the tokens, into `dst`, which is as long as they are.
#[pyfunction]
pub fn codec_decode(
    py: Python<'_>,
    frames: &Bound<'_, PyAny>,
    layers: (usize, usize),
    tokens: Option<(u32, u32)>,
    dst: &Bound<'_, PyAny>,
    threads: usize,
) -> PyResult<()> {
    let (frames, dst) = (View::raw(frames, false)?, View::raw(dst, true)?);
    let (to, room) = (dst.ptr() as usize, dst.len());
    let found = many::headers(frames.bytes()).map_err(|why| bad(py, why))?;
    let tokens = tokens.map(|(from, to)| from..to);
    let tokens = tokens.as_ref();
    let fits = |wanted: &&[_]| many::decoded_len(wanted, tokens) == Some(room);
    let Some(wanted) = found.get(layers.0..layers.1).filter(fits) else {
        let part = tokens.map_or("all tokens".into(), |t| {
            format!("tokens ({}, {})", t.start, t.end)
        });
        let why = format!(
            "layers {layers:?} and {part} of {} layers were asked for into {room} bytes; these are other ranges or another size than they have",
            found.len(),
        );
        return Err(raise(py, "InvalidBlockError", why));
    };
    if room == 0 {
        return Ok(());
    }
    py.detach(|| {
        // SAFETY: the view keeps the memory; that nobody else uses it is the caller's promise.
        let dst = unsafe { std::slice::from_raw_parts_mut(to as *mut u8, room) };
        many::decode_all(frames.bytes(), wanted, tokens, dst, threads)
    })
    .map_err(|why| bad(py, why))
}

/// Casts numbers to 8 bits, without a scale.
#[pyfunction]
pub fn codec_to_fp8<'py>(
    py: Python<'py>,
    kind: &str,
    element: &str,
    src: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyBytes>> {
    let src = View::raw(src, false)?;
    let e4m3 = kind == "fp8_e4m3";
    let cast = |x: f32| {
        if e4m3 {
            E4m3::encode(x)
        } else {
            E5m2::encode(x)
        }
    };
    let element = dtype(element);
    let bytes = py.detach(|| -> Vec<u8> {
        let src = src.bytes();
        let halves = src
            .as_chunks::<2>()
            .0
            .iter()
            .map(|&b| u16::from_le_bytes(b));
        match element {
            Dtype::Bf16 => halves.map(|h| cast(from_bf16(h))).collect(),
            Dtype::Fp16 => halves.map(|h| cast(any_f16(h))).collect(),
            _ => src
                .as_chunks::<4>()
                .0
                .iter()
                .map(|&b| cast(f32::from_le_bytes(b)))
                .collect(),
        }
    });
    Ok(PyBytes::new(py, &bytes))
}

/// A half of any kind.
fn any_f16(half: u16) -> f32 {
    match half & 0x7fff {
        0x7c00 if half >> 15 == 1 => f32::NEG_INFINITY,
        0x7c00 => f32::INFINITY,
        0x7c01.. => f32::NAN.copysign(if half >> 15 == 1 { -1.0 } else { 1.0 }),
        _ => kvtier_codec::float::from_f16(half),
    }
}

/// The numbers that 8 bits stand for, as single precision.
#[pyfunction]
pub fn codec_from_fp8<'py>(
    py: Python<'py>,
    kind: &str,
    src: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyBytes>> {
    let src = View::raw(src, false)?;
    let e4m3 = kind == "fp8_e4m3";
    let value = |&b: &u8| {
        if e4m3 {
            E4m3::decode(b)
        } else {
            E5m2::decode(b)
        }
    };
    let bytes: Vec<u8> = py.detach(|| {
        src.bytes()
            .iter()
            .flat_map(|b| value(b).to_le_bytes())
            .collect()
    });
    Ok(PyBytes::new(py, &bytes))
}

/// What a standard zstd frame holds, which must be `size` bytes.
#[pyfunction]
pub fn codec_unzstd<'py>(
    py: Python<'py>,
    frame: &Bound<'py, PyAny>,
    size: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    let frame = View::raw(frame, false)?;
    let mut out = vec![0; size];
    if py.detach(|| zstd::decompress(frame.bytes(), &mut out)) {
        return Ok(PyBytes::new(py, &out));
    }
    Err(raise(
        py,
        "CorruptError",
        format!("this is no zstd frame of {size} bytes"),
    ))
}

/// A codec's laps over arrays of one form, for measurements: on this thread, each array's frame in
/// a place of its own.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct CodecBench {
    codec: Option<Codec>,
    form: Form,
}

/// Two buffers that hold `count` pieces of these sizes.
fn pieces(py: Python<'_>, a: &View, a_size: usize, b: &View, b_size: usize) -> PyResult<usize> {
    let count = a.len() / a_size;
    if count > 0 && b.len() >= count * b_size {
        return Ok(count);
    }
    Err(raise(
        py,
        "InvalidBlockError",
        "a buffer is too small for the other".into(),
    ))
}

#[pymethods]
impl CodecBench {
    /// `codec` may be `planes`: byte planes alone.
    #[new]
    fn new(py: Python<'_>, codec: &str, element: &str, dims: Dims) -> PyResult<Self> {
        let codec = match codec {
            "planes" => None,
            name => Some(config(py, name.parse())?),
        };
        Ok(CodecBench {
            codec,
            form: form(py, element, dims)?,
        })
    }

    /// Bytes between two frames in the coded buffer.
    #[getter]
    fn room(&self) -> usize {
        frame::bound(&self.form).next_multiple_of(64)
    }

    /// Codes all of `src`. Returns the seconds, and the bytes of each frame.
    fn encode(
        &self,
        py: Python<'_>,
        src: &Bound<'_, PyAny>,
        coded: &Bound<'_, PyAny>,
    ) -> PyResult<(f64, Vec<usize>)> {
        let (src, coded) = (View::raw(src, false)?, View::raw(coded, true)?);
        let (raw, room) = (self.form.raw_len(), self.room());
        let count = pieces(py, &src, raw, &coded, room)?;
        let to = coded.ptr() as usize;
        Ok(py.detach(|| {
            // SAFETY: the view keeps the memory, and the caller has no other use for it meanwhile.
            let out = unsafe { std::slice::from_raw_parts_mut(to as *mut u8, count * room) };
            let mut sizes = Vec::with_capacity(count);
            let begun = Instant::now();
            for (array, out) in src
                .bytes()
                .chunks_exact(raw)
                .zip(out.chunks_exact_mut(room))
            {
                sizes.push(match self.codec {
                    Some(codec) => frame::encode(codec, &self.form, array, out).0,
                    None => {
                        planes::split(self.form.dtype.size(), array, &mut out[..raw]);
                        raw
                    }
                });
            }
            (begun.elapsed().as_secs_f64(), sizes)
        }))
    }

    /// Decodes the frames that [`CodecBench::encode`] made. Returns the seconds.
    fn decode(
        &self,
        py: Python<'_>,
        coded: &Bound<'_, PyAny>,
        sizes: Vec<usize>,
        dst: &Bound<'_, PyAny>,
    ) -> PyResult<f64> {
        let (coded, dst) = (View::raw(coded, false)?, View::raw(dst, true)?);
        let (raw, room) = (self.form.raw_len(), self.room());
        let count = pieces(py, &dst, raw, &coded, room)?;
        let to = dst.ptr() as usize;
        let done = py.detach(|| {
            // SAFETY: as above.
            let out = unsafe { std::slice::from_raw_parts_mut(to as *mut u8, count * raw) };
            let begun = Instant::now();
            let frames = coded.bytes().chunks_exact(room).zip(&sizes);
            for ((frame, &size), out) in frames.zip(out.chunks_exact_mut(raw)) {
                match self.codec {
                    Some(_) => frame::decode(&frame[..size.min(room)], &self.form, out)?,
                    None => planes::merge(
                        self.form.dtype.size(),
                        &frame[..raw],
                        raw / self.form.dtype.size(),
                        out,
                    ),
                }
            }
            Ok(begun.elapsed().as_secs_f64())
        });
        done.map_err(|why| bad(py, why))
    }

    /// What the zstd library alone takes for the planes that this codec gives it: the seconds of
    /// compressing all of `src`, split before the clock starts, and of decompressing it.
    fn library(&self, py: Python<'_>, src: &Bound<'_, PyAny>) -> PyResult<(f64, f64)> {
        let src = View::raw(src, false)?;
        let form = self.form;
        let (raw, size, plane) = (form.raw_len(), form.dtype.size(), form.plane_len());
        Ok(py.detach(|| {
            let mut split = vec![0; src.len()];
            for (from, to) in src
                .bytes()
                .chunks_exact(plane)
                .zip(split.chunks_exact_mut(plane))
            {
                planes::split(size, from, to);
            }
            let lens = vec![plane / size; form.planes as usize * size];
            let mut coded = vec![1; split.len()];
            let mut sizes = Vec::with_capacity(split.len() / raw);
            let begun = Instant::now();
            for (from, to) in split.chunks_exact(raw).zip(coded.chunks_exact_mut(raw)) {
                sizes.push(zstd::compress(zstd::Kind::Numbers, from, &lens, to));
            }
            let encode = begun.elapsed().as_secs_f64();
            let begun = Instant::now();
            for ((from, to), n) in coded
                .chunks_exact(raw)
                .zip(split.chunks_exact_mut(raw))
                .zip(&sizes)
            {
                if let Some(n) = n {
                    black_box(zstd::decompress(&from[..*n], to));
                }
            }
            (encode, begun.elapsed().as_secs_f64())
        }))
    }
}
