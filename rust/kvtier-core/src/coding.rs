//! Blocks in fewer bytes below memory: a frame a layer, side by side, as the payload of an image.

use crate::sync::atomic::{AtomicBool, Ordering};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use kvtier_codec::checksum::hash64;
use kvtier_codec::form::Form;
use kvtier_codec::frame::{self, Codec, Header};
use kvtier_codec::image::{self, Id, PAGE, Root, Segment, Shape};
use kvtier_codec::many;
use kvtier_nvme::Pages;

use crate::load::Miss;
use crate::sync::{Condvar, Mutex};

/// How the blocks of a namespace are coded on NVMe.
#[derive(Clone, Debug)]
pub struct Coding {
    codec: Codec,
    /// Each layer, of one token.
    layers: Vec<Form>,
    token_bytes: usize,
}

/// A block's frames, as the payload of an image that is not sealed yet.
pub(crate) struct Coded {
    pub(crate) pages: Pages,
    pub(crate) shape: Shape,
    table: Vec<Segment>,
    pub(crate) codec: Codec,
}

impl Coding {
    /// With `codec`, and what each layer is for one token; `None` if a layer is impossible.
    pub fn new(codec: Codec, layers: Vec<Form>) -> Option<Self> {
        let layers: Vec<Form> = layers.into_iter().map(|form| form.with_tokens(1)).collect();
        let good = !layers.is_empty() && layers.iter().all(Form::is_valid);
        good.then(|| Coding {
            codec,
            token_bytes: layers.iter().map(Form::raw_len).sum(),
            layers,
        })
    }

    /// Bytes of memory that [`Coding::pack`] takes for a payload.
    pub(crate) fn room(&self, payload: usize) -> usize {
        let tokens = (payload / self.token_bytes) as u32;
        let layer = |form: &Form| form.with_tokens(tokens).raw_len();
        let body = self.layers.iter().map(layer).max().unwrap_or(0);
        self.frames(tokens).next_multiple_of(PAGE) + body
    }

    /// Bytes of the longest frames of so many tokens, with their table.
    fn frames(&self, tokens: u32) -> usize {
        let most: usize = self
            .layers
            .iter()
            .map(|form| frame::bound(&form.with_tokens(tokens)))
            .sum();
        most.next_multiple_of(16) + self.layers.len() * image::ENTRY
    }

    /// Codes a payload; `None` where that saves no page.
    pub(crate) fn pack(&self, payload: &[u8], plain: Shape) -> Option<Coded> {
        let tokens = payload.len() / self.token_bytes;
        if tokens * self.token_bytes != payload.len() || plain.pages() < 2 {
            return None;
        }
        let forms = self
            .layers
            .iter()
            .map(|form| form.with_tokens(tokens as u32));
        let mut pages = Pages::new(self.frames(tokens as u32).div_ceil(PAGE));
        let mut table = Vec::with_capacity(self.layers.len());
        let (mut from, mut at) = (0, 0);
        for form in forms {
            let src = &payload[from..from + form.raw_len()];
            let (len, _) = frame::encode(self.codec, &form, src, &mut pages[at..]);
            table.push(Segment {
                offset: at as u32,
                len: len as u32,
                checksum: hash64(&pages[at..at + len]),
            });
            from += src.len();
            at += len;
        }
        let shape = Shape::new(at, plain.segments()).filter(|s| s.pages() < plain.pages())?;
        if shape.segments() == 1 {
            table = vec![Segment {
                offset: 0,
                len: at as u32,
                checksum: hash64(&pages[..at]),
            }];
        }
        Some(Coded {
            pages,
            shape,
            table,
            codec: self.codec,
        })
    }
}

impl Coded {
    /// Completes the image for a slot of this generation.
    pub(crate) fn seal(&mut self, id: &Id, generation: u64) -> Root {
        let image = &mut self.pages[..self.shape.image_len()];
        image::seal(
            image,
            self.shape,
            id,
            generation,
            self.codec.id(),
            &self.table,
        )
    }
}

