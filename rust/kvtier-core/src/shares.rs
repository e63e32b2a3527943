//! Whose blocks leave first: the namespaces' shares of each tier, and the account of what they hold.
//!
//! Namespaces without a quota share one pool, and one policy a tier. A namespace with a quota is a
//! *group* of its own, with policies of its own, so that nothing is looked at that must stay: first
//! the group is chosen that gives way, from a few numbers each, then its policy names the block.
//! Blocks of a group have numbers of its own (*places*), so that its policies are as small as it is.

use std::time::Duration;

use hashbrown::HashMap;
use kvtier_codec::image::PAGE;
use kvtier_nvme::Bytes;

pub use crate::account::{Account, Held};
pub(crate) use crate::claim::Claim;
use crate::claim::{Moving, Way};
use crate::error::{Error, Kind, Result};
use crate::index::{PlainHash, grow};
use crate::parts::{Part, Tier};
use crate::policy::{self, Handle, Meta, Policy};

/// The group of all namespaces without a quota.
const COMMON: usize = 0;

/// Stands for a namespace without a quota where there is none.
pub(crate) const NOBODY: u64 = 0;

/// Groups at most, so that choosing one is little work.
pub(crate) const GROUPS: usize = 256;

/// The share of a tier that can be guaranteed; the rest is for tables, for what is on its way, and
/// for parts of blocks.
pub const GUARANTEED: f64 = 0.9;

/// What a namespace may hold.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Quota {
    /// Bytes of each tier that no other namespace can take, fastest tier first; a tier that is left out
    /// guarantees none. Together they are at most [`GUARANTEED`] of what tables leave of a tier.
    pub guaranteed: Vec<u64>,
    /// Bytes of each tier that it never holds more than, in the same order.
    pub cap: Vec<Option<u64>>,
    /// Of what is above its guarantee, namespaces of lower priority lose theirs first.
    pub priority: i32,
    /// How long after it was stored a block is a hit.
    pub ttl: Option<Duration>,
}

/// What needs room in a tier; it says whose blocks may leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Need {
    /// The tier, which is nearly full.
    #[default]
    Tier,
    /// A block of this namespace.
    Block(u64),
    /// A block of this namespace, which is at its cap.
    Cap(u64),
    /// The tables.
    Tables,
}

/// A search for blocks that leave a tier. Those that stay go to the far end of their order: each is
/// looked at once.
#[derive(Clone, Debug)]
pub(crate) struct Search {
    tier: usize,
    need: Need,
    /// Blocks of each group that were not named yet, as far as groups were asked.
    left: Vec<usize>,
}

impl Search {
    pub(crate) fn new(tier: usize, need: Need) -> Self {
        Search {
            tier,
            need,
            left: Vec::new(),
        }
    }

    /// Some of a group's blocks were named.
    fn count(&mut self, group: usize, blocks: usize, named: usize) {
        if self.left.len() <= group {
            self.left.resize(group + 1, usize::MAX);
        }
        let left = &mut self.left[group];
        *left = match *left {
            usize::MAX => blocks,
            left => left,
        }
        .saturating_sub(named);
    }
}

/// How a namespace stands to its cap, in pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cap {
    /// The cap.
    pub(crate) pages: u64,
    /// What it could still take; below 0 where the cap was lowered.
    pub(crate) free: i64,
    /// What is about to leave.
    pub(crate) going: i64,
}

/// Namespaces that are chosen among as one.
#[derive(Default)]
struct Group {
    /// The block of each place; the common pool's places are the handles themselves.
    handles: Vec<Handle>,
    vacant: Vec<u32>,
}

impl Group {
    fn memory(&self) -> usize {
        (self.handles.capacity() + self.vacant.capacity()) * 4
    }
}

/// Shares, policies and accounts of all tiers.
pub struct Shares {
    policy: String,
    /// The last of them is HBM.
    hbm: bool,
    tiers: Vec<Tier>,
    groups: Vec<Group>,
    /// The group of each block, and its place there, once there is more than one group.
    membership: Vec<u8>,
    places: Vec<u32>,
    accounts: HashMap<u64, Account, PlainHash>,
    /// Namespaces whose blocks count to another one.
    counted_to: HashMap<u64, u64, PlainHash>,
    /// The lowest priority of all groups.
    lowest: i32,
    /// Bytes of all policies and places.
    memory: usize,
}

