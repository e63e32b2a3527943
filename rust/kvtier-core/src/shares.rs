//! Whose blocks leave first: the namespaces' shares of each tier, and the account of what they hold.
//!
//! Namespaces without a quota share one pool, and one policy a tier. A namespace with a quota is a
//! *group* of its own, with policies of its own, so that nothing is looked at that must stay: first
//! the group is chosen that gives way, from a few numbers each, then its policy names the block.
//! Blocks of a group have numbers of its own (*places*), so that its policies are as small as it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hashbrown::HashMap;
use kvtier_codec::image::PAGE;

use crate::arena::Arena;
use crate::error::{Error, Kind, Result};
use crate::index::{PlainHash, grow};
use crate::policy::{self, Handle, Meta, Policy};

/// The group of all namespaces without a quota.
const COMMON: usize = 0;

/// Stands for a namespace without a quota where there is none.
pub(crate) const NOBODY: u64 = 0;

/// Groups at most, so that choosing one is little work.
const GROUPS: usize = 256;

/// The share of a tier that can be guaranteed; the rest is for tables, for what is on its way, and
/// for parts of blocks.
pub const GUARANTEED: f64 = 0.9;

/// Touches of a tier, at least, over which it is found out how fast a group's blocks are replaced.
const WINDOW: u64 = 1024;

/// What a namespace may hold.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Quota {
    /// Bytes of each tier that no other namespace can take, fastest tier first; a tier that is left out
    /// guarantees none.
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
    /// Blocks of each group that were not named yet.
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
}

/// Pages that count for as long as this lives: a block on its way into a tier, or out of it.
pub(crate) struct Claim {
    on: Option<(Arc<AtomicU64>, u64)>,
    /// Where somebody may wait for it to end.
    tells: Option<Arc<Arena>>,
}

impl Claim {
    /// Of somebody who has no share.
    fn none() -> Self {
        Claim {
            on: None,
            tells: None,
        }
    }

    fn on(sum: &Arc<AtomicU64>, pages: u64) -> Self {
        sum.fetch_add(pages, Ordering::SeqCst);
        Claim {
            on: Some((sum.clone(), pages)),
            tells: None,
        }
    }

    /// Has those look again, once it ends, who wait for room in this memory tier.
    pub(crate) fn telling(mut self, arena: &Arc<Arena>) -> Self {
        self.tells = self.on.as_ref().map(|_| arena.clone());
        self
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some((sum, pages)) = &self.on {
            sum.fetch_sub(*pages, Ordering::SeqCst);
        }
        if let Some(arena) = &self.tells {
            arena.notify();
        }
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

/// What a namespace holds of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Blocks.
    pub blocks: u64,
    /// Their pages.
    pub pages: u64,
}

/// A namespace's account.
#[derive(Clone, Debug, Default)]
pub struct Account {
    group: usize,
    /// By tier.
    pub held: Vec<Held>,
    /// Blocks read.
    pub hits: u64,
    /// Reads that found nothing.
    pub misses: u64,
    /// Blocks that left the store to make room.
    pub evicted: u64,
    /// Blocks that left since they were older than allowed.
    pub expired: u64,
}

impl Account {
    fn new(tiers: usize) -> Self {
        Account {
            held: vec![Held::default(); tiers],
            ..Account::default()
        }
    }
}

/// A group's part of a tier.
struct Part {
    policy: Box<dyn Policy>,
    guaranteed: u64,
    cap: u64,
    pages: u64,
    /// Pages of its largest block so far.
    largest: u64,
    coming: Arc<AtomicU64>,
    going: Arc<AtomicU64>,
    /// Touches in the window before this one, and in this one.
    touched: [u64; 2],
}

impl Part {
    fn new(policy: Box<dyn Policy>) -> Self {
        Part {
            policy,
            guaranteed: 0,
            cap: u64::MAX,
            pages: 0,
            largest: 1,
            coming: Arc::default(),
            going: Arc::default(),
            touched: [0; 2],
        }
    }