/// Decodes the verified image of shape `stored` at the start of a slot to the plain one in the same
/// place, from its end, so that only the frame at work is moved out of the way. Returns the root.
pub(crate) fn unpack(
    image: &mut [u8],
    (stored, plain): (Shape, Shape),
    id: &Id,
    codings: &Codings,
) -> Result<Root, Miss> {
    let found = many::headers(&image[..stored.payload()]).map_err(|_| Miss::Corrupt)?;
    let total: usize = found.iter().map(|(_, header)| header.form.raw_len()).sum();
    let whole = plain.segments() == 1;
    if total != plain.payload() || !(whole || found.len() == plain.segments()) {
        return Err(Miss::Corrupt);
    }
    let _room = codings.decoding(aside(&found))?;
    let mut table = Vec::with_capacity(plain.segments());
    let (mut spare, mut at, mut moved) = (Vec::new(), total, false);
    for (place, header) in found.into_iter().rev() {
        let end = at;
        at -= header.form.raw_len();
        let frame = if moved {
            &spare[place]
        } else {
            moved = at < place.start;
            spare.clear();
            spare.extend_from_slice(&image[if moved { 0 } else { place.start }..place.end]);
            &spare[if moved { place } else { 0..place.len() }]
        };
        let target = &mut image[at..end];
        frame::decode(frame, &header.form, target).map_err(|_| Miss::Corrupt)?;
        if !whole {
            table.push(Segment {
                offset: at as u32,
                len: target.len() as u32,
                checksum: hash64(target),
            });
        }
    }
    table.reverse();
    if whole {
        table.push(Segment {
            offset: 0,
            len: total as u32,
            checksum: hash64(&image[..total]),
        });
    }
    let image = &mut image[..plain.image_len()];
    Ok(image::seal(image, plain, id, 0, 0, &table))
}

/// Bytes of memory that [`unpack`] takes beside the slot: the frames that decoding one layer would
/// overwrite, and a body before zstd.
fn aside(found: &[(Range<usize>, Header)]) -> usize {
    let (mut at, mut spare, mut body) = (0, 0, 0);
    for (place, header) in found {
        let overwritten = if at < place.start {
            place.end
        } else {
            place.len()
        };
        spare = spare.max(overwritten);
        at += header.form.raw_len();
        body = body.max(if header.zstd {
            header.form.raw_len()
        } else {
            0
        });
    }
    spare + body
}

/// The most bytes that blocks on their way into frames take beside the tiers, and those on their
/// way out of them as many again; at most this part of the first tier.
const STAGING: usize = 16 << 20;
const PART: usize = 12;

/// How long a decoder waits for others, which wait for nobody.
const PATIENCE: Duration = Duration::from_secs(30);

/// The codings of the namespaces that were opened, by their tag, and the account of what decoding
/// takes. [`crate::mover::Mover`] keeps the account of what is coded.
pub(crate) struct Codings {
    all: Mutex<HashMap<u64, Arc<Coding>>>,
    /// Something is coded: its memory is set aside.
    used: AtomicBool,
    limit: usize,
    decoding: Mutex<usize>,
    changed: Condvar,
    warned: AtomicBool,
}

/// Memory for decoding, until it is dropped.
pub(crate) struct Decoding<'a>(&'a Codings, usize);

impl Drop for Decoding<'_> {
    fn drop(&mut self) {
        *self.0.decoding.lock() -= self.1;
        self.0.changed.notify_all();
    }
}

impl Codings {
    /// None yet, for a first tier of so many bytes.
    pub(crate) fn new(memory: usize) -> Self {
        Codings {
            all: Mutex::default(),
            used: AtomicBool::new(false),
            limit: STAGING.min(memory / PART),
            decoding: Mutex::default(),
            changed: Condvar::default(),
            warned: AtomicBool::new(false),
        }
    }

    /// From now on, blocks of this namespace are coded so; `None`: not at all.
    pub(crate) fn set(&self, tag: u64, coding: Option<Coding>) {
        let mut all = self.all.lock();
        match coding {
            Some(coding) => all.insert(tag, Arc::new(coding)),
            None => all.remove(&tag),
        };
    }

    /// How a payload of so many bytes is coded; `None`: not at all, as where it is too large for
    /// the memory that is set aside.
    pub(crate) fn of(&self, tag: u64, payload: usize) -> Option<Arc<Coding>> {
        let coding = self.all.lock().get(&tag).cloned();
        coding.filter(|coding| coding.room(payload) <= self.limit)
    }

    /// Bytes that coding may take at once; decoding may take as many.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Notes that blocks are coded or decoded from now on; true the first time.
    pub(crate) fn begin(&self) -> bool {
        !self.used.load(Ordering::Relaxed) && !self.used.swap(true, Ordering::Relaxed)
    }