impl Shares {
    /// The policy of that name in every tier; tiers have so many pages, HBM's come last.
    pub fn new(name: &str, sizes: Vec<u64>, hbm: bool) -> Result<Self> {
        let mut shares = Shares {
            policy: name.into(),
            hbm,
            tiers: sizes.into_iter().map(Tier::new).collect(),
            groups: Vec::new(),
            membership: Vec::new(),
            places: Vec::new(),
            accounts: HashMap::default(),
            counted_to: HashMap::default(),
            lowest: 0,
            memory: 0,
        };
        shares.add_group()?;
        Ok(shares)
    }

    fn add_group(&mut self) -> Result<()> {
        let sizes: Vec<u64> = self.tiers.iter().map(|tier| tier.size).collect();
        let policies = policy::in_chains(&self.policy, &sizes, self.hbm)?;
        for (tier, policy) in self.tiers.iter_mut().zip(policies) {
            self.memory += size_of::<Part>() + policy.memory_bytes();
            tier.add_group(policy);
        }
        self.groups.push(Group::default());
        Ok(())
    }

    /// Whose share a namespace's blocks are of.
    fn owner(&self, tag: u64) -> u64 {
        match self.counted_to.is_empty() {
            true => tag,
            false => self.counted_to.get(&tag).copied().unwrap_or(tag),
        }
    }

    /// From now on the blocks of a namespace count to another one, or to whom that counts. Says whose
    /// group they belong to, which [`Shares::adopt`] is to be told of those that are there.
    pub(crate) fn count_to(&mut self, tag: u64, owner: u64) -> Option<u64> {
        let owner = self.owner(owner);
        if self.owner(tag) == owner || self.group_of(tag) != COMMON {
            return None;
        }
        let account = self.accounts.remove(&tag);
        self.counted_to.insert(tag, owner);
        let number = self.group_of(owner);
        for (tier, held) in account.iter().flat_map(|a| &a.held).enumerate() {
            let sum = &mut self.account(owner).held[tier];
            sum.blocks += held.blocks;
            sum.pages += held.pages;
            let parts = &mut self.tiers[tier].parts;
            parts[COMMON].pages -= held.pages;
            parts[number].pages += held.pages;
        }
        (number != COMMON).then_some(owner)
    }

    /// The namespaces whose blocks count to this one: itself, and others.
    pub(crate) fn counted_to(&self, owner: u64) -> Vec<u64> {
        let others = self.counted_to.iter().filter(|&(_, &of)| of == owner);
        std::iter::once(owner)
            .chain(others.map(|(&tag, _)| tag))
            .collect()
    }

    fn account(&mut self, tag: u64) -> &mut Account {
        let tag = self.owner(tag);
        let tiers = self.tiers.len();
        let account = self.accounts.entry(tag);
        account.or_insert_with(|| Account::new(tiers))
    }

    fn group_of(&self, tag: u64) -> usize {
        let account = self.accounts.get(&self.owner(tag));
        account.map_or(COMMON, |a| a.group)
    }

    fn seat(&self, h: Handle) -> (usize, u32) {
        match self.membership.get(h as usize) {
            Some(&group) if group != 0 => (group.into(), self.places[h as usize]),
            _ => (COMMON, h),
        }
    }

    /// A block of this namespace is in the store from now on.
    pub(crate) fn attach(&mut self, h: Handle, tag: u64) {
        let number = self.group_of(tag);
        if number == COMMON {
            return;
        }
        let group = &mut self.groups[number];
        let before = group.memory();
        let place = group.vacant.pop().unwrap_or(group.handles.len() as u32);
        grow(&mut group.handles, place as usize, h);
        group.handles[place as usize] = h;
        self.memory = self.memory + group.memory() - before;
        grow(&mut self.membership, h as usize, 0);
        grow(&mut self.places, h as usize, 0);
        (self.membership[h as usize], self.places[h as usize]) = (number as u8, place);
    }

    /// It is no longer.
    pub(crate) fn detach(&mut self, h: Handle) {
        let (group, place) = self.seat(h);
        if group != COMMON {
            let group = &mut self.groups[group];
            let before = group.memory();
            group.vacant.push(place);
            self.memory = self.memory + group.memory() - before;
            self.membership[h as usize] = 0;
        }
    }

    /// A block's policy in a tier, and the number by which it knows the block.
    fn policy(&mut self, tier: usize, h: Handle) -> (&mut dyn Policy, u32) {
        let (group, place) = self.seat(h);
        (&mut *self.tiers[tier].parts[group].policy, place)
    }

