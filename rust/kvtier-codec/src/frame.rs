//! Codecs, and the frame that a coded segment is.
//!
//! ```text
//! magic "KVCF" ‖ version u8 ‖ method u8 ‖ zstd u8 ‖ dtype, planes u4 ‖ tokens u32 ‖ heads u32 ‖ dim u32
//!   ‖ body bytes u32 ‖ XXH3-64 u64 of the fields before it and the XXH3-64 of the body ‖ body
//! ```
//!
//! All little endian. A frame says all that is needed to decode it, and nothing in it that was
//! altered goes unseen. It is never longer than the segment and [`HEADER`] bytes.

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::checksum::hash64;
use crate::form::{Dtype, Form};
use crate::planes;
use crate::quant::Scheme;
use crate::simd::Level;
use crate::zstd;

/// Bytes before the body.
pub const HEADER: usize = 32;

/// The version of the format that is written, and the only one that is read.
pub const VERSION: u8 = 1;

const MAGIC: [u8; 4] = *b"KVCF";

/// What a frame's body is, before zstd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Method {
    /// The segment as it is.
    Plain = 0,
    /// Its byte planes, keys and values apart.
    Planes = 1,
    /// 8 bits: keys by channel, values by token.
    Int8 = 2,
    /// 8 bits by token.
    Int8Token = 3,
    /// `float8_e4m3fn`, scaled by token and head.
    Fp8E4m3 = 4,
    /// `float8_e5m2`, scaled by token and head.
    Fp8E5m2 = 5,
    /// 4 bits: keys by channel, values by token in groups of 32 channels.
    Int4 = 6,
}

impl Method {
    const ALL: [Method; 7] = [
        Method::Plain,
        Method::Planes,
        Method::Int8,
        Method::Int8Token,
        Method::Fp8E4m3,
        Method::Fp8E5m2,
        Method::Int4,
    ];

    /// `plain`, `planes`, or the codec's name.
    pub fn name(self) -> &'static str {
        match self {
            Method::Plain => "plain",
            Method::Planes => "planes",
            Method::Int8 => "int8",
            Method::Int8Token => "int8_token",
            Method::Fp8E4m3 => "fp8_e4m3",
            Method::Fp8E5m2 => "fp8_e5m2",
            Method::Int4 => "int4",
        }
    }

    /// Does it lose something?
    pub fn is_lossy(self) -> bool {
        self as u8 >= Method::Int8 as u8
    }

    /// How plane `i` of `planes` is coded: the first of two is the keys.
    fn scheme(self, i: u32, planes: u32) -> Option<Scheme> {
        let keys = planes == 2 && i == 0;
        Some(match self {
            Method::Plain | Method::Planes => return None,
            Method::Int8 if keys => Scheme::Int8Channel,
            Method::Int8 | Method::Int8Token => Scheme::Int8Token,
            Method::Fp8E4m3 => Scheme::E4m3,
            Method::Fp8E5m2 => Scheme::E5m2,
            Method::Int4 if keys => Scheme::Int4Channel,
            Method::Int4 => Scheme::Int4Token,
        })
    }

    /// The bytes of each part of the body, in order, and how many parts each plane has.
    fn parts(self, form: &Form) -> Vec<Vec<usize>> {
        (0..form.planes)
            .map(|i| match (self, self.scheme(i, form.planes)) {
                (Method::Plain, _) => vec![form.plane_len()],
                (_, Some(scheme)) => scheme.parts(form),
                (_, None) => {
                    vec![form.plane_len() / form.dtype.size(); form.dtype.size()]
                }
            })
            .collect()
    }
}

/// How segments are coded: something lossy or not, with zstd or not, at least one of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Codec {
    method: Method,
    zstd: bool,
}

impl Codec {
    /// Byte planes and zstd: every byte comes back.
    pub const ZSTD: Codec = Codec {
        method: Method::Planes,
        zstd: true,
    };