    /// Pages of blocks that are here to stay.
    fn staying(&self) -> u64 {
        let going = self.going.load(Ordering::SeqCst);
        self.pages.saturating_sub(going)
    }

    /// Pages here or on the way here.
    fn claimed(&self) -> u64 {
        self.pages + self.coming.load(Ordering::SeqCst)
    }

    /// Can any of its blocks leave without taking it below its guarantee?
    fn has_spare(&self) -> bool {
        self.guaranteed == 0 || self.staying() >= self.guaranteed + self.largest
    }

    /// Does it hold a block more than it is guaranteed, perhaps on its way out?
    fn is_above(&self) -> bool {
        self.pages > 0 && (self.guaranteed == 0 || self.pages >= self.guaranteed + self.largest)
    }

    /// How long its blocks stay, in no particular unit.
    fn turnover(&self) -> f64 {
        self.pages as f64 / (1 + self.touched[0] + self.touched[1]) as f64
    }
}

/// Namespaces that are chosen among as one.
struct Group {
    /// By tier.
    parts: Vec<Part>,
    priority: i32,
    /// The block of each place; the common pool's places are the handles themselves.
    handles: Vec<Handle>,
    vacant: Vec<u32>,
}

/// Shares, policies and accounts of all tiers.
pub struct Shares {
    policy: String,
    /// Pages of each tier.
    sizes: Vec<u64>,
    groups: Vec<Group>,
    /// The group of each block, and its place there, once there is more than one group.
    membership: Vec<u8>,
    places: Vec<u32>,
    accounts: HashMap<u64, Account, PlainHash>,
    /// Touches of each tier in this window.
    touches: Vec<u64>,
}

impl Shares {
    /// The policy of that name in every tier; tiers have so many pages.
    pub fn new(name: &str, sizes: Vec<u64>) -> Result<Self> {
        let mut shares = Shares {
            policy: name.into(),
            touches: vec![0; sizes.len()],
            sizes,
            groups: Vec::new(),
            membership: Vec::new(),
            places: Vec::new(),
            accounts: HashMap::default(),
        };
        let common = shares.group()?;
        shares.groups.push(common);
        Ok(shares)
    }

    fn group(&self) -> Result<Group> {
        let part = |&pages: &u64| Ok(Part::new(policy::in_chains(&self.policy, pages)?));
        Ok(Group {
            parts: self.sizes.iter().map(part).collect::<Result<_>>()?,
            priority: 0,
            handles: Vec::new(),
            vacant: Vec::new(),
        })
    }

    fn account(&mut self, tag: u64) -> &mut Account {
        let tiers = self.sizes.len();
        let account = self.accounts.entry(tag);
        account.or_insert_with(|| Account::new(tiers))
    }

    fn group_of(&self, tag: u64) -> usize {
        self.accounts.get(&tag).map_or(COMMON, |a| a.group)
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
        let place = group.vacant.pop().unwrap_or(group.handles.len() as u32);
        grow(&mut group.handles, place as usize, h);
        group.handles[place as usize] = h;
        grow(&mut self.membership, h as usize, 0);
        grow(&mut self.places, h as usize, 0);
        (self.membership[h as usize], self.places[h as usize]) = (number as u8, place);
    }

    /// It is no longer.
    pub(crate) fn detach(&mut self, h: Handle) {
        let (group, place) = self.seat(h);
        if group != COMMON {
            self.groups[group].vacant.push(place);
            self.membership[h as usize] = 0;
        }
    }

    /// A block's policy in a tier, and the number by which it knows the block.
    fn policy(&mut self, tier: usize, h: Handle) -> (&mut dyn Policy, u32) {
        let (group, place) = self.seat(h);
        (&mut *self.groups[group].parts[tier].policy, place)
    }