    /// Counts again what a policy knows, to which a block came, or from which one went.
    fn recount(&mut self, tier: usize, group: usize) {
        let tier = &mut self.tiers[tier];
        let part = &mut tier.parts[group];
        let (blocks, memory) = (part.policy.len(), part.policy.memory_bytes());
        tier.blocks = tier.blocks + blocks - part.blocks;
        self.memory = self.memory + memory - part.memory;
        (part.blocks, part.memory) = (blocks, memory);
    }

    /// What the policy of a block's group is told of it.
    fn translated(&self, group: usize, meta: &Meta) -> Meta {
        let parent = meta.parent.map(|parent| self.seat(parent));
        Meta {
            parent: parent.filter(|seat| seat.0 == group).map(|seat| seat.1),
            ..*meta
        }
    }

    /// Blocks of this namespace arrive in a tier soon; see [`Policy::foresee`].
    pub(crate) fn foresee(&self, tier: usize, tag: u64, fingerprints: &[u64]) {
        let part = &self.tiers[tier].parts[self.group_of(tag)];
        part.policy.foresee(fingerprints);
    }

    /// A block of this namespace arrived in a tier.
    pub(crate) fn enter(&mut self, tier: usize, h: Handle, tag: u64, meta: &Meta) {
        let (group, place) = self.seat(h);
        let translated = self.translated(group, meta);
        let policy = &mut self.tiers[tier].parts[group].policy;
        policy.on_insert(place, &translated);
        self.recount(tier, group);
        let pages = u64::from(meta.pages);
        let account = self.account(tag);
        account.held[tier].blocks += 1;
        account.held[tier].pages += pages;
        let group = account.group;
        let part = &mut self.tiers[tier].parts[group];
        part.pages += pages;
        part.largest = part.largest.max(pages);
        self.tiers[tier].touch(group);
    }

    /// A block of this namespace could come to a full tier. Is it worth more than what would leave?
    /// Where that would be another's, it counts as worth it: whose blocks leave is decided first.
    pub(crate) fn admits(&mut self, tier: usize, h: Handle, tag: u64, meta: &Meta) -> bool {
        if !self.is_next(tier, tag, Need::Block(tag)) {
            return true;
        }
        let (group, place) = self.seat(h);
        let meta = self.translated(group, meta);
        self.tiers[tier].parts[group].policy.admit(place, &meta)
    }

    /// It left the tier, in which it took so many pages.
    pub(crate) fn leave(&mut self, tier: usize, h: Handle, tag: u64, pages: u32) {
        let (group, place) = self.seat(h);
        self.tiers[tier].parts[group].policy.on_remove(place);
        self.recount(tier, group);
        let account = self.account(tag);
        account.held[tier].blocks -= 1;
        account.held[tier].pages -= u64::from(pages);
        let group = account.group;
        self.tiers[tier].parts[group].pages -= u64::from(pages);
    }

    /// Blocks were used, each in its tier, in this order.
    pub(crate) fn on_hits(&mut self, used: impl Iterator<Item = (usize, Handle)>) {
        let mut places: Vec<Handle> = Vec::new();
        let mut at = (0, COMMON);
        for (tier, h) in used {
            let (group, place) = self.seat(h);
            let before = std::mem::replace(&mut at, (tier, group));
            if before != at {
                self.tiers[before.0].parts[before.1].policy.on_hits(&places);
                places.clear();
            }
            places.push(place);
            self.tiers[tier].touch(group);
        }
        self.tiers[at.0].parts[at.1].policy.on_hits(&places);
    }

    /// A block was used.
    pub(crate) fn on_hit(&mut self, tier: usize, h: Handle) {
        let (group, place) = self.seat(h);
        self.tiers[tier].parts[group].policy.on_hit(place);
        self.tiers[tier].touch(group);
    }

    /// A block was used in a faster tier, which was told; see [`Policy::on_hit_above`].
    pub(crate) fn on_hit_above(&mut self, tier: usize, h: Handle) {
        let (group, place) = self.seat(h);
        self.tiers[tier].parts[group].policy.on_hit_above(place);
        self.tiers[tier].touch(group);
    }

    /// A block that was named stays; see [`Policy::defer`].
    pub(crate) fn defer(&mut self, tier: usize, h: Handle) {
        let (policy, place) = self.policy(tier, h);
        policy.defer(place);
    }

