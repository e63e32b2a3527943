//! Traces and their replay.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_core::policy::Handle;
use kvtier_replay::{Outcome, Touch, min, replay};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{from_core, raise};

/// Counts the references that a replay has done, for any thread to read.
#[pyclass(frozen, module = "kvtier._kvtier")]
#[derive(Default)]
pub struct Counter {
    done: Arc<AtomicU64>,
}

#[pymethods]
impl Counter {
    #[new]
    fn new() -> Self {
        Counter::default()
    }

    /// So many so far.
    #[getter]
    fn value(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }
}

/// Requests, each a chain of blocks numbered densely from 0.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct Trace {
    inner: kvtier_replay::Trace,
}

#[pymethods]
impl Trace {
    #[new]
    fn new(
        py: Python<'_>,
        blocks: Vec<Handle>,
        lengths: Vec<usize>,
        tokens: Vec<u64>,
        seconds: Vec<f64>,
        block_tokens: u64,
    ) -> PyResult<Self> {
        py.detach(|| kvtier_replay::Trace::new(blocks, &lengths, tokens, seconds, block_tokens))
            .map(|inner| Trace { inner })
            .map_err(|what| raise(py, "ConfigError", what))
    }

    /// Replays it against a policy in tiers of these capacities in blocks; `tail_first` is the order
    /// in which a request uses its chain, `budget` the blocks a day that may be written to the last
    /// of several tiers. Does not hold the interpreter.
    #[pyo3(signature = (policy, capacities, tail_first, counter, budget=None))]
    fn replay<'py>(
        &self,
        py: Python<'py>,
        policy: &str,
        capacities: Vec<usize>,
        tail_first: bool,
        counter: &Counter,
        budget: Option<f64>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let touch = if tail_first {
            Touch::Reverse
        } else {
            Touch::Forward
        };
        let (trace, done) = (&self.inner, &*counter.done);
        let outcome = py
            .detach(|| match policy {
                "min" => Ok(min(trace, capacities.iter().sum(), false, done)),
                "min-bypass" => Ok(min(trace, capacities.iter().sum(), true, done)),
                _ => replay(trace, policy, &capacities, touch, budget, done),
            })
            .map_err(|e| from_core(py, &e))?;
        as_dict(py, outcome)
    }
}

fn as_dict(py: Python<'_>, outcome: Outcome) -> PyResult<Bound<'_, PyDict>> {
    let out = PyDict::new(py);
    out.set_item("references", outcome.references)?;
    out.set_item("plain_hits", outcome.plain_hits)?;
    out.set_item("prefix_hits", outcome.prefix_hits)?;
    out.set_item("token_hits", outcome.token_hits)?;
    out.set_item("tokens", outcome.tokens)?;
    out.set_item("tier_hits", outcome.tier_hits)?;
    out.set_item("demoted", outcome.demoted)?;
    out.set_item("hit_tokens", outcome.hit_tokens)?;
    Ok(out)
}
