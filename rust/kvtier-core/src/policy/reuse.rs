//! How soon blocks come back, learned by class.
//!
//! For each class of blocks: the chance that a block which has not been used for some time is used
//! in the next interval (a hazard, estimated from counts of blocks at risk and blocks that came
//! back, whether or not they were still in the tier). From it the *worth* of keeping a block of an
//! age: the best rate, over all times one might give it, of expected hits for expected time. That
//! is the Gittins index of the block (Gittins 1979; for caches see Beckmann, Chen and Cidon, "LHD",
//! NSDI 2018).
//!
//! The blocks of a request share their fate, so a hundred of them say little more than one. How
//! many come back as one is measured, and a class is believed by the number of such bursts that it
//! saw; beyond that it leans on wider classes.

use kvtier_codec::checksum::prefetch;

use super::paged::{Paged, place_of, split_of};

const GENERATIONS: usize = 8;
const GAPS: usize = 8;
/// Classes of blocks.
pub const CLASSES: usize = GENERATIONS * GAPS * 2;
/// Intervals of age, two for each doubling.
pub const AGES: usize = 40;
/// So many bursts' worth of what is known of all gaps is added to each class, and of what all
/// blocks have in common to the former.
const PRIOR: f32 = 100.0;
const PRIOR_WIDE: f32 = 2.0;
/// Chance that a block comes back within an interval of age, where nothing is known yet.
const UNKNOWN: f32 = 0.02;
/// Blocks that are followed at most: their numbers fit 16 bits.
const FOLLOWED: usize = 0xFFFF;
/// What is followed reaches back so many times as far as blocks stay: of more blocks it is a sample.
const REACH: usize = 2;
/// Uses between two halvings of all counts, so that what is new counts for more.
const MEMORY: u64 = 1 << 18;
/// Uses after which the worth of one class is computed anew.
const REFRESH: u64 = 16;
const NIL: u16 = u16::MAX;

/// The interval of an age in ticks.
pub fn age_of(ticks: u32) -> usize {
    if ticks < 4 {
        return ticks as usize;
    }
    let octave = 31 - ticks.leading_zeros();
    let half = ticks >> (octave - 1) & 1;
    (2 * octave as usize + half as usize).min(AGES - 1)
}

/// How long each interval of age is, in ticks.
const WIDTHS: [f32; AGES] = {
    let mut widths = [0.0; AGES];
    let mut age = 0;
    while age < AGES {
        widths[age] = (age_begin(age + 1) - age_begin(age)) as f32;
        age += 1;
    }
    widths
};

/// The worth of a class that no block was of yet: where blocks of all ages are as likely to come back,
/// the first interval is the best.
const UNSEEN: [f32; AGES] = {
    let mut worth = WIDTHS;
    let mut age = 0;
    while age < AGES {
        worth[age] = UNKNOWN / (WIDTHS[age] * (1.0 - UNKNOWN / 2.0));
        age += 1;
    }
    worth
};

/// Where an interval of age begins, in ticks.
pub const fn age_begin(age: usize) -> u32 {
    if age < 4 {
        return age as u32;
    }
    let octave = age as u32 / 2;
    (1 << octave) + (age as u32 % 2) * (1 << (octave - 1))
}

/// The time between two uses, coarsely; 0 is "used once".
pub fn gap_of(ticks: u32) -> u8 {
    let gap = age_of(ticks).saturating_sub(6) / 3;
    gap.min(GAPS - 2) as u8 + 1
}

/// The class of a block: the session's turn, the time since the turn before, and whether another
/// block follows.
pub fn class_of(generation: u32, gap: u8, continued: bool) -> usize {
    let generation = match generation {
        0 | 1 => 0,
        2 => 1,
        3 => 2,
        4..=5 => 3,
        6..=9 => 4,
        10..=20 => 5,
        21..=60 => 6,
        _ => 7,
    };
    (generation * GAPS + usize::from(gap)) * 2 + usize::from(continued)
}

/// The class without its gap.
fn wide_of(class: usize) -> usize {
    class / (GAPS * 2) * 2 + class % 2
}