    /// The caller's score of a block changed.
    pub(crate) fn set_importance(&mut self, h: Handle, score: f32) {
        for tier in 0..self.tiers.len() {
            let (policy, place) = self.policy(tier, h);
            policy.set_importance(place, score);
        }
    }

    /// When a group's turn to give way comes, for this need of the group `own`; the lowest first.
    /// `None`: never. `above`: does any group hold a block more than it is guaranteed? It is found out
    /// once.
    fn turn(
        &self,
        at: usize,
        group: usize,
        (need, own): (Need, usize),
        above: &mut Option<bool>,
    ) -> Option<u8> {
        let tier = &self.tiers[at];
        let part = &tier.parts[group];
        if part.blocks == 0 {
            return None;
        }
        match need {
            Need::Cap(_) => (own == group).then_some(0),
            _ if tier.has_spare(group) => Some(0),
            Need::Tier => None,
            Need::Tables => Some(4),
            Need::Block(_) => {
                let mine = &tier.parts[own];
                let entitled = mine.guaranteed > 0 && tier.claimed(own) <= mine.guaranteed;
                if own == group {
                    return Some(if entitled { 3 } else { 1 });
                }
                // Where guarantees fill the tier, what is above one by less than a block.
                let partly = tier.staying(group) > part.guaranteed && (entitled || mine.pages == 0);
                let any = || tier.parts.iter().any(Part::is_above);
                (partly && !*above.get_or_insert_with(any)).then_some(2)
            }
        }
    }

    /// A need, and the group that has it.
    fn of(&self, need: Need) -> (Need, usize) {
        let own = match need {
            Need::Block(tag) | Need::Cap(tag) => self.group_of(tag),
            Need::Tier | Need::Tables => COMMON,
        };
        (need, own)
    }

    /// May a block of this namespace leave a tier for this need?
    pub(crate) fn may_leave(&self, tier: usize, tag: u64, need: Need) -> bool {
        let one = self.groups.len() == 1;
        let turn = || self.turn(tier, self.group_of(tag), self.of(need), &mut None);
        one || turn().is_some()
    }

    /// As [`Shares::may_leave`], and no other group's blocks leave before.
    pub(crate) fn is_next(&self, tier: usize, tag: u64, need: Need) -> bool {
        if self.groups.len() == 1 {
            return true;
        }
        let (need, mut above) = (self.of(need), None);
        let parts = &self.tiers[tier].parts;
        let mut rank = |g: usize| Some((self.turn(tier, g, need, &mut above)?, parts[g].priority));
        match rank(self.group_of(tag)) {
            None => false,
            Some((0, priority)) if priority == self.lowest => true,
            own => (0..parts.len()).filter_map(rank).min() == own,
        }
    }

    /// Of the groups with blocks that this search has not named, and that were not asked: the one
    /// that gives way first. Of one turn and priority, it is the one whose blocks stay longest.
    fn next_to_give(&self, search: &Search, asked: &[bool; GROUPS]) -> Option<usize> {
        let parts = &self.tiers[search.tier].parts;
        let (need, mut above) = (self.of(search.need), None);
        let mut first: Option<(u8, i32, usize)> = None;
        for (g, part) in parts.iter().enumerate() {
            if asked[g] || search.left.get(g) == Some(&0) {
                continue;
            }
            let Some(turn) = self.turn(search.tier, g, need, &mut above) else {
                continue;
            };
            let rank = (turn, part.priority);
            if first.is_none_or(|(turn, priority, other)| {
                rank < (turn, priority)
                    || (rank == (turn, priority) && part.stays_longer(&parts[other]))
            }) {
                first = Some((turn, part.priority, g));
            }
        }
        first.map(|(_, _, g)| g)
    }

