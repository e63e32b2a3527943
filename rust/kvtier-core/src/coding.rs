//! Blocks in fewer bytes below memory: a frame a layer, side by side, as the payload of an image.

use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
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
        let bodies = 1 + Helpers::worth(self.codec.has_zstd(), payload, self.layers.len());
        self.frames(tokens).next_multiple_of(PAGE) + bodies * body
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
    pub(crate) fn pack(&self, payload: &[u8], plain: Shape, helpers: &Helpers) -> Option<Coded> {
        let tokens = payload.len() / self.token_bytes;
        if tokens * self.token_bytes != payload.len() || plain.pages() < 2 {
            return None;
        }
        let mut pages = Pages::new(self.frames(tokens as u32).div_ceil(PAGE));
        let help = helpers.take(self.codec.has_zstd(), payload.len(), self.layers.len());
        // Each layer's frame is made where the longest ones before it would end.
        let mut layers = Vec::with_capacity(self.layers.len());
        let (mut src, mut to) = (payload, &mut pages[..]);
        for form in &self.layers {
            let form = form.with_tokens(tokens as u32);
            let (layer, behind) = src.split_at(form.raw_len());
            let (room, after) = to.split_at_mut(frame::bound(&form));
            (src, to) = (behind, after);
            layers.push((form, layer, room));
        }
        let made = many::spread(1 + help.count(), layers, |(form, layer, room)| {
            let (len, _) = frame::encode(self.codec, &form, layer, room);
            (frame::bound(&form), len, hash64(&room[..len]))
        });
        drop(help);
        let mut table = Vec::with_capacity(made.len());
        let (mut from, mut at) = (0, 0);
        for (bound, len, checksum) in made {
            pages.copy_within(from..from + len, at);
            table.push(Segment {
                offset: at as u32,
                len: len as u32,
                checksum,
            });
            from += bound;
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
/// place. Returns the root.
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
    let help = (codings.helpers).take(found.iter().any(|(_, h)| h.zstd), total, found.len());
    let body = found.iter().map(|(_, header)| body(header)).max();
    let all = stored.payload() + (1 + help.count()) * body.unwrap_or(0);
    let room = (help.count() > 0).then(|| codings.decoding_now(all));
    let sums = if let Some(Some(_room)) = room {
        decode_beside(&mut image[..total], stored, &found, help.count())?
    } else {
        drop(help);
        let _room = codings.decoding(aside(&found))?;
        decode_in_place(image, &found, total)?
    };
    let mut table = Vec::with_capacity(plain.segments());
    if whole {
        table.push(Segment {
            offset: 0,
            len: total as u32,
            checksum: hash64(&image[..total]),
        });
    } else {
        let mut at = 0;
        for ((_, header), checksum) in found.iter().zip(sums) {
            let len = header.form.raw_len() as u32;
            table.push(Segment {
                offset: at,
                len,
                checksum,
            });
            at += len;
        }
    }
    let image = &mut image[..plain.image_len()];
    Ok(image::seal(image, plain, id, 0, 0, &table))
}

type Found = [(Range<usize>, Header)];

/// Moves all frames out of the way and decodes them side by side. Returns each layer's checksum.
fn decode_beside(
    image: &mut [u8],
    stored: Shape,
    found: &Found,
    helpers: usize,
) -> Result<Vec<u64>, Miss> {
    let spare = image[..stored.payload()].to_vec();
    let mut layers = Vec::with_capacity(found.len());
    let mut rest = image;
    for (place, header) in found {
        let (target, behind) = rest.split_at_mut(header.form.raw_len());
        rest = behind;
        layers.push((&spare[place.clone()], header.form, target));
    }
    let decode = |(frame, form, target): (&[u8], Form, &mut [u8])| {
        frame::decode(frame, &form, target).map_err(|_| Miss::Corrupt)?;
        Ok(hash64(target))
    };
    let sums = many::spread(1 + helpers, layers, decode);
    sums.into_iter().collect()
}

/// Decodes from the end, so that only the frame at work is moved out of the way. Returns each layer's
/// checksum.
fn decode_in_place(image: &mut [u8], found: &Found, total: usize) -> Result<Vec<u64>, Miss> {
    let mut sums = Vec::with_capacity(found.len());
    let (mut spare, mut at, mut moved) = (Vec::new(), total, false);
    for (place, header) in found.iter().rev() {
        let end = at;
        at -= header.form.raw_len();
        let frame = if moved {
            &spare[place.clone()]
        } else {
            moved = at < place.start;
            spare.clear();
            spare.extend_from_slice(&image[if moved { 0 } else { place.start }..place.end]);
            &spare[if moved { place.clone() } else { 0..place.len() }]
        };
        let target = &mut image[at..end];
        frame::decode(frame, &header.form, target).map_err(|_| Miss::Corrupt)?;
        sums.push(hash64(target));
    }
    sums.reverse();
    Ok(sums)
}

/// Bytes of a body before zstd.
fn body(header: &Header) -> usize {
    if header.zstd {
        header.form.raw_len()
    } else {
        0
    }
}

/// Bytes of memory that [`decode_in_place`] takes beside the slot: the frames that decoding one layer would
/// overwrite, and a body before zstd.
fn aside(found: &[(Range<usize>, Header)]) -> usize {
    let (mut at, mut spare, mut most) = (0, 0, 0);
    for (place, header) in found {
        let overwritten = if at < place.start {
            place.end
        } else {
            place.len()
        };
        spare = spare.max(overwritten);
        at += header.form.raw_len();
        most = most.max(body(header));
    }
    spare + most
}

/// The most bytes that blocks on their way into frames take beside the tiers, and those on their
/// way out of them as many again; at most this part of the first tier.
const STAGING: usize = 16 << 20;
const PART: usize = 12;

/// How long a decoder waits for others, which wait for nobody.
const PATIENCE: Duration = Duration::from_secs(30);

/// How many threads beside those that read, write and move may code at this moment; they end with the
/// block that they help with.
pub(crate) struct Helpers {
    free: AtomicUsize,
}

/// Some of them, until it is dropped.
pub(crate) struct Help<'a>(&'a Helpers, usize);

