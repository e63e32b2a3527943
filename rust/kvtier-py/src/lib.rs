//! The extension module `kvtier._kvtier`: thin classes over the core.
//!
//! Every verb lets go of the interpreter before it takes a lock, moves bytes or waits. No Rust
//! thread ever attaches to Python: asynchronous work announces itself through an eventfd.

mod arguments;
mod bounds;
mod buffers;
mod codecs;
mod core;
mod dlpack;
mod errors;
mod hbm;
mod lease;
mod log;
mod ops;
mod policy;
mod progress;
mod region;
mod replay;
mod report;
mod space;
mod tiers;
mod tools;

use kvtier_core::config::DEFAULT_TIMEOUT;
use pyo3::prelude::*;

/// The native half of kvtier; use it through the package `kvtier`.
#[pymodule(gil_used = false)]
fn _kvtier(m: &Bound<'_, PyModule>) -> PyResult<()> {
    log::install();
    m.add_class::<core::Core>()?;
    m.add_class::<space::Space>()?;
    m.add_class::<lease::Lease>()?;
    m.add_class::<lease::BlockView>()?;
    m.add_class::<ops::Completions>()?;
    m.add_class::<ops::Operation>()?;
    m.add_class::<ops::Job>()?;
    m.add_class::<region::Region>()?;
    m.add_class::<progress::Progress>()?;
    m.add_class::<hbm::Feed>()?;
    m.add_class::<hbm::Batch>()?;
    m.add_class::<hbm::Placed>()?;
    m.add_class::<dlpack::DlpackView>()?;
    m.add_class::<bounds::BareDisk>()?;
    m.add_class::<policy::Policy>()?;
    m.add_class::<replay::Trace>()?;
    m.add_class::<replay::Counter>()?;
    m.add_function(wrap_pyfunction!(bounds::bound_memcpy, m)?)?;
    m.add_function(wrap_pyfunction!(tools::check_dirs, m)?)?;
    m.add_function(wrap_pyfunction!(tools::inspect_dir, m)?)?;
    m.add_function(wrap_pyfunction!(tools::probe, m)?)?;
    m.add_function(wrap_pyfunction!(tools::copy_kernel, m)?)?;
    m.add_function(wrap_pyfunction!(tools::show_bytes, m)?)?;
    m.add_class::<codecs::CodecBench>()?;
    m.add_function(wrap_pyfunction!(codecs::codec_list, m)?)?;
    m.add_function(wrap_pyfunction!(codecs::codec_kernel, m)?)?;
    m.add_function(wrap_pyfunction!(codecs::codec_encode, m)?)?;
    m.add_function(wrap_pyfunction!(codecs::codec_frames, m)?)?;
    m.add_function(wrap_pyfunction!(codecs::codec_decode, m)?)?;
    m.add_function(wrap_pyfunction!(codecs::codec_to_fp8, m)?)?;
    m.add_function(wrap_pyfunction!(codecs::codec_from_fp8, m)?)?;
    m.add_function(wrap_pyfunction!(codecs::codec_unzstd, m)?)?;
    m.add("TIERS", core::TIERS)?;
    m.add("DEFAULT_TIMEOUT", DEFAULT_TIMEOUT.as_secs_f64())?;
    m.add("MISSES", core::misses())?;
    m.add("POLICIES", kvtier_core::policy::NAMES.to_vec())?;
    m.add("__version__", env!("CARGO_PKG_VERSION"))
}