    /// Appends up to `n` distinct victims, the first to leave first; nothing once each block that may
    /// leave was named once in this search. They stay until [`Shares::leave`].
    pub(crate) fn victims(
        &mut self,
        search: &mut Search,
        n: usize,
        eligible: &mut dyn FnMut(Handle) -> bool,
        out: &mut Vec<Handle>,
    ) {
        let named = out.len();
        let mut asked = [false; GROUPS];
        while out.len() < named + n {
            let Some(g) = self.next_to_give(search, &asked) else {
                return;
            };
            asked[g] = true;
            let tier = &mut self.tiers[search.tier];
            let staying = tier.staying(g);
            let part = &mut tier.parts[g];
            let mut wanted = named + n - out.len();
            if part.guaranteed > 0 {
                let spare = staying.saturating_sub(part.guaranteed) / part.largest;
                wanted = wanted.min(spare.max(1) as usize);
            }
            let from = out.len();
            if g == COMMON {
                part.policy.victims(wanted, eligible, out);
            } else {
                let handles = &self.groups[g].handles;
                let mut eligible = |place: u32| eligible(handles[place as usize]);
                part.policy.victims(wanted, &mut eligible, out);
                for h in &mut out[from..] {
                    *h = handles[*h as usize];
                }
            }
            search.count(g, part.blocks, out.len() - from);
            if out.len() > from {
                return; // the next ones may be another's, once these have left
            }
        }
    }

    /// Counts a block of a namespace that is on its way into a tier. `None`: it would take the
    /// namespace above its cap.
    pub(crate) fn claim(&self, tier: usize, tag: u64, pages: u32) -> Option<Claim> {
        let (at, group) = (&self.tiers[tier], self.group_of(tag));
        let free = group == COMMON || at.claimed(group) + u64::from(pages) <= at.parts[group].cap;
        free.then(|| self.count_moving(tier, Way::In, group, pages))
    }

    /// Counts a block that has left a tier while somebody keeps its place there.
    pub(crate) fn keep(&self, tier: usize, tag: u64, pages: u32) -> Claim {
        self.count_moving(tier, Way::In, self.group_of(tag), pages)
    }

    /// Counts a block of a namespace that is about to leave a tier. `None`: it may not.
    pub(crate) fn going(&self, tier: usize, tag: u64, pages: u32, need: Need) -> Option<Claim> {
        self.may_leave(tier, tag, need)
            .then(|| self.count_moving(tier, Way::Out, self.group_of(tag), pages))
    }

    fn count_moving(&self, tier: usize, way: Way, group: usize, pages: u32) -> Claim {
        match group {
            COMMON => Claim::none(),
            group => Claim::on(&self.tiers[tier].moving, way, group, pages.into()),
        }
    }

    /// How a namespace stands to its cap in a tier; `None`: it has no cap.
    pub(crate) fn cap(&self, tier: usize, tag: u64) -> Option<Cap> {
        let (tier, group) = (&self.tiers[tier], self.group_of(tag));
        let cap = tier.parts[group].cap;
        (cap < u64::MAX).then(|| Cap {
            pages: cap,
            free: cap as i64 - tier.claimed(group) as i64,
            going: tier.moving.pages(Way::Out, group) as i64,
        })
    }

    /// Counts reads of a namespace, but not those of what only counts to it.
    pub(crate) fn count_reads(&mut self, tag: u64, hits: usize, misses: usize) {
        if self.owner(tag) == tag {
            let account = self.account(tag);
            account.hits += hits as u64;
            account.misses += misses as u64;
        }
    }

    /// Changes a namespace's account.
    pub(crate) fn count(&mut self, tag: u64, count: impl FnOnce(&mut Account)) {
        count(self.account(tag));
    }

    /// Sets what a namespace may hold, from now on. Blocks that it has already are still the common
    /// pool's to name until [`Shares::adopt`].
    pub(crate) fn set_quota(
        &mut self,
        tag: u64,
        quota: &Quota,
        bytes: &[(&str, u64)],
    ) -> Result<()> {
        let fail = |why: String| Err(Error::new(Kind::Config, why));
        let own = self.group_of(tag);
        for (tier, &(name, size)) in bytes.iter().enumerate() {
            let guaranteed = quota.guaranteed.get(tier).copied().unwrap_or(0);
            let cap = quota.cap.get(tier).copied().flatten();
            if let Some(cap) = cap.filter(|&cap| cap < guaranteed.max(PAGE as u64)) {
                return fail(format!(
                    "a cap of {} of the {name} tier was given with {} guaranteed; a cap is at least that, and at least {PAGE} bytes",
                    Bytes(cap),
                    Bytes(guaranteed)
                ));
            }
            let others: u64 = (0..self.groups.len())
                .filter(|&g| g != own || own == COMMON)
                .map(|g| self.tiers[tier].parts[g].promised * PAGE as u64)
                .sum();
            let most = (size as f64 * GUARANTEED) as u64;
            if guaranteed > 0 && others + guaranteed > most {
                return fail(format!(
                    "{} of the {name} tier were to be guaranteed, and {} are to other namespaces; {} can be in all, which is 90 % of its size. Guarantee less, or use a larger tier",
                    Bytes(guaranteed),
                    Bytes(others),
                    Bytes(most)
                ));
            }
        }
        let own = if own == COMMON { self.open(tag)? } else { own };
        for (tier, at) in self.tiers.iter_mut().enumerate().take(bytes.len()) {
            let part = &mut at.parts[own];
            part.priority = quota.priority;
            let guaranteed = quota.guaranteed.get(tier).copied().unwrap_or(0);
            let cap = quota.cap.get(tier).copied().flatten();
            part.promised = guaranteed.div_ceil(PAGE as u64);
            part.cap = cap.map_or(u64::MAX, |cap| cap / PAGE as u64);
            let priorities = at.parts.iter().map(|part| part.priority);
            self.lowest = priorities.min().unwrap_or(0);
            at.guarantee();
        }
        Ok(())
    }

