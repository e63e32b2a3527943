//! What the core warns of, handed to Python's `logging` under the name `kvtier`. Any thread may say
//! it; the next call from Python passes it on, because no thread of ours attaches to the interpreter.

use std::fmt::{Debug, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata};

use kvtier_core::sync::Mutex;

/// The most that waits to be passed on; what comes beyond is dropped, for the first ones say why.
const MOST: usize = 100;

static KEPT: Mutex<Vec<(Level, String)>> = Mutex::new(Vec::new());
static ANY: AtomicBool = AtomicBool::new(false);

struct Keeper;

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = match field.name() {
            "message" => write!(self.0, "{value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}

impl tracing::Subscriber for Keeper {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::WARN)
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        let mut kept = KEPT.lock();
        if kept.len() < MOST {
            kept.push((*event.metadata().level(), text.0));
        }
        ANY.store(true, Ordering::Release);
    }

    // Nothing here uses spans.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Keeps from now on what is warned of.
pub fn install() {
    // Refused only where the module is initialised again: it is there already then.
    let _ = tracing::subscriber::set_global_default(Keeper);
}

/// Passes on what was warned of since the last time.
pub fn pass_on(py: Python<'_>) {
    if !ANY.load(Ordering::Acquire) {
        return;
    }
    let Some(mut kept) = KEPT.try_lock() else {
        return; // a thread is speaking, or was when this process forked: the next call passes it on
    };
    let lines = std::mem::take(&mut *kept);
    ANY.store(false, Ordering::Release);
    drop(kept);
    let said = py.import("logging").and_then(|logging| {
        let logger = logging.call_method1("getLogger", ("kvtier",))?;
        for (level, text) in lines {
            let name = if level == Level::ERROR {
                "error"
            } else {
                "warning"
            };
            logger.call_method1(name, ("%s", text))?;
        }
        Ok(())
    });
    if let Err(error) = said {
        error.write_unraisable(py, None);
    }
}
