//! A namespace as Python hands it to every verb: digest, layout, and what arrays must look like.

use kvtier_core::key;
use kvtier_core::layout::{Layer, Layout, Selection, Tokens};
use kvtier_core::store::Namespace;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffers::View;
use crate::errors::{from_core, raise};

/// A namespace's digest and layout.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct Space {
    pub(crate) ns: Namespace,
    dtype: String,
    itemsize: usize,
    shape: Option<Vec<usize>>,
    token_axis: usize,
}

impl Space {
    /// The layout's dtype; `None` for opaque blocks, which may be of any.
    pub fn dtype(&self) -> Option<&str> {
        (!self.ns.layout.is_opaque()).then_some(&self.dtype)
    }

    /// The shape of a full block, if its blocks have one.
    pub fn python_shape(&self) -> Option<Vec<usize>> {
        self.shape.clone()
    }

    /// Which axis of it counts tokens.
    pub fn token_axis(&self) -> usize {
        self.token_axis
    }

    /// Bytes, the layout's own dtype, and bit patterns of its size are taken; others are not. An
    /// opaque block is of any dtype whose bytes mean something by themselves.
    pub fn accepts_format(&self, format: &str, itemsize: usize) -> bool {
        if self.dtype().is_none() {
            // Without the names of fields, which stand between colons; a "Z" alone is a pointer.
            let mut types = format.split(':').step_by(2);
            return format != "Z" && !types.any(|t| t.contains(['O', 'P', 'X', 'z', '&']));
        }
        let format = format.trim_start_matches(['@', '=', '<']);
        let own = match self.dtype.as_str() {
            "fp32" => "f",
            "fp16" => "e",
            "int8" => "b",
            _ => "B",
        };
        match format {
            "B" | "b" | "c" => true,
            "H" => self.itemsize == 2,
            "I" | "L" => self.itemsize == itemsize && self.itemsize == 4,
            other => other == own,
        }
    }

    /// An array with the layout's number of axes must have its shape, with any number of tokens;
    /// arrays with other numbers of axes are taken as bytes. An array of bytes, viewed from one of
    /// larger elements, is as much longer in its last axis.
    pub fn accepts_shape(&self, given: &[isize], itemsize: usize) -> bool {
        let Some(shape) = &self.shape else {
            return true;
        };
        let fits = |scale: usize| {
            shape
                .iter()
                .zip(given)
                .enumerate()
                .all(|(axis, (&want, &got))| {
                    let scale = if axis + 1 == shape.len() { scale } else { 1 };
                    axis == self.token_axis || (want * scale) as isize == got
                })
        };
        given.len() != shape.len() || fits(1) || (itemsize == 1 && fits(self.itemsize))
    }

    /// The shape in words.
    pub fn describe_shape(&self) -> String {
        match &self.shape {
            Some(shape) => {
                let axes: Vec<String> = shape
                    .iter()
                    .enumerate()
                    .map(|(axis, n)| {
                        if axis == self.token_axis {
                            format!("1 to {n} tokens")
                        } else {
                            n.to_string()
                        }
                    })
                    .collect();
                format!("[{}]", axes.join(", "))
            }
            None => "flat bytes".into(),
        }
    }
}

/// The part of a block that Python asks for: `(start, stop)` pairs.
pub fn selection(layers: Option<(u32, u32)>, tokens: Option<(u32, u32)>) -> Selection {
    Selection {
        layers: layers.map(|(from, to)| from..to),
        tokens: tokens.map_or(Tokens::All, |(from, to)| Tokens::Range(from..to)),
    }
}

/// The parts of several blocks.
pub struct Selections(Vec<Selection>);

