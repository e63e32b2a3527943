//! How soon blocks come back, learned by class.
//!
//! For each class of blocks: the chance that a block which has not been used for some time is used
//! in the next interval (a hazard, estimated from counts of blocks at risk and blocks that came
//! back, whether or not they were still in the tier). From it the *worth* of keeping a block of an
//! age: the best rate, over all times one might give it, of expected hits for expected time. That
//! is the Gittins index of the block (Gittins 1979; for caches see Beckmann, Chen and Cidon, "LHD",
//! NSDI 2018).

use std::collections::VecDeque;

use hashbrown::HashMap;

const GENERATIONS: usize = 8;
const GAPS: usize = 8;
/// Classes of blocks.
pub const CLASSES: usize = GENERATIONS * GAPS * 2;
/// Intervals of age, two for each doubling.
pub const AGES: usize = 40;
/// One block in so many is followed, at first.
const SAMPLE: u64 = 4;
/// So many blocks' worth of what all classes have in common is added to each class: the blocks of a
/// request share their fate, so a hundred of them say little more than one.
const PRIOR: f32 = 100.0;
/// Chance that a block comes back within an interval of age, where nothing is known yet.
const UNKNOWN: f32 = 0.1;
/// Uses in the log at most.
const LOG: usize = 1 << 15;
/// Uses between two halvings of all counts, so that what is new counts for more.
const MEMORY: u64 = 1 << 18;
/// Uses after which the worth of one class is computed anew.
const REFRESH: u64 = 64;

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

#[derive(Clone, Copy, Debug)]
struct Use {
    fingerprint: u64,
    at: u32,
    class: u16,
    /// The block was used again since.
    over: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    at_risk: f32,
    back: f32,
}

/// See the module.
#[derive(Debug)]
pub struct Reuse {
    /// The last use of every block that is followed, in order, and uses that are over.
    log: VecDeque<Use>,
    /// How many uses left the log at its front.
    dropped: u64,
    place: HashMap<u64, u64>,
    /// For each interval of age: the first use in the log that has not reached it.
    cursors: [u64; AGES],
    counts: Vec<Count>,
    common: [Count; AGES],
    worth: Vec<f32>,
    /// Which classes were used since their worth was computed, and whose turn it is.
    stale: [bool; CLASSES],
    turn: usize,
    now: u32,
    uses: u64,
    sample: u64,
}

impl Default for Reuse {
    fn default() -> Self {
        let mut reuse = Reuse {
            log: VecDeque::new(),
            dropped: 0,
            place: HashMap::new(),
            cursors: [0; AGES],
            counts: vec![Count::default(); CLASSES * AGES],
            common: [Count::default(); AGES],
            worth: vec![0.0; CLASSES * AGES],
            stale: [false; CLASSES],
            turn: 0,
            now: 0,
            uses: 0,
            sample: SAMPLE,
        };
        for class in 0..CLASSES {
            reuse.refresh(class);
        }
        reuse
    }
}

impl Reuse {
    /// What a tick of keeping a block of this class and age is worth, in hits.
    pub fn worth(&self, cell: usize) -> f32 {
        self.worth[cell]
    }

    /// A block was used and is of this class now; the tier holds `held` blocks. Says which class's
    /// worth changed.
    pub fn touch(
        &mut self,
        fingerprint: u64,
        class: usize,
        now: u32,
        held: usize,
    ) -> Option<usize> {
        self.uses += 1;
        let changed = self
            .uses
            .is_multiple_of(REFRESH)
            .then(|| self.refresh_next())
            .flatten();
        if self.uses.is_multiple_of(MEMORY) {
            for count in self.counts.iter_mut().chain(&mut self.common) {
                count.at_risk /= 2.0;
                count.back /= 2.0;
            }
        }
        // The log must reach back further than blocks stay.
        if held as u64 * 4 > LOG as u64 * self.sample {
            self.sample *= 2;
        }
        let hash = fingerprint.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        if hash & (self.sample - 1) != 0 {
            return changed;
        }
        let end = self.dropped + self.log.len() as u64;
        if let Some(before) = self.place.insert(fingerprint, end)
            && let Some(at) = before.checked_sub(self.dropped)
        {
            let used = &mut self.log[at as usize];
            used.over = true;
            let (age, class) = (age_of(now.wrapping_sub(used.at)), used.class as usize);
            self.follow(before, age);
            self.counts[class * AGES + age].back += 1.0;
            self.common[age].back += 1.0;
        }
        self.stale[class] = true;
        self.log.push_back(Use {
            fingerprint,
            at: now,
            class: class as u16,
            over: false,
        });
        if now != self.now {
            self.now = now;
            self.advance(now);
        }
        changed
    }