    /// All there are.
    pub fn all() -> impl Iterator<Item = Codec> {
        let lossy = Method::ALL.into_iter().filter(|method| method.is_lossy());
        std::iter::once(Codec::ZSTD)
            .chain(lossy.flat_map(|method| [false, true].map(|zstd| Codec { method, zstd })))
    }

    /// Does it lose something?
    pub fn is_lossy(self) -> bool {
        self.method.is_lossy()
    }

    /// Is what it gives compressed?
    pub fn has_zstd(self) -> bool {
        self.zstd
    }

    /// The number in a slot's record: version, zstd, method. Never 0, which is "as it is".
    pub fn id(self) -> u16 {
        u16::from(VERSION) << 8 | u16::from(self.zstd) << 7 | self.method as u16
    }

    /// The codec of a record's number; `None`: not one of this version.
    pub fn from_id(id: u16) -> Option<Self> {
        Codec::all().find(|codec| codec.id() == id)
    }

    /// What becomes of a segment that the codec cannot take.
    fn fallback(self) -> Option<Codec> {
        (self.zstd && self != Codec::ZSTD).then_some(Codec::ZSTD)
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.method, self.zstd) {
            (Method::Planes, _) => f.write_str("zstd"),
            (method, false) => f.write_str(method.name()),
            (method, true) => write!(f, "{}+zstd", method.name()),
        }
    }
}

impl fmt::Debug for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Codec {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Codec::all()
            .find(|codec| codec.to_string() == name)
            .ok_or_else(|| {
                let names: Vec<String> = Codec::all().map(|codec| codec.to_string()).collect();
                format!(
                    "the codec {name:?} is not known; allowed are {}. Choose one, or None",
                    names.join(", ")
                )
            })
    }
}

/// Why a frame cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    /// It ends too early, or too late.
    Length,
    /// It is no frame, or one of another version.
    Version,
    /// It says something that cannot be.
    Header,
    /// Something in it was altered.
    Checksum,
    /// It is a frame of another array than is asked for.
    Form,
    /// It is whole, but does not decompress to what it says.
    Body,
}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Bad::Length => "the frame ends too early or too late",
            Bad::Version => "these bytes are no frame of this version",
            Bad::Header => "the frame's header is impossible",
            Bad::Checksum => "the frame was altered",
            Bad::Form => "the frame is of another array",
            Bad::Body => "the frame's body does not decompress",
        })
    }
}

/// What a frame says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the body is.
    pub method: Method,
    /// Is it compressed too?
    pub zstd: bool,
    /// The array.
    pub form: Form,
    /// Bytes of the body.
    pub body: usize,
    checksum: u64,
}

impl Header {
    /// Reads a header, of which nothing has been verified but that it is possible.
    pub fn read(frame: &[u8]) -> Result<Self, Bad> {
        let head: &[u8; HEADER] = frame
            .get(..HEADER)
            .and_then(|head| head.try_into().ok())
            .ok_or(Bad::Length)?;
        if head[..4] != MAGIC || head[4] != VERSION {
            return Err(Bad::Version);
        }
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let header = Header {
            method: *Method::ALL.get(head[5] as usize).ok_or(Bad::Header)?,
            zstd: head[6] == 1,
            form: Form {
                planes: u32::from(head[7] >> 4),
                tokens: word(8),
                heads: word(12),
                dim: word(16),
                dtype: *Dtype::ALL.get(head[7] as usize & 15).ok_or(Bad::Header)?,
            },
            body: word(20) as usize,
            checksum: u64::from(word(24)) | u64::from(word(28)) << 32,
        };
        let lossy_bytes = header.method.is_lossy() && header.form.dtype == Dtype::Bytes;
        if head[6] > 1
            || !header.form.is_valid()
            || lossy_bytes
            || header.body > header.form.raw_len()
        {
            return Err(Bad::Header);
        }
        Ok(header)
    }

    /// Bytes of the whole frame.
    pub fn frame_len(&self) -> usize {
        HEADER + self.body
    }
}