    /// What the policy of a block's group is told of it.
    fn translated(&self, group: usize, meta: &Meta) -> Meta {
        let parent = meta.parent.map(|parent| self.seat(parent));
        Meta {
            parent: parent.filter(|seat| seat.0 == group).map(|seat| seat.1),
            ..*meta
        }
    }

    /// A block of this namespace arrived in a tier.
    pub(crate) fn enter(&mut self, tier: usize, h: Handle, tag: u64, meta: &Meta) {
        let (group, place) = self.seat(h);
        let translated = self.translated(group, meta);
        let policy = &mut self.groups[group].parts[tier].policy;
        policy.on_insert(place, &translated);
        let pages = u64::from(meta.pages);
        let account = self.account(tag);
        account.held[tier].blocks += 1;
        account.held[tier].pages += pages;
        let group = account.group;
        let part = &mut self.groups[group].parts[tier];
        part.pages += pages;
        part.largest = part.largest.max(pages);
        self.touch(tier, group);
    }

    /// It left the tier, in which it took so many pages.
    pub(crate) fn leave(&mut self, tier: usize, h: Handle, tag: u64, pages: u32) {
        let (policy, place) = self.policy(tier, h);
        policy.on_remove(place);
        let account = self.account(tag);
        account.held[tier].blocks -= 1;
        account.held[tier].pages -= u64::from(pages);
        let group = account.group;
        self.groups[group].parts[tier].pages -= u64::from(pages);
    }

    /// A block was used.
    pub(crate) fn on_hit(&mut self, tier: usize, h: Handle) {
        let (policy, place) = self.policy(tier, h);
        policy.on_hit(place);
        self.touch(tier, self.seat(h).0);
    }

    /// A block that was named stays; see [`Policy::defer`].
    pub(crate) fn defer(&mut self, tier: usize, h: Handle) {
        let (policy, place) = self.policy(tier, h);
        policy.defer(place);
    }

    /// The caller's score of a block changed.
    pub(crate) fn set_importance(&mut self, h: Handle, score: f32) {
        for tier in 0..self.sizes.len() {
            let (policy, place) = self.policy(tier, h);
            policy.set_importance(place, score);
        }
    }

    fn touch(&mut self, tier: usize, group: usize) {
        if self.groups.len() == 1 {
            return;
        }
        self.groups[group].parts[tier].touched[1] += 1;
        self.touches[tier] += 1;
        if self.touches[tier] >= WINDOW.max(self.len(tier) as u64) {
            self.touches[tier] = 0;
            for group in &mut self.groups {
                let touched = &mut group.parts[tier].touched;
                *touched = [touched[1], 0];
            }
        }
    }

    /// When a group's turn to give way comes, for this need; the lowest first. `None`: never.
    fn turn(&self, tier: usize, group: usize, need: Need) -> Option<u8> {
        let part = &self.groups[group].parts[tier];
        if part.policy.is_empty() {
            return None;
        }
        match need {
            Need::Cap(tag) => (self.group_of(tag) == group).then_some(0),
            _ if part.has_spare() => Some(0),
            Need::Tier => None,
            Need::Tables => Some(4),
            Need::Block(tag) => {
                let own = self.group_of(tag);
                let mine = &self.groups[own].parts[tier];
                let entitled = mine.guaranteed > 0 && mine.claimed() <= mine.guaranteed;
                if own == group {
                    return Some(if entitled { 3 } else { 1 });
                }
                // Where guarantees fill the tier, what is above one by less than a block.
                let partly = part.staying() > part.guaranteed && (entitled || mine.pages == 0);
                let mut parts = self.groups.iter().map(|group| &group.parts[tier]);
                (partly && !parts.any(Part::is_above)).then_some(2)
            }
        }
    }

    /// May a block of this namespace leave a tier for this need?
    pub(crate) fn may_leave(&self, tier: usize, tag: u64, need: Need) -> bool {
        self.groups.len() == 1 || self.turn(tier, self.group_of(tag), need).is_some()
    }

