//! What `auto` remembers of blocks that left: eight bytes each.

use kvtier_codec::checksum::prefetch;

use super::paged::{Paged, place_of, split_of};

/// Places at first; so many bits of a hash are told by its place.
const FIRST: usize = 1 << FIRST_BITS;
const FIRST_BITS: u32 = 6;
/// Bits of a time.
const TIME: u32 = 28;
/// From here on all generations are alike.
const OLDEST: u8 = 63;

/// A block that left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departed {
    /// When it was last used, in ticks; the highest four bits are lost.
    pub touched: u32,
    /// The session's turn in which it was last used; at least 1.
    pub generation: u8,
    /// Two flags of whoever asks.
    pub flags: u8,
}

/// By hash; one place each, and who comes later takes it.
#[derive(Debug)]
pub struct Memory {
    /// From the highest bit: the hash but for its lowest bits, time, generation, flags. 0: nobody.
    places: Paged<u64>,
    len: usize,
}

impl Default for Memory {
    fn default() -> Self {
        let mut places = Paged::new(0);
        places.reach(FIRST - 1);
        Memory { places, len: FIRST }
    }
}

fn hash_at(packed: u64, place: usize) -> u32 {
    (packed >> 38 << FIRST_BITS) as u32 | (place & (FIRST - 1)) as u32
}

impl Memory {
    /// This one is asked for soon: has the processor fetch its place.
    pub fn foresee(&self, hash: u32) {
        prefetch(&self.places[place_of(hash, self.len)]);
    }

    /// What is remembered of this one.
    pub fn get(&self, hash: u32) -> Option<Departed> {
        let place = place_of(hash, self.len);
        let packed = self.places[place];
        (packed != 0 && hash_at(packed, place) == hash).then_some(Departed {
            touched: (packed >> 8) as u32 & ((1 << TIME) - 1),
            generation: (packed >> 2) as u8 & OLDEST,
            flags: packed as u8 & 3,
        })
    }

    /// Remembers one, and grows a little until there are `wanted` places.
    pub fn insert(&mut self, hash: u32, departed: Departed, wanted: usize) {
        for _ in 0..4 {
            if self.len < wanted {
                self.grow();
            }
        }
        let time = u64::from(departed.touched) & ((1 << TIME) - 1);
        let generation = departed.generation.clamp(1, OLDEST);
        self.places[place_of(hash, self.len)] = u64::from(hash >> FIRST_BITS) << 38
            | time << 8
            | u64::from(generation) << 2
            | u64::from(departed.flags & 3);
    }

    fn grow(&mut self) {
        self.len += 1;
        self.places.reach(self.len - 1);
        let from = split_of(self.len);
        let packed = self.places[from];
        if packed != 0 && place_of(hash_at(packed, from), self.len) != from {
            self.places[from] = 0;
            self.places[self.len - 1] = packed;
        }
    }

    /// Ticks since then.
    pub fn since(now: u32, touched: u32) -> u32 {
        now.wrapping_sub(touched) & ((1 << TIME) - 1)
    }

    /// Bytes kept in memory.
    pub fn memory_bytes(&self) -> usize {
        self.places.memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// What is remembered is what was said last of it, the newest is remembered always, and
        /// nothing that was never there is found, however the table grew meanwhile.
        #[test]
        fn what_is_found_was_inserted(hashes in prop::collection::vec(any::<u32>(), 1..400), wanted in 1usize..3000) {
            let (mut memory, mut model) = (Memory::default(), HashMap::new());
            for (now, &hash) in (0..).zip(&hashes) {
                let departed = Departed { touched: now, generation: 1 + (hash % 63) as u8, flags: hash as u8 & 3 };
                memory.insert(hash, departed, wanted);
                model.insert(hash, departed);
                prop_assert_eq!(memory.get(hash), Some(departed));
            }
            let alone = |hash: u32| hashes.iter().all(|&h| h == hash || !(h ^ hash).is_multiple_of(FIRST as u32));
            for &hash in &hashes {
                prop_assert!(!alone(hash) || memory.get(hash).is_some(), "nobody took its place");
                if let Some(found) = memory.get(hash) {
                    prop_assert_eq!(found, model[&hash]);
                }
                if !model.contains_key(&!hash) {
                    prop_assert_eq!(memory.get(!hash), None);
                }
            }
        }
    }
}