/// The checksum of a frame.
fn checksum(fields: &[u8], body: &[u8]) -> u64 {
    let mut all = [0; HEADER];
    all[..HEADER - 8].copy_from_slice(fields);
    all[HEADER - 8..].copy_from_slice(&hash64(body).to_le_bytes());
    hash64(&all)
}

thread_local! {
    /// A body before it is compressed, or after.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Lends this thread's scratch memory.
fn with_scratch<T>(len: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < len {
            scratch.resize(len, 0);
        }
        work(&mut scratch[..len])
    })
}

/// The longest frame of an array.
pub fn bound(form: &Form) -> usize {
    HEADER + form.raw_len()
}

/// Codes a segment. Returns the bytes of the frame at the start of `dst`, and how its body is
/// coded: [`Method::Plain`] where the codec does not make it smaller, or cannot hold its numbers.
///
/// # Panics
/// If `form` is not valid, `src` is not as long as it says, or `dst` is shorter than [`bound`].
pub fn encode(codec: Codec, form: &Form, src: &[u8], dst: &mut [u8]) -> (usize, Method) {
    encode_at(Level::best(), codec, form, src, dst)
}

/// As [`encode`] on one instruction set.
pub fn encode_at(
    level: Level,
    codec: Codec,
    form: &Form,
    src: &[u8],
    dst: &mut [u8],
) -> (usize, Method) {
    assert!(form.is_valid() && src.len() == form.raw_len());
    let (head, room) = dst.split_at_mut(HEADER);
    let room = &mut room[..src.len()];
    let coded = encode_body(level, codec, form, src, room)
        .or_else(|| encode_body(level, codec.fallback()?, form, src, room));
    let (method, zstd, len) = coded.unwrap_or_else(|| {
        room.copy_from_slice(src);
        (Method::Plain, false, src.len())
    });
    head[..4].copy_from_slice(&MAGIC);
    head[4..8].copy_from_slice(&[
        VERSION,
        method as u8,
        u8::from(zstd),
        form.dtype as u8 | (form.planes as u8) << 4,
    ]);
    for (i, word) in [form.tokens, form.heads, form.dim, len as u32]
        .iter()
        .enumerate()
    {
        head[8 + 4 * i..][..4].copy_from_slice(&word.to_le_bytes());
    }
    let sum = checksum(&head[..HEADER - 8], &room[..len]);
    head[HEADER - 8..].copy_from_slice(&sum.to_le_bytes());
    (HEADER + len, method)
}

/// Codes a body into `room`; `None` where that makes it no smaller, or is not possible.
fn encode_body(
    level: Level,
    codec: Codec,
    form: &Form,
    src: &[u8],
    room: &mut [u8],
) -> Option<(Method, bool, usize)> {
    let method = codec.method;
    if method.is_lossy() && form.dtype == Dtype::Bytes {
        return None;
    }
    let parts = method.parts(form);
    let len: usize = parts.iter().flatten().sum();
    if !codec.zstd {
        let body = room.get_mut(..len).filter(|body| body.len() < src.len())?;
        return fill(level, method, form, src, &parts, body).then_some((method, false, len));
    }
    if len > src.len() {
        return None;
    }
    with_scratch(len, |body| {
        if !fill(level, method, form, src, &parts, body) {
            return None;
        }
        let lens: Vec<usize> = parts.iter().flatten().copied().collect();
        let kind = match form.dtype {
            Dtype::Bytes => zstd::Kind::Any,
            _ => zstd::Kind::Numbers,
        };
        if let Some(size) = zstd::compress(kind, body, &lens, &mut room[..len - 1]) {
            return Some((method, true, size));
        }
        let lossy = method.is_lossy() && len < src.len();
        lossy.then(|| {
            room[..len].copy_from_slice(body);
            (method, false, len)
        })
    })
}

