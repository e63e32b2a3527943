//! The state of a store as nested dicts of numbers.

use kvtier_core::stats::Summary;
use kvtier_core::store::{NamespaceReport, Report, TierReport};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The dict that `Store.stats` gives.
pub fn dict<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    out.set_item("blocks", report.blocks)?;
    out.set_item("metadata_bytes", report.metadata)?;
    out.set_item("engine", report.engine)?;
    for (name, value) in &report.counters {
        out.set_item(name, value)?;
    }
    out.set_item("put", summary(py, &report.put)?)?;
    out.set_item("load", summary(py, &report.load)?)?;
    let tiers = PyDict::new(py);
    for tier in &report.tiers {
        tiers.set_item(tier.name, tier_dict(py, tier)?)?;
    }
    out.set_item("tiers", tiers)?;
    let namespaces = PyDict::new(py);
    for namespace in &report.namespaces {
        let name: String = namespace
            .tag
            .to_le_bytes()
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        namespaces.set_item(name, namespace_dict(py, namespace)?)?;
    }
    out.set_item("namespaces", namespaces)?;
    Ok(out)
}

/// The dict that `Namespace.stats` gives.
pub fn namespace_dict<'py>(
    py: Python<'py>,
    namespace: &NamespaceReport,
) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    for (name, value) in &namespace.counters {
        out.set_item(name, value)?;
    }
    let tiers = PyDict::new(py);
    for share in &namespace.shares {
        let tier = PyDict::new(py);
        tier.set_item("blocks", share.blocks)?;
        tier.set_item("used_bytes", share.bytes)?;
        tier.set_item("guaranteed_bytes", share.guaranteed)?;
        tier.set_item("cap_bytes", share.cap)?;
        tiers.set_item(share.tier, tier)?;
    }
    out.set_item("tiers", tiers)?;
    Ok(out)
}

fn tier_dict<'py>(py: Python<'py>, tier: &TierReport) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    out.set_item("size_bytes", tier.size)?;
    out.set_item("capacity_bytes", tier.capacity)?;
    out.set_item("used_bytes", tier.used)?;
    out.set_item("blocks", tier.blocks)?;
    out.set_item("prefaulted_bytes", tier.prefaulted)?;
    out.set_item("quarantined_bytes", tier.quarantined)?;
    out.set_item("emulated", tier.emulated)?;
    for (name, value) in &tier.counters {
        out.set_item(name, value)?;
    }
    out.set_item("get", summary(py, &tier.get)?)?;
    Ok(out)
}

fn summary<'py>(py: Python<'py>, s: &Summary) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    out.set_item("count", s.count)?;
    out.set_item("mean_s", s.mean_s)?;
    out.set_item("p50_s", s.p50_s)?;
    out.set_item("p99_s", s.p99_s)?;
    Ok(out)
}
