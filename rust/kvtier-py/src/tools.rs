//! Looks at directories and machines, without a store.

use std::path::PathBuf;

use kvtier_core::error::Error;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::from_core;
use crate::log;

fn looked<T: Send>(
    py: Python<'_>,
    look: impl FnOnce() -> Result<T, kvtier_nvme::Error> + Send,
) -> PyResult<T> {
    let found = py.detach(|| look().map_err(Error::from));
    log::pass_on(py);
    found.map_err(|e| from_core(py, &e))
}

/// Verifies every block of an NVMe tier over these paths, a report for each; `repair` drops what is
/// damaged, and what follows that.
#[pyfunction]
pub fn check_dirs<'py>(
    py: Python<'py>,
    paths: Vec<PathBuf>,
    repair: bool,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let reports = looked(py, || kvtier_nvme::check_all(&paths, repair))?;
    let dict = |report: kvtier_nvme::CheckReport| {
        let out = PyDict::new(py);
        out.set_item("blocks", report.blocks)?;
        out.set_item("bytes", report.bytes)?;
        out.set_item("corrupt", report.corrupt)?;
        out.set_item("quarantined", report.quarantined)?;
        out.set_item("orphaned", report.orphaned)?;
        out.set_item("dropped", report.repaired)?;
        out.set_item("damaged", report.damaged)?;
        Ok(out)
    };
    reports.into_iter().map(dict).collect()
}

/// Which kernel copies and hashes on this machine.
#[pyfunction]
pub fn copy_kernel() -> &'static str {
    kvtier_core::copy_kernel()
}

/// A number of bytes as messages give it.
#[pyfunction]
pub fn show_bytes(count: u64) -> String {
    kvtier_nvme::Bytes(count).to_string()
}

/// What the journal of an NVMe tier says; reads no blocks and takes no lock.
#[pyfunction]
pub fn inspect_dir<'py>(py: Python<'py>, path: PathBuf) -> PyResult<Bound<'py, PyDict>> {
    let found = looked(py, || kvtier_nvme::inspect(&path))?;
    let out = PyDict::new(py);
    out.set_item("version", found.version)?;
    out.set_item("uuid", found.uuid)?;
    out.set_item("epoch", found.epoch)?;
    out.set_item("size_bytes", found.size)?;
    out.set_item("data_bytes", found.data_bytes)?;
    out.set_item("max_blocks", found.max_blocks)?;
    out.set_item("blocks", found.blocks)?;
    out.set_item("bytes", found.bytes)?;
    out.set_item("used_bytes", found.used_pages * kvtier_core::PAGE as u64)?;
    out.set_item("quarantined", found.quarantined)?;
    out.set_item("checkpoint_records", found.checkpoint_records)?;
    out.set_item("journal_blocks", found.journal_blocks)?;
    out.set_item("journal_capacity", found.journal_capacity)?;
    out.set_item("holder", found.holder)?;
    Ok(out)
}

/// What a directory and its file system offer to an NVMe tier.
#[pyfunction]
pub fn probe<'py>(py: Python<'py>, path: PathBuf) -> PyResult<Bound<'py, PyDict>> {
    let found = looked(py, || Ok(kvtier_nvme::probe(&path)))?;
    let out = PyDict::new(py);
    out.set_item("io_uring", found.io_uring)?;
    out.set_item("io_uring_reason", found.io_uring_reason)?;
    out.set_item("o_direct", found.direct_alignment.is_some())?;
    out.set_item("o_direct_alignment", found.direct_alignment)?;
    out.set_item("o_direct_reason", found.direct_reason)?;
    out.set_item("memlock", found.memlock)?;
    out.set_item("memlock_reason", found.memlock_reason)?;
    Ok(out)
}
