//! What a store is made of.

use std::path::PathBuf;
use std::time::Duration;

use crate::arena::backing::HugePages;
use crate::error::{Error, Kind, Result};
use crate::index::MEMORY_TIERS;
use kvtier_codec::image::PAGE;
use kvtier_nvme::Bytes;

/// Which memory tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// The machine's own memory.
    Dram,
    /// CXL memory: a NUMA node, or a mapped file or DAX device.
    Cxl,
}

/// One memory tier.
#[derive(Clone, Debug)]
pub struct Memory {
    /// Which.
    pub kind: MemoryKind,
    /// Bytes that it may use in all; DRAM's include the index.
    pub size: u64,
    /// Huge pages for private memory.
    pub huge_pages: HugePages,
    /// The NUMA node to bind it to.
    pub numa_node: Option<u32>,
    /// A file or DAX device to map instead of private memory.
    pub path: Option<PathBuf>,
    /// Back it with memory in the background from the start.
    pub prefault: bool,
    /// Read no faster than this many 1e9 bytes a second: for what-if runs.
    pub emulate_gbs: Option<f64>,
}

impl Memory {
    /// A DRAM tier of `size` bytes.
    pub fn dram(size: u64) -> Self {
        Memory {
            kind: MemoryKind::Dram,
            size,
            huge_pages: HugePages::Transparent,
            numa_node: None,
            path: None,
            prefault: true,
            emulate_gbs: None,
        }
    }

    /// The tier's name in results and statistics.
    pub fn name(&self) -> &'static str {
        match self.kind {
            MemoryKind::Dram => "dram",
            MemoryKind::Cxl => "cxl",
        }
    }
}

/// Told (bytes done, bytes in all) while memory is prefaulted.
pub type Progress = Box<dyn Fn(usize, usize) + Send + Sync>;

/// A store's settings.
pub struct Config {
    /// Memory tiers, fastest first; the first is DRAM.
    pub memory: Vec<Memory>,
    /// The NVMe tier.
    pub nvme: Option<kvtier_nvme::Options>,
    /// Bytes of a pool on a device, above all of them; see [`crate::hbm`].
    pub hbm: Option<u64>,
    /// Name of the eviction policy of every tier.
    pub policy: String,
    /// Verify checksums of reads from memory too. Reads from NVMe are always verified.
    pub verify: bool,
    /// The share of a memory tier at which demotion starts.
    pub high: f64,
    /// The share down to which it goes on.
    pub low: f64,
    /// Bytes a day that may be written to NVMe.
    pub write_budget: Option<u64>,
    /// Told how far prefaulting is.
    pub progress: Option<Progress>,
}

/// How long a verb waits that was given no timeout: every wait ends.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// The smallest memory tier.
pub const MIN_MEMORY: u64 = 1 << 20;

impl Config {
    /// These tiers with the defaults: `lru-leaf`, verification, demotion between 98 % and 95 %.
    pub fn new(memory: Vec<Memory>, nvme: Option<kvtier_nvme::Options>) -> Self {
        Config {
            memory,
            nvme,
            hbm: None,
            policy: "auto".into(),
            verify: true,
            high: 0.98,
            low: 0.95,
            write_budget: None,
            progress: None,
        }
    }

    /// Checks that the settings can work together.
    pub fn validate(&self) -> Result<()> {
        let fail = |message: String| Err(Error::new(Kind::Config, message));
        let kinds: Vec<MemoryKind> = self.memory.iter().map(|m| m.kind).collect();
        if !kinds.contains(&MemoryKind::Dram) {
            return fail(
                "no DRAM tier was given, which every store has: reads and writes go through it. Add one in front, such as Dram(\"1GiB\")".into(),
            );
        }
        if kinds.len() > MEMORY_TIERS
            || kinds[0] != MemoryKind::Dram
            || kinds[1..].contains(&MemoryKind::Dram)
        {
            return fail(format!(
                "the memory tiers {kinds:?} were given; a store has one DRAM tier, then at most one CXL tier"
            ));
        }
        for m in &self.memory {
            if m.size < MIN_MEMORY || m.size / PAGE as u64 >= u64::from(u32::MAX - 8) {
                return fail(format!(
                    "a {} tier of {} was given; a memory tier has {} to 16 TiB",
                    m.name(),
                    Bytes(m.size),
                    Bytes(MIN_MEMORY)
                ));
            }
            if m.path.is_some() && (m.numa_node.is_some() || m.kind == MemoryKind::Dram) {
                return fail(
                    "a path was given with a NUMA node, or for DRAM; only a CXL tier is mapped from a path, and then the path decides where it lies".into(),
                );
            }
            if m.emulate_gbs
                .is_some_and(|rate| rate.is_nan() || rate <= 0.0)
            {
                return fail("emulate_gbs must be more than 0, in 1e9 bytes a second".into());
            }
        }
        if self
            .hbm
            .is_some_and(|size| size < MIN_MEMORY || size / PAGE as u64 >= u64::from(u32::MAX - 8))
        {
            return fail(format!(
                "an hbm tier of {} was given; it has {} to 16 TiB",
                Bytes(self.hbm.unwrap_or(0)),
                Bytes(MIN_MEMORY)
            ));
        }
        if !(0.0 < self.low && self.low <= self.high && self.high <= 1.0) {
            return fail(format!(
                "watermarks high {} and low {} were given; 0 < low <= high <= 1 is needed",
                self.high, self.low
            ));
        }
        Ok(())
    }
}