impl Help<'_> {
    fn count(&self) -> usize {
        self.1
    }
}

impl Drop for Help<'_> {
    fn drop(&mut self) {
        self.0.free.fetch_add(self.1, Ordering::Relaxed);
    }
}

impl Helpers {
    /// The most that one block gets.
    const MOST: usize = 3;

    /// At most so many at once, over all blocks.
    pub(crate) fn new(count: usize) -> Self {
        Helpers {
            free: AtomicUsize::new(count),
        }
    }

    /// How many so many bytes in so many layers are worth. Without zstd none: a thread that has to
    /// wait for a core takes longer than the block.
    fn worth(zstd: bool, bytes: usize, layers: usize) -> usize {
        let most = layers.clamp(1, 1 + Self::MOST);
        if zstd {
            many::useful(most, bytes / 4) - 1
        } else {
            0
        }
    }

    /// As many as are free and worth it; never waits.
    fn take(&self, zstd: bool, bytes: usize, layers: usize) -> Help<'_> {
        let wanted = Self::worth(zstd, bytes, layers);
        let mut got = 0;
        let _ = (self.free).fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| {
            got = wanted.min(free);
            Some(free - got)
        });
        Help(self, got)
    }
}

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
    pub(crate) helpers: Helpers,
}

/// Memory for decoding, until it is dropped.
pub(crate) struct Decoding<'a>(&'a Codings, usize);

impl Drop for Decoding<'_> {
    fn drop(&mut self) {
        *self.0.decoding.lock() -= self.1;
        self.0.changed.notify_all();
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

impl Codings {
    /// The most threads that help at once.
    const HELPERS: usize = 8;

    /// None yet, for a first tier of so many bytes.
    pub(crate) fn new(memory: usize) -> Self {
        Codings {
            all: Mutex::default(),
            used: AtomicBool::new(false),
            limit: STAGING.min(memory / PART),
            decoding: Mutex::default(),
            changed: Condvar::default(),
            warned: AtomicBool::new(false),
            helpers: Helpers::new(cores().saturating_sub(1).min(Self::HELPERS)),
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

    /// Memory for decoding, if it is there at once.
    fn decoding_now(&self, bytes: usize) -> Option<Decoding<'_>> {
        let mut taken = self.decoding.lock();
        if *taken + bytes > self.limit {
            return None;
        }
        *taken += bytes;
        Some(Decoding(self, bytes))
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
            let mut coded = coding.pack(&payload, plain, &Helpers::new(0)).unwrap();
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
            let mut coded = coding.pack(&payload, plain, &Helpers::new(0)).unwrap();
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
    fn any_number_of_helpers_gives_the_same_block() {
        for (name, tokens) in [("zstd", 256), ("int8", 256), ("int4+zstd", 200)] {
            let coding = coding(name, 8);
            let payload: Vec<u8> = (0..coding.token_bytes * tokens)
                .map(|i| if i % 2 == 0 { (i * 7 / 3) as u8 } else { 0x3f })
                .collect();
            let plain = Shape::new(payload.len(), 8).unwrap();
            let (mut stored, mut back) = (Vec::new(), Vec::new());
            for count in [0, 1, 3, 7] {
                let helpers = Helpers::new(count);
                let mut coded = coding.pack(&payload, plain, &helpers).unwrap();
                coded.seal(&[7; 32], 9);
                stored.push(coded.pages[..coded.shape.image_len()].to_vec());
                assert_eq!(helpers.free.load(Ordering::Relaxed), count);
                let mut image = vec![0; plain.image_len()];
                image[..stored[0].len()].copy_from_slice(&stored[0]);
                let mut codings = Codings::new(256 << 20);
                codings.helpers = helpers;
                let shapes = (coded.shape, plain);
                let root = unpack(&mut image, shapes, &[7; 32], &codings).unwrap();
                assert!(image::verify(&image, plain, root, &[7; 32], 0, 0).is_ok());
                back.push((root, image));
                assert_eq!(codings.helpers.free.load(Ordering::Relaxed), count);
                assert_eq!(*codings.decoding.lock(), 0);
            }
            assert!(stored.iter().all(|image| *image == stored[0]), "{name}");
            assert!(back.iter().all(|image| *image == back[0]), "{name}");
        }
    }

    #[test]
    fn helpers_are_shared_and_never_waited_for() {
        let helpers = Helpers::new(4);
        let (first, second) = (
            helpers.take(true, 1 << 30, 99),
            helpers.take(true, 1 << 30, 99),
        );
        assert_eq!((first.count(), second.count()), (3, 1));
        assert_eq!(helpers.take(true, 1 << 30, 99).count(), 0);
        drop(first);
        assert_eq!(
            helpers.take(true, 2400 << 10, 99).count(),
            1,
            "not worth more"
        );
        assert_eq!(helpers.take(true, 1, 99).count(), 0);
        assert_eq!(helpers.take(true, 1 << 30, 2).count(), 1, "a layer each");
        assert_eq!(helpers.take(true, 1 << 30, 1).count(), 0);
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
        assert!(coding.pack(&noise, plain, &Helpers::new(1)).is_none());
        assert!(
            coding.pack(&noise[1..], plain, &Helpers::new(1)).is_none(),
            "no whole tokens"
        );
    }
}
