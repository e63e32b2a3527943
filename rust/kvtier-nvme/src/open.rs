//! Opening all paths at once, none of which may hold up the others for ever.

use std::sync::Arc;
use std::time::Instant;

use crate::sync::channel::{RecvTimeoutError, bounded};
use crate::sync::thread;

use crate::device::Device;
use crate::device::lock::Lock;
use crate::engine::{self, Engine, Limits};
use crate::error::{Error, ErrorKind};
use crate::place;
use crate::recover::Found;
use crate::tier::Options;

/// Opens one path, or makes what is to be there.
pub type Opener = Box<dyn FnOnce() -> Result<(Arc<dyn Device>, Option<Lock>), Error> + Send>;

/// A path that was recovered and has its engine.
pub struct Ready {
    pub name: String,
    pub device: Arc<dyn Device>,
    pub engine: Arc<dyn Engine>,
    pub found: Found,
    pub lock: Option<Lock>, // dropped last
}

/// All paths that can be served from.
pub struct Opened {
    /// In the order in which they were given.
    pub paths: Vec<Ready>,
    /// How many are not there.
    pub missing: u64,
}

/// Generations that are skipped for what a path that is not there may have seen of them.
const SKIPPED: u64 = 1 << 32;

impl Opened {
    /// The first generation to give out.
    pub fn generation(&self) -> u64 {
        let known = self.paths.iter().map(|path| path.found.generation).max();
        known.unwrap_or(0) + if self.missing > 0 { SKIPPED } else { 0 }
    }
}

/// Opens all paths. Those whose device fails are left out, if others are there.
pub fn all(
    openers: impl Iterator<Item = (String, Opener)>,
    share: u64,
    options: &Options,
) -> Result<Opened, Error> {
    let until = Instant::now() + options.patience;
    let log = tracing::dispatcher::get_default(Clone::clone);
    let mut answers = Vec::new();
    for (name, opener) in openers {
        let (send, answer) = bounded(1);
        let (kind, log, called) = (options.engine, log.clone(), name.clone());
        let limits = Limits {
            inflight_bytes: options.inflight_bytes,
            emulate_gbs: options.emulate_gbs,
            clock: options.clock.clone(),
        };
        let open = move || -> Result<Ready, Error> {
            let (device, lock) = opener()?;
            let found = place::recover(&*device, &called, share)?;
            let engine = engine::start(kind, device.clone(), &limits)?;
            Ok(Ready {
                name: called,
                device,
                lock,
                engine,
                found,
            })
        };
        thread::Builder::new()
            .name("kvtier-open".into())
            .spawn(move || {
                // If nobody waits any more, all of it is closed again.
                let _ = send.send(tracing::dispatcher::with_default(&log, open));
            })
            .map_err(|e| Error::io("cannot start a thread to open a path", e))?;
        answers.push((name, answer));
    }
    let (mut paths, mut failures) = (Vec::new(), Vec::new());
    for (name, answer) in answers {
        let ready = answer.recv_deadline(until).unwrap_or_else(|e| {
            Err(match e {
                RecvTimeoutError::Timeout => Error::new(
                    ErrorKind::Deadline,
                    format!(
                        "{name} was not open after {:?}: see whether the device hangs, or leave it \
                         out",
                        options.patience
                    ),
                ),
                RecvTimeoutError::Disconnected => {
                    Error::new(ErrorKind::Io, format!("opening {name} ended in a panic"))
                }
            })
        });
        match ready {
            Ok(ready) => paths.push(ready),
            Err(e) => failures.push((name, e)),
        }
    }
    let fatal = failures
        .iter()
        .position(|(_, e)| paths.is_empty() || !e.is_device_failure());
    if let Some(fatal) = fatal {
        return Err(failures.swap_remove(fatal).1);
    }
    for (name, e) in &failures {
        tracing::error!("{name} is bypassed until the tier is opened again: {e}");
    }
    let missing = failures.len() as u64;
    Ok(Opened { paths, missing })
}