    /// The block whose use is at `place` was used again at `age`: intervals whose cursors have yet
    /// to pass it would not see that it was at risk in them.
    fn follow(&mut self, place: u64, age: usize) {
        let used = self.log[(place - self.dropped) as usize];
        for reached in 0..=age {
            if self.cursors[reached] <= place {
                self.counts[used.class as usize * AGES + reached].at_risk += 1.0;
                self.common[reached].at_risk += 1.0;
            }
        }
    }

    /// The block's last use was of another class, as is known now.
    pub fn correct(&mut self, fingerprint: u64, class: usize) {
        if let Some(place) = self.place.get(&fingerprint)
            && let Some(at) = place.checked_sub(self.dropped)
        {
            self.log[at as usize].class = class as u16;
            self.stale[class] = true;
        }
    }

    fn advance(&mut self, now: u32) {
        for age in 0..AGES {
            // One tick late, so that a use's class is settled.
            let begin = age_begin(age).max(1);
            loop {
                let cursor = self.cursors[age].max(self.dropped);
                let Some(used) = self.log.get((cursor - self.dropped) as usize) else {
                    self.cursors[age] = cursor;
                    break;
                };
                if now.wrapping_sub(used.at) < begin {
                    self.cursors[age] = cursor;
                    break;
                }
                if !used.over {
                    self.counts[used.class as usize * AGES + age].at_risk += 1.0;
                    self.common[age].at_risk += 1.0;
                }
                self.cursors[age] = cursor + 1;
            }
        }
        while self.log.len() > LOG
            && let Some(used) = self.log.pop_front()
        {
            if !used.over {
                self.place.remove(&used.fingerprint);
            }
            self.dropped += 1;
        }
    }

    /// Computes anew what blocks of a class are worth.
    fn refresh(&mut self, class: usize) {
        let mut chance = [0f32; AGES];
        for (age, chance) in chance.iter_mut().enumerate() {
            let common = self.common[age];
            let mean = (common.back + PRIOR * UNKNOWN) / (common.at_risk + PRIOR);
            let count = self.counts[class * AGES + age];
            *chance = ((count.back + PRIOR * mean) / (count.at_risk + PRIOR)).min(0.99);
        }
        for age in 0..AGES {
            let (mut alive, mut hits, mut time, mut best) = (1f32, 0f32, 0f32, 0f32);
            for (later, back) in chance.iter().enumerate().skip(age) {
                hits += alive * back;
                time += alive * WIDTHS[later] * (1.0 - back / 2.0);
                if hits > best * time {
                    best = hits / time;
                }
                alive *= 1.0 - back;
                if alive < 0.001 {
                    break;
                }
            }
            self.worth[class * AGES + age] = best;
        }
    }

    /// Computes one class anew, if any was used.
    fn refresh_next(&mut self) -> Option<usize> {
        for _ in 0..CLASSES {
            self.turn = (self.turn + 1) % CLASSES;
            if std::mem::take(&mut self.stale[self.turn]) {
                self.refresh(self.turn);
                return Some(self.turn);
            }
        }
        None
    }

    /// Bytes kept in memory.
    pub fn memory_bytes(&self) -> usize {
        self.log.capacity() * size_of::<Use>()
            + self.place.capacity() * 17
            + self.counts.capacity() * size_of::<Count>()
            + self.worth.capacity() * 4
    }
}