    /// As [`Shares::may_leave`], and no other group's blocks leave before.
    pub(crate) fn is_next(&self, tier: usize, tag: u64, need: Need) -> bool {
        if self.groups.len() == 1 {
            return true;
        }
        let rank = |g: usize| Some((self.turn(tier, g, need)?, self.groups[g].priority));
        let first = (0..self.groups.len()).filter_map(rank).min();
        first.is_some() && rank(self.group_of(tag)) == first
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
        let Search { tier, need, .. } = *search;
        let named = out.len();
        for g in search.left.len()..self.groups.len() {
            search.left.push(self.groups[g].parts[tier].policy.len());
        }
        let mut asked = [false; GROUPS];
        while out.len() < named + n {
            // Of one turn and priority, the group whose blocks stay longest.
            let next = (0..self.groups.len())
                .filter(|&g| !asked[g] && search.left[g] > 0)
                .filter_map(|g| Some((self.turn(tier, g, need)?, g)))
                .min_by(|&(a, g), &(b, h)| {
                    let (x, y) = (&self.groups[g], &self.groups[h]);
                    (a, x.priority).cmp(&(b, y.priority)).then(
                        y.parts[tier]
                            .turnover()
                            .total_cmp(&x.parts[tier].turnover()),
                    )
                });
            let Some((_, g)) = next else {
                return;
            };
            asked[g] = true;
            let Group { parts, handles, .. } = &mut self.groups[g];
            let part = &mut parts[tier];
            let mut wanted = named + n - out.len();
            if part.guaranteed > 0 {
                let spare = part.staying().saturating_sub(part.guaranteed) / part.largest;
                wanted = wanted.min(spare.max(1) as usize);
            }
            let from = out.len();
            if g == COMMON {
                part.policy.victims(wanted, eligible, out);
            } else {
                let mut eligible = |place: u32| eligible(handles[place as usize]);
                part.policy.victims(wanted, &mut eligible, out);
                for h in &mut out[from..] {
                    *h = handles[*h as usize];
                }
            }
            search.left[g] = search.left[g].saturating_sub(out.len() - from);
            if out.len() > from {
                return; // the next ones may be another's, once these have left
            }
        }
    }

    /// Counts a block of a namespace that is on its way into a tier. `None`: it would take the
    /// namespace above its cap.
    pub(crate) fn claim(&self, tier: usize, tag: u64, pages: u32) -> Option<Claim> {
        let group = self.group_of(tag);
        if group == COMMON {
            return Some(Claim::none());
        }
        let part = &self.groups[group].parts[tier];
        let pages = u64::from(pages);
        (part.claimed() + pages <= part.cap).then(|| Claim::on(&part.coming, pages))
    }

    /// Counts a block that has left a tier while somebody keeps its place there.
    pub(crate) fn keep(&self, tier: usize, tag: u64, pages: u32) -> Claim {
        match self.group_of(tag) {
            COMMON => Claim::none(),
            group => Claim::on(&self.groups[group].parts[tier].coming, pages.into()),
        }
    }

    /// Counts a block of a namespace that is about to leave a tier. `None`: it may not.
    pub(crate) fn going(&self, tier: usize, tag: u64, pages: u32, need: Need) -> Option<Claim> {
        let claim = || match self.group_of(tag) {
            COMMON => Claim::none(),
            group => Claim::on(&self.groups[group].parts[tier].going, pages.into()),
        };
        self.may_leave(tier, tag, need).then(claim)
    }

