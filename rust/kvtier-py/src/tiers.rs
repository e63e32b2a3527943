//! Descriptions of tiers, as `kvtier.store` hands them over.

use std::path::PathBuf;

use kvtier_core::arena::backing::HugePages;
use kvtier_core::config::{Memory, MemoryKind};
use kvtier_nvme::{EngineKind, Options};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The size of a tier.
pub fn size(tier: &Bound<'_, PyDict>) -> PyResult<u64> {
    match tier.get_item("size")? {
        Some(size) => size.extract(),
        None => Ok(0),
    }
}

/// A memory tier of a dict with `size` and what its kind takes.
pub fn memory(tier: &Bound<'_, PyDict>, kind: MemoryKind) -> PyResult<Memory> {
    let get = |name: &str| tier.get_item(name);
    let mut memory = Memory {
        kind,
        ..Memory::dram(size(tier)?)
    };
    if let Some(huge) = get("huge_pages")? {
        memory.huge_pages = match huge.extract::<&str>()? {
            "hugetlb" => HugePages::Hugetlb,
            "off" => HugePages::Off,
            _ => HugePages::Transparent,
        };
    }
    if let Some(prefault) = get("prefault")? {
        memory.prefault = prefault.extract()?;
    }
    if let Some(node) = get("numa_node")? {
        memory.numa_node = node.extract()?;
    }
    if let Some(path) = get("path")? {
        memory.path = path.extract()?;
    }
    if let Some(rate) = get("emulate_gbs")? {
        memory.emulate_gbs = rate.extract()?;
    }
    Ok(memory)
}

/// An NVMe tier of such a dict.
pub fn nvme(tier: &Bound<'_, PyDict>) -> PyResult<Options> {
    let paths: Vec<PathBuf> = match tier.get_item("paths")? {
        Some(paths) => paths.extract()?,
        None => Vec::new(),
    };
    let mut options = Options::new(paths, size(tier)?);
    if let Some(engine) = tier.get_item("engine")? {
        options.engine = match engine.extract::<&str>()? {
            "io_uring" => EngineKind::IoUring,
            "threads" => EngineKind::Threads,
            _ => EngineKind::Auto,
        };
    }
    if let Some(rate) = tier.get_item("emulate_gbs")? {
        options.emulate_gbs = rate.extract()?;
    }
    Ok(options)
}