    /// Says, once, that a block lies there in a way that this build cannot read.
    pub(crate) fn warn_of(&self, codec: u16) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "blocks on NVMe are coded with codec {codec:#06x}; this build reads {:?} of version {}. They are kept, and misses to it. Read them with the build that wrote them, or put them again",
                Codec::all().collect::<Vec<_>>(),
                frame::VERSION,
            );
        }
    }

    /// Bytes that are set aside for both.
    pub(crate) fn memory_bytes(&self) -> usize {
        if self.used.load(Ordering::Relaxed) {
            2 * self.limit
        } else {
            0
        }
    }

    /// Memory for decoding; waits for others, which wait for nobody.
    pub(crate) fn decoding(&self, bytes: usize) -> Result<Decoding<'_>, Miss> {
        if bytes > self.limit {
            return Err(Miss::Full); // a store with a larger tier wrote it
        }
        let deadline = Instant::now() + PATIENCE;
        let mut taken = self.decoding.lock();
        while *taken + bytes > self.limit {
            if self.changed.wait_until(&mut taken, deadline).timed_out() {
                return Err(Miss::Deadline);
            }
        }
        *taken += bytes;
        Ok(Decoding(self, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvtier_codec::form::Dtype;

    fn coding(name: &str, heads: u32) -> Coding {
        let form = Form {
            planes: 2,
            tokens: 1,
            heads,
            dim: 64,
            dtype: Dtype::Bf16,
        };
        Coding::new(name.parse().unwrap(), vec![form; 8]).unwrap()
    }

    #[test]
    fn a_block_comes_back_with_the_root_of_a_plain_image() {
        for (name, heads, tokens) in [
            ("zstd", 1, 16),
            ("zstd", 8, 16),
            ("int8", 8, 16),
            ("int4+zstd", 8, 5),
        ] {
            let coding = coding(name, heads);
            let payload: Vec<u8> = (0..coding.token_bytes * tokens)
                .map(|i| if i % 2 == 0 { (i * 7 / 3) as u8 } else { 0x3f })
                .collect();
            let plain = Shape::new(payload.len(), 8).unwrap();
            let mut coded = coding.pack(&payload, plain).unwrap();
            assert!(coded.shape.pages() < plain.pages());
            let root = coded.seal(&[7; 32], 9);
            let stored = &coded.pages[..coded.shape.image_len()];
            let id = coding.codec.id();
            assert!(image::verify(stored, coded.shape, root, &[7; 32], 9, id).is_ok());
            let mut image = vec![0; plain.image_len()];
            image[..stored.len()].copy_from_slice(stored);
            let codings = Codings::new(64 << 20);
            let root = unpack(&mut image, (coded.shape, plain), &[7; 32], &codings).unwrap();
            assert!(image::verify(&image, plain, root, &[7; 32], 0, 0).is_ok());
            assert!(name != "zstd" || image[..payload.len()] == payload);
            let other = Shape::new(payload.len() + 1, 8).unwrap();
            let mut image = vec![0; other.image_len()];
            image[..stored.len()].copy_from_slice(stored);
            let wrong = unpack(&mut image, (coded.shape, other), &[7; 32], &codings);
            assert_eq!(wrong, Err(Miss::Corrupt));
            assert_eq!(*codings.decoding.lock(), 0);
        }
    }

    #[test]
    fn layers_that_do_not_shrink_are_not_overwritten_before_they_are_decoded() {
        let coding = coding("zstd", 8);
        let layer = coding.token_bytes * 16 / 8;
        for noisy in [0..0, 0..4, 2..3, 4..8] {
            let mut state = 1u64;
            let payload: Vec<u8> = (0..8 * layer)
                .map(|i| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005) + 1;
                    let noise = noisy.contains(&(i / layer));
                    if noise { (state >> 56) as u8 } else { 7 }
                })
                .collect();
            let plain = Shape::new(payload.len(), 8).unwrap();
            let mut coded = coding.pack(&payload, plain).unwrap();
            coded.seal(&[7; 32], 9);
            let mut image = vec![0; plain.image_len()];
            image[..coded.shape.payload()].copy_from_slice(&coded.pages[..coded.shape.payload()]);
            let shapes = (coded.shape, plain);
            let found = many::headers(&image[..coded.shape.payload()]).unwrap();
            assert!(aside(&found) <= coding.room(payload.len()));
            let small = Codings::new(PART * (aside(&found) - 1));
            let refused = unpack(&mut image, shapes, &[7; 32], &small);
            assert_eq!(refused, Err(Miss::Full), "and nothing has been touched");
            let codings = Codings::new(PART * aside(&found));
            unpack(&mut image, shapes, &[7; 32], &codings).unwrap();
            assert!(image[..payload.len()] == payload);
        }
    }

    #[test]
    fn what_saves_no_page_is_left_as_it_is() {
        let coding = coding("zstd", 1);
        let mut state = 1u64;
        let noise: Vec<u8> = (0..coding.token_bytes * 16)
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        let plain = Shape::new(noise.len(), 8).unwrap();
        assert!(coding.pack(&noise, plain).is_none());
        assert!(coding.pack(&noise[1..], plain).is_none(), "no whole tokens");
    }
}