    /// How a namespace stands to its cap in a tier; `None`: it has no cap.
    pub(crate) fn cap(&self, tier: usize, tag: u64) -> Option<Cap> {
        let part = &self.groups[self.group_of(tag)].parts[tier];
        (part.cap < u64::MAX).then(|| Cap {
            pages: part.cap,
            free: part.cap as i64 - part.claimed() as i64,
            going: part.going.load(Ordering::SeqCst) as i64,
        })
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
                    "a cap of {cap} bytes of the {name} tier was given with {guaranteed} guaranteed; a cap is at least that, and at least {PAGE} bytes"
                ));
            }
            let others: u64 = (0..self.groups.len())
                .filter(|&g| g != own || own == COMMON)
                .map(|g| self.groups[g].parts[tier].guaranteed * PAGE as u64)
                .sum();
            let most = (size as f64 * GUARANTEED) as u64;
            if guaranteed > 0 && others + guaranteed > most {
                return fail(format!(
                    "{guaranteed} bytes of the {name} tier were to be guaranteed, and {others} are to other namespaces; {most} can be in all, which is 90 % of its size. Guarantee less, or use a larger tier"
                ));
            }
        }
        let own = if own == COMMON { self.open(tag)? } else { own };
        let group = &mut self.groups[own];
        group.priority = quota.priority;
        for (tier, part) in group.parts.iter_mut().enumerate().take(bytes.len()) {
            let guaranteed = quota.guaranteed.get(tier).copied().unwrap_or(0);
            let cap = quota.cap.get(tier).copied().flatten();
            part.guaranteed = guaranteed.div_ceil(PAGE as u64);
            part.cap = cap.map_or(u64::MAX, |cap| cap / PAGE as u64);
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
        let group = self.group()?;
        self.groups.push(group);
        let account = self.account(tag);
        account.group = number;
        let held = account.held.clone();
        for (tier, held) in held.iter().enumerate() {
            self.groups[COMMON].parts[tier].pages -= held.pages;
            self.groups[number].parts[tier].pages += held.pages;
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
            let common = &mut self.groups[COMMON].parts[tier].policy;
            let before = common.len();
            common.on_remove(h);
            if common.len() < before {
                let meta = Meta {
                    pages,
                    ..self.translated(number, meta)
                };
                let part = &mut self.groups[number].parts[tier];
                part.policy.on_insert(place, &meta);
                part.largest = part.largest.max(pages.into());
            }
        }
    }

    /// The numbers of all tiers.
    pub(crate) fn tiers(&self) -> std::ops::Range<usize> {
        0..self.sizes.len()
    }

    /// Blocks in a tier.
    pub(crate) fn len(&self, tier: usize) -> usize {
        let parts = self.groups.iter().map(|group| &group.parts[tier]);
        parts.map(|part| part.policy.len()).sum()
    }

    /// The namespaces that have an account.
    pub(crate) fn tags(&self) -> impl Iterator<Item = u64> {
        self.accounts.keys().copied()
    }

    /// A namespace's account; an empty one if it never held or asked for anything.
    pub(crate) fn read(&self, tag: u64) -> Account {
        let account = self.accounts.get(&tag).cloned();
        account.unwrap_or_else(|| Account::new(self.sizes.len()))
    }

    /// Pages of a tier that are guaranteed to a namespace, and its cap there.
    pub(crate) fn limits(&self, tier: usize, tag: u64) -> (u64, Option<u64>) {
        let part = &self.groups[self.group_of(tag)].parts[tier];
        (
            part.guaranteed,
            Some(part.cap).filter(|&cap| cap < u64::MAX),
        )
    }

    /// Bytes kept in memory.
    pub(crate) fn memory_bytes(&self) -> usize {
        let account = size_of::<Account>() + 8 + self.sizes.len() * size_of::<Held>();
        let groups = self.groups.iter().map(|group| {
            let parts = group.parts.iter();
            (group.handles.capacity() + group.vacant.capacity()) * 4
                + parts
                    .map(|p| size_of::<Part>() + p.policy.memory_bytes())
                    .sum::<usize>()
        });
        groups.sum::<usize>()
            + self.membership.capacity()
            + self.places.capacity() * 4
            + self.accounts.capacity() * account
    }
}
