//! Notices that the process was forked: a child has the store's memory, but none of its threads.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

static FORKS: AtomicU64 = AtomicU64::new(0);
static HOOKED: OnceLock<()> = OnceLock::new();

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Which process, along a line of forks, a store belongs to.
#[derive(Clone, Copy, Debug)]
pub struct Generation(u64);

impl Generation {
    /// That of this process.
    pub fn now() -> Self {
        HOOKED.get_or_init(|| {
            // SAFETY: the handler only adds to an atomic, which is safe after a fork.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        Generation(FORKS.load(Ordering::Relaxed))
    }

    /// This process is a fork of the one that made the generation.
    pub fn is_stale(self) -> bool {
        FORKS.load(Ordering::Relaxed) != self.0
    }
}