impl Selections {
    /// What Python asks for: of `tokens` the same pair for all blocks, or a buffer with one byte
    /// for each token of each block, not 0 for those that are wanted.
    pub fn new(
        space: &Space,
        keys: usize,
        layers: Option<(u32, u32)>,
        tokens: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        if let Ok(tokens) = tokens.extract() {
            return Ok(Selections(vec![selection(layers, tokens)]));
        }
        let (flags, each) = (
            View::raw(tokens, false)?,
            space.ns.layout.block_tokens() as usize,
        );
        if flags.len() != keys * each || each == 0 {
            return Err(raise(
                tokens.py(),
                "InvalidBlockError",
                format!(
                    "flags of {} tokens were given for {keys} blocks of {each}; give bool[keys, block_tokens]",
                    flags.len()
                ),
            ));
        }
        let of_block = |flags: &[u8]| {
            let mut ranges: Vec<std::ops::Range<u32>> = Vec::new();
            for (t, _) in (0..).zip(flags).filter(|&(_, &flag)| flag != 0) {
                match ranges.last_mut() {
                    Some(last) if last.end == t => last.end += 1,
                    _ => ranges.push(t..t + 1),
                }
            }
            Selection {
                tokens: Tokens::Only(ranges),
                ..selection(layers, None)
            }
        };
        Ok(Selections(
            flags.bytes().chunks_exact(each).map(of_block).collect(),
        ))
    }

    /// One for all of them, or one a key.
    pub fn all(&self) -> Vec<&Selection> {
        self.0.iter().collect()
    }
}

#[pymethods]
impl Space {
    /// The namespace of a canonical identity; `segments` is `(planes, bytes a token and plane)` a
    /// layer, empty for opaque blocks.
    #[new]
    #[pyo3(signature = (identity, segments, block_tokens, dtype, itemsize, shape=None, token_axis=0))]
    #[expect(clippy::too_many_arguments, reason = "the parts of a layout")]
    fn new(
        py: Python<'_>,
        identity: &[u8],
        segments: Vec<(u32, u32)>,
        block_tokens: u32,
        dtype: String,
        itemsize: usize,
        shape: Option<Vec<usize>>,
        token_axis: usize,
    ) -> PyResult<Self> {
        let layout = if segments.is_empty() {
            Ok(Layout::opaque())
        } else {
            let layers = segments
                .into_iter()
                .map(|(planes, token_bytes)| Layer {
                    planes,
                    token_bytes,
                })
                .collect();
            Layout::new(layers, block_tokens)
        };
        let layout = layout.map_err(|e| from_core(py, &e))?;
        Ok(Space {
            ns: Namespace::new(identity, layout),
            dtype,
            itemsize,
            shape,
            token_axis,
        })
    }

    /// `(offset, bytes)` of what a part of a block of `nbytes` consists of, in order.
    fn pieces(
        &self,
        py: Python<'_>,
        nbytes: usize,
        layers: Option<(u32, u32)>,
        tokens: Option<(u32, u32)>,
    ) -> PyResult<Vec<(usize, usize)>> {
        let layout = &self.ns.layout;
        let pieces = layout
            .shape(nbytes)
            .and_then(|shape| layout.pieces(shape, &selection(layers, tokens)))
            .map_err(|e| from_core(py, &e))?;
        Ok(pieces.iter().map(|p| (p.offset, p.len)).collect())
    }

    /// The namespace's digest, 32 bytes.
    #[getter]
    fn digest<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.ns.digest)
    }

    /// One 32-byte key for each block of `block_tokens` tokens; `tokens` is a contiguous buffer of
    /// `u32`.
    fn chain<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        block_tokens: usize,
        partial: bool,
        extras: Vec<Vec<u8>>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let view = View::raw(tokens, false)?;
        if view.len() % 4 != 0 || block_tokens == 0 {
            return Err(raise(
                py,
                "InvalidBlockError",
                "tokens must be a buffer of 32-bit numbers, in blocks of at least one".into(),
            ));
        }
        let (bytes, digest) = (view.bytes(), &self.ns.digest);
        let keys = py.detach(|| {
            let tokens: Vec<u32> = bytes
                .chunks_exact(4)
                .map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
                .collect();
            key::chain(digest, &tokens, block_tokens, partial, &extras)
        });
        Ok(keys.iter().map(|key| PyBytes::new(py, key)).collect())
    }
}