    /// A group for a namespace that was in the common pool.
    fn open(&mut self, tag: u64) -> Result<usize> {
        let number = self.groups.len();
        if number == GROUPS {
            return Err(Error::new(
                Kind::Config,
                format!(
                    "a quota was given to one more namespace than {}, which is the most; the others share what is left",
                    GROUPS - 1
                ),
            ));
        }
        self.add_group()?;
        let account = self.account(tag);
        account.group = number;
        let held = account.held.clone();
        for (tier, held) in held.iter().enumerate() {
            let parts = &mut self.tiers[tier].parts;
            parts[COMMON].pages -= held.pages;
            parts[number].pages += held.pages;
        }
        Ok(number)
    }

    /// Moves a block that is still the common pool's to the group of its namespace; `pages` are what
    /// it takes in each tier. Parents go before their children.
    pub(crate) fn adopt(&mut self, h: Handle, tag: u64, meta: &Meta, pages: &[u32]) {
        let number = self.group_of(tag);
        if number == COMMON || self.seat(h).0 != COMMON {
            return;
        }
        self.attach(h, tag);
        let (_, place) = self.seat(h);
        for (tier, &pages) in pages.iter().enumerate() {
            let common = &mut self.tiers[tier].parts[COMMON].policy;
            let before = common.len();
            common.on_remove(h);
            let was_there = common.len() < before;
            self.recount(tier, COMMON);
            if was_there {
                let meta = Meta {
                    pages,
                    ..self.translated(number, meta)
                };
                let part = &mut self.tiers[tier].parts[number];
                part.policy.on_insert(place, &meta);
                part.largest = part.largest.max(pages.into());
                self.recount(tier, number);
            }
        }
    }

    /// The numbers of all tiers.
    pub(crate) fn tiers(&self) -> std::ops::Range<usize> {
        0..self.tiers.len()
    }

    /// Blocks in a tier.
    pub(crate) fn len(&self, tier: usize) -> usize {
        self.tiers[tier].blocks
    }

    /// The namespaces that have an account.
    pub(crate) fn tags(&self) -> impl Iterator<Item = u64> {
        self.accounts.keys().copied()
    }

    /// A namespace's account; an empty one if it never held or asked for anything.
    pub(crate) fn read(&self, tag: u64) -> Account {
        let account = self.accounts.get(&self.owner(tag)).cloned();
        account.unwrap_or_else(|| Account::new(self.tiers.len()))
    }

    /// From now on the tables leave so many pages of a tier.
    pub(crate) fn set_left(&mut self, tier: usize, pages: u32) {
        self.tiers[tier].set_left(pages.into());
    }

    /// Pages of a tier that are guaranteed to a namespace, and its cap there.
    pub(crate) fn limits(&self, tier: usize, tag: u64) -> (u64, Option<u64>) {
        let part = &self.tiers[tier].parts[self.group_of(tag)];
        (
            part.guaranteed,
            Some(part.cap).filter(|&cap| cap < u64::MAX),
        )
    }

    /// Bytes kept in memory.
    pub(crate) fn memory_bytes(&self) -> usize {
        let account = size_of::<Account>() + 8 + self.tiers.len() * size_of::<Held>();
        self.memory
            + self.tiers.len() * size_of::<Moving>()
            + self.membership.capacity()
            + self.places.capacity() * 4
            + self.accounts.capacity() * account
            + self.counted_to.capacity() * (size_of::<(u64, u64)>() + 1)
    }
}
