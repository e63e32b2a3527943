//! Blocks in fewer bytes below memory: a frame a layer, side by side, as the payload of an image.

use std::sync::Arc;

use hashbrown::HashMap;
use kvtier_codec::checksum::hash64;
use kvtier_codec::form::Form;
use kvtier_codec::frame::{self, Codec};
use kvtier_codec::image::{self, Id, PAGE, Root, Segment, Shape};
use kvtier_codec::many;
use kvtier_nvme::Pages;

use crate::sync::Mutex;

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
        let most: usize = forms.clone().map(|form| frame::bound(&form)).sum();
        let room = most.next_multiple_of(16) + self.layers.len() * image::ENTRY;
        let mut pages = Pages::new(room.div_ceil(PAGE));
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
/// place. Returns the root of that; `None` if the frames are not those of such a block.
pub(crate) fn unpack(image: &mut [u8], stored: Shape, plain: Shape, id: &Id) -> Option<Root> {
    let frames = image[..stored.payload()].to_vec();
    let found = many::headers(&frames).ok()?;
    let total: usize = found.iter().map(|(_, header)| header.form.raw_len()).sum();
    let whole = plain.segments() == 1;
    if total != plain.payload() || !(whole || found.len() == plain.segments()) {
        return None;
    }
    let mut table = Vec::with_capacity(plain.segments());
    let mut at = 0;
    for (place, header) in found {
        let target = &mut image[at..at + header.form.raw_len()];
        frame::decode(&frames[place], &header.form, target).ok()?;
        if !whole {
            table.push(Segment {
                offset: at as u32,
                len: target.len() as u32,
                checksum: hash64(target),
            });
        }
        at += target.len();
    }
    if whole {
        table.push(Segment {
            offset: 0,
            len: total as u32,
            checksum: hash64(&image[..total]),
        });
    }
    let image = &mut image[..plain.image_len()];
    Some(image::seal(image, plain, id, 0, 0, &table))
}

/// The codings of the namespaces that were opened, by their tag.
#[derive(Default)]
pub(crate) struct Codings(Mutex<HashMap<u64, Arc<Coding>>>);

impl Codings {
    /// From now on, blocks of this namespace are coded so; `None`: not at all.
    pub(crate) fn set(&self, tag: u64, coding: Option<Coding>) {
        let mut all = self.0.lock();
        match coding {
            Some(coding) => all.insert(tag, Arc::new(coding)),
            None => all.remove(&tag),
        };
    }

    pub(crate) fn of(&self, tag: u64) -> Option<Arc<Coding>> {
        self.0.lock().get(&tag).cloned()
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
            let root = unpack(&mut image, coded.shape, plain, &[7; 32]).unwrap();
            assert!(image::verify(&image, plain, root, &[7; 32], 0, 0).is_ok());
            assert!(name != "zstd" || image[..payload.len()] == payload);
            let other = Shape::new(payload.len() + 1, 8).unwrap();
            let mut image = vec![0; other.image_len()];
            image[..stored.len()].copy_from_slice(stored);
            assert_eq!(unpack(&mut image, coded.shape, other, &[7; 32]), None);
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