/// Fills a body before zstd; false where the method cannot hold the numbers.
fn fill(
    level: Level,
    method: Method,
    form: &Form,
    src: &[u8],
    parts: &[Vec<usize>],
    body: &mut [u8],
) -> bool {
    let mut rest = body;
    for (i, (parts, src)) in parts
        .iter()
        .zip(src.chunks_exact(form.plane_len()))
        .enumerate()
    {
        let (part, behind) = rest.split_at_mut(parts.iter().sum());
        rest = behind;
        match method.scheme(i as u32, form.planes) {
            Some(scheme) => {
                if !scheme.encode(level, form, src, part) {
                    return false;
                }
            }
            None => planes::split_at(level, form.dtype.size(), src, part),
        }
    }
    true
}

/// Decodes a whole frame, which must be of exactly this array.
///
/// # Panics
/// If `dst` is not as long as the array.
pub fn decode(frame: &[u8], form: &Form, dst: &mut [u8]) -> Result<(), Bad> {
    decode_tokens(frame, form, 0..form.tokens, dst)
}

/// Decodes some tokens of a frame, as an array with so many. Without zstd only their part of the
/// body is decoded, but all of it is verified.
///
/// # Panics
/// If the tokens are not a range of the array's, or `dst` is not as long as they are.
pub fn decode_tokens(
    frame: &[u8],
    form: &Form,
    tokens: Range<u32>,
    dst: &mut [u8],
) -> Result<(), Bad> {
    decode_at(Level::best(), frame, form, tokens, dst)
}

/// As [`decode_tokens`] on one instruction set.
pub fn decode_at(
    level: Level,
    frame: &[u8],
    form: &Form,
    tokens: Range<u32>,
    dst: &mut [u8],
) -> Result<(), Bad> {
    assert!(tokens.start <= tokens.end && tokens.end <= form.tokens);
    let selected = form.with_tokens(tokens.end - tokens.start);
    assert_eq!(dst.len(), selected.raw_len());
    let header = Header::read(frame)?;
    if frame.len() != header.frame_len() {
        return Err(Bad::Length);
    }
    let (head, body) = frame.split_at(HEADER);
    if checksum(&head[..HEADER - 8], body) != header.checksum {
        return Err(Bad::Checksum);
    }
    if header.form != *form {
        return Err(Bad::Form);
    }
    let parts = header.method.parts(form);
    let len: usize = parts.iter().flatten().sum();
    let tokens = tokens.start as usize..tokens.end as usize;
    if !header.zstd {
        if body.len() != len {
            return Err(Bad::Header);
        }
        empty(level, header.method, form, body, &parts, tokens, dst);
        return Ok(());
    }
    if len > form.raw_len() {
        return Err(Bad::Header); // never written: the scratch memory stays bounded
    }
    with_scratch(len, |plain| {
        if !zstd::decompress(body, plain) {
            return Err(Bad::Body);
        }
        empty(level, header.method, form, plain, &parts, tokens, dst);
        Ok(())
    })
}

/// The inverse of [`fill`].
fn empty(
    level: Level,
    method: Method,
    form: &Form,
    body: &[u8],
    parts: &[Vec<usize>],
    tokens: Range<usize>,
    dst: &mut [u8],
) {
    let selected = form.with_tokens(tokens.len() as u32).plane_len();
    if selected == 0 {
        return;
    }
    let token = form.row() * form.dtype.size();
    let mut rest = body;
    for (i, (parts, dst)) in parts.iter().zip(dst.chunks_exact_mut(selected)).enumerate() {
        let (part, behind) = rest.split_at(parts.iter().sum());
        rest = behind;
        match (method, method.scheme(i as u32, form.planes)) {
            (_, Some(scheme)) => scheme.decode(level, form, part, tokens.clone(), dst),
            (Method::Plain, _) => dst.copy_from_slice(&part[tokens.start * token..][..selected]),
            (_, None) => {
                let from = &part[tokens.start * form.row()..];
                planes::merge_at(level, form.dtype.size(), from, parts[0], dst);
            }
        }
    }
}

#[cfg(any(test, feature = "fuzz"))]
pub mod fuzzing;
#[cfg(test)]
mod tests;
