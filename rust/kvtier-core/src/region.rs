//! Memory of the caller that reads from NVMe go straight into.

use std::any::Any;
use std::sync::Arc;

use crate::sync::Mutex;
use kvtier_codec::image::PAGE;
use kvtier_nvme::{IoBuf, Registration};

use crate::error::Result;
use crate::store::Store;

/// Memory of the caller that is a direct target and source of I/O, until this is dropped.
pub struct Region {
    start: usize,
    len: usize,
    keep: Arc<dyn Any + Send + Sync>,
    /// Held by every operation.
    used: Arc<()>,
    _registration: Mutex<Option<Registration>>,
}

impl Region {
    /// Operations that still read or write the region.
    pub fn in_flight(&self) -> usize {
        Arc::strong_count(&self.used) - 1
    }

    pub(crate) fn holds(&self, at: usize, len: usize) -> bool {
        at >= self.start && at + len <= self.start + self.len
    }

    /// What an operation holds until it has completed.
    pub(crate) fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::new((self.keep.clone(), self.used.clone()))
    }
}

impl Store {
    /// Makes the caller's memory a direct target of reads from NVMe, until the region is dropped.
    /// It must stay valid while `keep` lives; operations hold `keep` until they have completed.
    ///
    /// # Safety
    /// `start` must be valid for reads and writes of `len` bytes while `keep` lives.
    pub unsafe fn register_region(
        &self,
        start: *mut u8,
        len: usize,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<Arc<Region>> {
        self.inner.check_open()?;
        let aligned = (start as usize).next_multiple_of(PAGE);
        let usable = len.saturating_sub(aligned - start as usize) / PAGE * PAGE;
        let registration = self.inner.cold.as_ref().filter(|_| usable > 0).map(|cold| {
            // SAFETY: inside the caller's memory, which `keep` keeps valid.
            let buf = unsafe { IoBuf::new(aligned as *mut u8, usable, keep.clone()) };
            cold.tier.register(buf)
        });
        let region = Arc::new(Region {
            start: start as usize,
            len,
            keep,
            used: Arc::default(),
            _registration: Mutex::new(registration),
        });
        let mut regions = self.inner.regions.lock();
        regions.retain(|region| region.strong_count() > 0);
        regions.push(Arc::downgrade(&region));
        Ok(region)
    }
}