/// A block that is followed, by its last use.
#[derive(Clone, Copy, Debug)]
struct Use {
    hash: u32,
    at: u32,
    /// Its neighbours in the order of use, the older one first.
    prev: u16,
    next: u16,
    /// The next one in its bucket.
    chain: u16,
    class: u8,
    /// Intervals of age in which it was counted as at risk.
    reached: u8,
}

const NEVER: Use = Use {
    hash: 0,
    at: 0,
    prev: NIL,
    next: NIL,
    chain: NIL,
    class: 0,
    reached: 0,
};

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    at_risk: f32,
    back: f32,
}

impl Count {
    /// The chance that a block comes back, given that of a wider class and how much that counts.
    fn chance(self, wider: f32, prior: f32) -> f32 {
        (self.back + prior * wider) / (self.at_risk + prior)
    }

    fn halve(&mut self) {
        self.at_risk /= 2.0;
        self.back /= 2.0;
    }
}

/// Intervals of age one after another, as a block sees them that reaches the first: the hits and the
/// time in them to be expected, and the chance that it was not used until their end.
#[derive(Clone, Copy, Debug, Default)]
struct Stretch {
    hits: f32,
    time: f32,
    alive: f32,
}

impl Stretch {
    fn worth(self) -> f32 {
        self.hits / self.time
    }

    fn extend(&mut self, later: Stretch) {
        self.hits += self.alive * later.hits;
        self.time += self.alive * later.time;
        self.alive *= later.alive;
    }
}

/// What a block of each age is worth, if these are the chances that it comes back in each interval: the best
/// of hits for time over all ages at which one might stop keeping it.
fn worths(chance: &[f32; AGES]) -> [f32; AGES] {
    // From the last interval on: stretches for which a block is kept as a whole, those first that are
    // worth most. An interval takes in the stretch after it where that is worth more.
    let mut worths = [0.0; AGES];
    let (mut stretches, mut len) = ([Stretch::default(); AGES], 0);
    for (age, &back) in chance.iter().enumerate().rev() {
        let mut stretch = Stretch {
            hits: back,
            time: WIDTHS[age] * (1.0 - back / 2.0),
            alive: 1.0 - back,
        };
        while len > 0 && stretches[len - 1].worth() > stretch.worth() {
            len -= 1;
            stretch.extend(stretches[len]);
        }
        worths[age] = stretch.worth();
        stretches[len] = stretch;
        len += 1;
    }
    worths
}

/// What is known of a class.
#[derive(Debug)]
struct Class {
    counts: [Count; AGES],
    worth: [f32; AGES],
    /// How often its worth was computed.
    version: u32,
    /// Was anything counted since?
    stale: bool,
}

impl Default for Class {
    fn default() -> Self {
        Class {
            counts: [Count::default(); AGES],
            worth: UNSEEN,
            version: 0,
            stale: false,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Reuse {
    /// The last use of every block that is followed; in order, a list from the oldest on.
    uses: Paged<Use>,
    len: usize,
    oldest: u16,
    newest: u16,
    /// The first of each bucket, by hash; there are as many as blocks.
    buckets: Paged<u16>,
    /// For each interval of age: the oldest use that has not reached it.
    cursors: [u16; AGES],
    /// By class; only those that blocks were of.
    classes: Vec<Option<Box<Class>>>,
    seen: usize,
    wide: Vec<Count>,
    common: [Count; AGES],
    /// Class and age of the last block that came back; blocks that did, and times that one did
    /// that was unlike the one before.
    last: (u8, u8),
    backs: f32,
    bursts: f32,
    /// The class whose worth is computed next.
    turn: usize,
    now: u32,
    touches: u64,
    /// Blocks that are followed at most.
    most: usize,
    /// A block is followed if so many bits of its hash are 0.
    sample: u32,
}

impl Reuse {
    /// Nothing is known yet, and not more than `most` blocks are followed at a time.
    pub fn new(most: usize) -> Self {
        Reuse {
            uses: Paged::new(NEVER),
            len: 0,
            oldest: NIL,
            newest: NIL,
            buckets: Paged::new(NIL),
            cursors: [NIL; AGES],
            classes: (0..CLASSES).map(|_| None).collect(),
            seen: 0,
            wide: vec![Count::default(); GENERATIONS * 2 * AGES],
            common: [Count::default(); AGES],
            last: (0, 0),
            // A guess, soon forgotten.
            backs: 20.0,
            bursts: 1.0,
            turn: 0,
            now: 0,
            touches: 0,
            most: most.min(FOLLOWED),
            sample: 0,
        }
    }

    /// What a tick of keeping a block of this class and age is worth, in hits.
    pub fn worth(&self, cell: usize) -> f32 {
        let class = &self.classes[cell / AGES];
        class.as_ref().map_or(&UNSEEN, |class| &class.worth)[cell % AGES]
    }

    /// Changes whenever the worth of a class does.
    pub fn version(&self, class: usize) -> u32 {
        self.classes[class]
            .as_ref()
            .map_or(0, |class| class.version)
    }

    fn class(&mut self, class: u8) -> &mut Class {
        self.classes[class as usize].get_or_insert_with(|| {
            self.seen += 1;
            Box::default()
        })
    }

    /// A block was used and is of this class now; `held` blocks are held.
    pub fn touch(&mut self, hash: u32, class: usize, now: u32, held: usize) {
        self.touches += 1;
        if self.touches.is_multiple_of(REFRESH) {
            self.refresh_next();
        }
        if self.touches.is_multiple_of(MEMORY) {
            let seen = self.classes.iter_mut().flatten();
            let counts = seen.flat_map(|class| &mut class.counts);
            let counts = counts.chain(&mut self.wide).chain(&mut self.common);
            counts.for_each(Count::halve);
            // Never nothing: their ratio is asked for whatever comes.
            self.backs = (self.backs / 2.0).max(1.0);
            self.bursts = (self.bursts / 2.0).max(1.0);
        }
        if held * REACH > self.most << self.sample {
            self.sample += 1;
        }
        if now != self.now {
            self.now = now;
            self.advance();
        }
        if !self.is_followed(hash) {
            return;
        }
        let place = match self.find(hash) {
            Some(place) => {
                self.came_back(place);
                self.unlink(place);
                place
            }
            None => self.follow(hash),
        };
        let is_new = self.classes[class].is_none();
        self.class(class as u8).stale = true;
        if is_new {
            self.refresh(class); // what wider ones tell is known already
        }
        let used = &mut self.uses[place as usize];
        (used.at, used.class, used.reached) = (now, class as u8, 0);
        self.append(place);
    }

    /// The block's last use was of another class, as is known now.
    pub fn correct(&mut self, hash: u32, class: usize) {
        if self.is_followed(hash)
            && let Some(place) = self.find(hash)
        {
            self.uses[place as usize].class = class as u8;
            self.class(class as u8).stale = true;
        }
    }

    /// Blocks are touched soon: has the processor fetch what that needs. A block is `near` some time after it
    /// was `far`.
    pub fn foresee(&self, near: Option<u32>, far: Option<u32>) {
        if self.len == 0 {
            return;
        }
        let bucket = |hash| &self.buckets[place_of(hash, self.len)];
        let first = near.and_then(|hash| self.uses.get(*bucket(hash) as usize));
        first.inspect(|first| prefetch(*first));
        far.inspect(|&hash| prefetch(bucket(hash)));
    }

    fn is_followed(&self, hash: u32) -> bool {
        hash.leading_zeros() >= self.sample
    }

    fn find(&self, hash: u32) -> Option<u16> {
        if self.len == 0 {
            return None;
        }
        let mut place = self.buckets[place_of(hash, self.len)];
        while place != NIL && self.uses[place as usize].hash != hash {
            place = self.uses[place as usize].chain;
        }
        (place != NIL).then_some(place)
    }

    /// Room for a block that was not followed so far: new, or that of the oldest.
    fn follow(&mut self, hash: u32) -> u16 {
        let place = if self.len < self.most {
            self.grow();
            self.len as u16 - 1
        } else {
            let oldest = self.oldest;
            self.unlink(oldest);
            self.forget(oldest);
            self.foresee_oldest();
            oldest
        };
        self.uses[place as usize].hash = hash;
        self.enter(place);
        place
    }

    /// The oldest blocks are forgotten soon: has the processor fetch what that needs.
    fn foresee_oldest(&self) {
        let near = self.uses.get(self.oldest as usize);
        let far = near.and_then(|near| self.uses.get(near.next as usize));
        self.foresee(near.map(|used| used.hash), far.map(|used| used.hash));
    }

    /// Makes room for one block more, and a bucket.
    fn grow(&mut self) {
        self.len += 1;
        self.uses.reach(self.len - 1);
        self.buckets.reach(self.len - 1);
        if self.len > 1 {
            let from = split_of(self.len);
            let mut place = std::mem::replace(&mut self.buckets[from], NIL);
            while place != NIL {
                let next = self.uses[place as usize].chain;
                self.enter(place);
                place = next;
            }
        }
    }

    /// Puts a block in the bucket of its hash.
    fn enter(&mut self, place: u16) {
        let used = &mut self.uses[place as usize];
        let bucket = &mut self.buckets[place_of(used.hash, self.len)];
        used.chain = std::mem::replace(bucket, place);
    }

    /// Takes a block out of its bucket.
    fn forget(&mut self, place: u16) {
        let Use { hash, chain, .. } = self.uses[place as usize];
        let bucket = place_of(hash, self.len);
        let mut before = self.buckets[bucket];
        if before == place {
            self.buckets[bucket] = chain;
            return;
        }
        while self.uses[before as usize].chain != place {
            before = self.uses[before as usize].chain;
        }
        self.uses[before as usize].chain = chain;
    }

    fn append(&mut self, place: u16) {
        let newest = std::mem::replace(&mut self.newest, place);
        let used = &mut self.uses[place as usize];
        (used.prev, used.next) = (newest, NIL);
        match newest {
            NIL => self.oldest = place,
            _ => self.uses[newest as usize].next = place,
        }
        // All before it have reached the first intervals.
        for cursor in self.cursors.iter_mut().take_while(|cursor| **cursor == NIL) {
            *cursor = place;
        }
    }

    fn unlink(&mut self, place: u16) {
        let used = self.uses[place as usize];
        let (prev, next) = (used.prev, used.next);
        match prev {
            NIL => self.oldest = next,
            _ => self.uses[prev as usize].next = next,
        }
        match next {
            NIL => self.newest = prev,
            _ => self.uses[next as usize].prev = prev,
        }
        let later = &mut self.cursors[used.reached as usize..];
        for cursor in later.iter_mut().take_while(|cursor| **cursor == place) {
            *cursor = next;
        }
    }

    /// What counts blocks of this class at this age: by itself, and with wider ones.
    fn counts(&mut self, class: u8, age: usize) -> [&mut Count; 3] {
        let seen = self.classes[class as usize].get_or_insert_default();
        seen.stale = true;
        [
            &mut seen.counts[age],
            &mut self.wide[wide_of(class.into()) * AGES + age],
            &mut self.common[age],
        ]
    }

    /// The block was at risk in every interval until now, and came back in this one.
    fn came_back(&mut self, place: u16) {
        let used = self.uses[place as usize];
        let age = age_of(self.now.wrapping_sub(used.at));
        for age in used.reached as usize..=age {
            let counts = self.counts(used.class, age);
            counts.into_iter().for_each(|count| count.at_risk += 1.0);
        }
        let counts = self.counts(used.class, age);
        counts.into_iter().for_each(|count| count.back += 1.0);
        self.backs += 1.0;
        let this = (used.class, age as u8);
        if std::mem::replace(&mut self.last, this) != this {
            self.bursts += 1.0;
        }
    }

    /// Counts blocks that reached another interval of age without being used.
    fn advance(&mut self) {
        for age in 0..AGES {
            // One tick late, so that a use's class is settled.
            let begin = age_begin(age).max(1);
            while self.cursors[age] != NIL {
                let used = &mut self.uses[self.cursors[age] as usize];
                if self.now.wrapping_sub(used.at) < begin {
                    break;
                }
                used.reached = age as u8 + 1;
                self.cursors[age] = used.next;
                let class = used.class;
                let counts = self.counts(class, age);
                counts.into_iter().for_each(|count| count.at_risk += 1.0);
            }
        }
    }

    /// Computes anew what blocks of a class are worth.
    fn refresh(&mut self, class: usize) {
        let Some(seen) = &mut self.classes[class] else {
            return;
        };
        let mut chance = [0f32; AGES];
        let burst = self.backs / self.bursts;
        // An age that no block has reached yet is no better than those before it: else what was not seen
        // to come back soon would be expected to come back late.
        let mut unknown = UNKNOWN;
        for (age, chance) in chance.iter_mut().enumerate() {
            let common = self.common[age].chance(unknown, PRIOR_WIDE * burst);
            unknown = common.min(UNKNOWN);
            let wide = self.wide[wide_of(class) * AGES + age];
            let wide = wide.chance(common, PRIOR_WIDE * burst);
            *chance = seen.counts[age].chance(wide, PRIOR * burst).min(0.99);
        }
        seen.worth = worths(&chance);
        seen.version = seen.version.wrapping_add(1);
    }

    /// Computes one class anew, if anything was counted.
    fn refresh_next(&mut self) {
        for _ in 0..CLASSES {
            self.turn = (self.turn + 1) % CLASSES;
            let class = self.classes[self.turn].as_mut();
            if class.is_some_and(|class| std::mem::take(&mut class.stale)) {
                return self.refresh(self.turn);
            }
        }
    }

    /// Bytes kept in memory.
    pub fn memory_bytes(&self) -> usize {
        self.uses.memory_bytes()
            + self.buckets.memory_bytes()
            + self.wide.capacity() * size_of::<Count>()
            + self.classes.capacity() * size_of::<Option<Box<Class>>>()
            + self.seen * size_of::<Class>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The worth of an age is the best ratio of all that one gets by trying each age to stop at.
        #[test]
        fn worth_is_the_best_of_all_ages_to_stop_at(chance in prop::array::uniform(0.0f32..0.99)) {
            for (age, found) in worths(&chance).into_iter().enumerate() {
                let (mut alive, mut hits, mut time, mut best) = (1f64, 0f64, 0f64, 0f64);
                for (&back, &width) in chance.iter().zip(&WIDTHS).skip(age) {
                    let (back, width) = (f64::from(back), f64::from(width));
                    hits += alive * back;
                    time += alive * width * (1.0 - back / 2.0);
                    best = best.max(hits / time);
                    alive *= 1.0 - back;
                }
                prop_assert!((f64::from(found) / best - 1.0).abs() < 1e-4, "{age}: {found} and {best}");
            }
        }
    }

    proptest! {
        /// What is followed is found, and nothing else, as the table grows, and as the oldest gives way.
        #[test]
        fn the_last_blocks_are_followed(
            most in 1usize..40,
            touched in prop::collection::vec((0u32..6, 0u32..16), 1..200),
        ) {
            let hash = |(high, low): (u32, u32)| high << 29 | low << 3;
            let (mut reuse, mut last) = (Reuse::new(most), Vec::new());
            for (now, block) in (0..).zip(touched) {
                reuse.touch(hash(block), class_of(1, 0, true), now, 0);
                last.retain(|&other| other != block);
                last.push(block);
                last.drain(..last.len().saturating_sub(most));
                for block in (0..6).flat_map(|high| (0..16).map(move |low| (high, low))) {
                    let found = reuse.find(hash(block)).map(|place| reuse.uses[place as usize].hash);
                    prop_assert_eq!(found, last.contains(&block).then_some(hash(block)));
                }
            }
        }
    }

    #[test]
    fn a_class_is_worth_what_wider_ones_tell_as_soon_as_a_block_is_of_it() {
        let mut reuse = Reuse::new(1 << 12);
        let (once, twice) = (class_of(1, 0, true), class_of(2, 0, true));
        for now in 1..2000 {
            reuse.touch(now % 7, once, now, 18);
            reuse.touch(100 + now % 11, once, now, 18);
        }
        let (known, unseen) = (reuse.worth(once * AGES), UNSEEN[0]);
        assert!(known > unseen * 1.5, "{known} of {unseen}");
        reuse.touch(u32::MAX, twice, 2000, 18);
        let new = reuse.worth(twice * AGES);
        assert!(new > unseen * 1.5, "{new} of {unseen}");
    }
}
