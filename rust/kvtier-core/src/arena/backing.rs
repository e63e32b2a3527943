//! What lies under an arena: private memory, memory of one NUMA node, or a mapped file or device.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use crate::sync::Mutex;
use kvtier_codec::image::PAGE;
use kvtier_nvme::Bytes;
use kvtier_nvme::device::lock::Lock;

use crate::error::{Error, Kind, Result};

/// Memory that an arena divides into slots. It is mapped until the backing is dropped.
pub trait Backing: Send + Sync {
    /// The first byte, page aligned.
    fn base(&self) -> NonNull<u8>;
    /// Bytes mapped.
    fn size(&self) -> usize;
    /// May the kernel be told that pages are no longer needed (private memory only)?
    fn is_private(&self) -> bool;
    /// Lets others use what lies under it: nobody reads or writes it through this mapping any more.
    fn release(&self);
}

/// Huge pages for private memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// Transparent ones, where the kernel allows it.
    #[default]
    Transparent,
    /// Reserved ones (`hugetlb`); opening fails where too few are reserved.
    Hugetlb,
    /// 4 KiB pages.
    Off,
}

const HUGE: usize = 2 << 20;

struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// Where `mmap` put it, and how much: more than the arena, to align it.
    raw: (*mut libc::c_void, usize),
    private: bool,
    /// What keeps others from mapping the same file.
    lock: Mutex<Option<Lock>>,
}

// SAFETY: the mapping is plain memory; access to it is governed by the arena's pins.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Backing for Mapping {
    fn base(&self) -> NonNull<u8> {
        self.base
    }
    fn size(&self) -> usize {
        self.len
    }
    fn is_private(&self) -> bool {
        self.private
    }
    fn release(&self) {
        self.lock.lock().take();
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by us with these values, and no slot outlives the arena that owns us.
        unsafe { libc::munmap(self.raw.0, self.raw.1) };
    }
}

/// Private memory of at least `len` bytes, on `numa_node` if one is named.
pub fn anonymous(len: usize, huge: HugePages, numa_node: Option<u32>) -> Result<Box<dyn Backing>> {
    let hugetlb = huge == HugePages::Hugetlb;
    let len = len / PAGE * PAGE;
    let (raw_len, flags) = if hugetlb {
        (len.next_multiple_of(HUGE), libc::MAP_HUGETLB)
    } else {
        (len + HUGE, libc::MAP_NORESERVE)
    };
    // SAFETY: a fresh anonymous mapping; nothing else refers to it.
    let raw = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            raw_len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags,
            -1,
            0,
        )
    };
    if raw == libc::MAP_FAILED {
        let hint = if hugetlb {
            "Reserve pages in /proc/sys/vm/nr_hugepages, or use transparent huge pages"
        } else {
            "Give the tier a smaller size, or raise the limit on address space"
        };
        return Err(Error::os(format!(
            "{} of memory were asked for. {hint}",
            Bytes(raw_len as u64)
        )));
    }
    let base = (raw as usize).next_multiple_of(HUGE) as *mut u8;
    let mapping = Mapping {
        base: NonNull::new(base).ok_or_else(|| Error::new(Kind::Storage, "mmap returned null"))?,
        len,
        raw: (raw, raw_len),
        private: true,
        lock: Mutex::new(None),
    };
    let advise = |advice| {
        // SAFETY: the range is ours and page aligned; the advice does not change contents.
        unsafe { libc::madvise(base.cast(), len, advice) }
    };
    if huge == HugePages::Transparent {
        advise(libc::MADV_HUGEPAGE); // best effort: some kernels have none
    }
    advise(libc::MADV_DONTFORK);
    if let Some(node) = numa_node {
        bind(base, len, node)?;
    }
    Ok(Box::new(mapping))
}

/// A file, or a DAX device, mapped shared, by one store at a time. A regular file is created if
/// needed; all of its space is allocated, because a page without any would end the process when it is
/// written to.
pub fn file(path: &Path, len: usize) -> Result<Box<dyn Backing>> {
    let name = path.display();
    let len = len / PAGE * PAGE;
    let refused = |what: &str, e: std::io::Error| {
        Error::new(Kind::Storage, format!("{name} cannot be {what}: {e}"))
    };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600) // it holds what users said
        .open(path)
        .map_err(|e| refused("opened to map it", e))?;
    let lock = Lock::file(path)?;
    let meta = file.metadata().map_err(|e| refused("looked at", e))?;
    if meta.is_file()
        // SAFETY: a plain system call on an open descriptor.
        && let code @ 1.. = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len as libc::off_t) }
    {
        let _ = file.set_len(meta.len()); // what was allocated so far
        let what = format!(
            "given {}. Free some space or give the tier a smaller size",
            Bytes(len as u64)
        );
        return Err(refused(&what, std::io::Error::from_raw_os_error(code)));
    }
    // SAFETY: a fresh shared mapping of a file that stays open inside the mapping.
    let raw = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if raw == libc::MAP_FAILED {
        return Err(Error::os(format!(
            "{name} cannot be mapped ({})",
            Bytes(len as u64)
        )));
    }
    // SAFETY: the range is ours; the advice does not change contents.
    unsafe { libc::madvise(raw, len, libc::MADV_DONTFORK) };
    Ok(Box::new(Mapping {
        base: NonNull::new(raw.cast())
            .ok_or_else(|| Error::new(Kind::Storage, "mmap returned null"))?,
        len,
        raw: (raw, len),
        private: false,
        lock: Mutex::new(Some(lock)),
    }))
}

/// The NUMA nodes of this machine that have memory, by number.
pub fn numa_nodes() -> Vec<u32> {
    let mut nodes: Vec<u32> = std::fs::read_dir("/sys/devices/system/node")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            entry
                .file_name()
                .to_str()?
                .strip_prefix("node")?
                .parse()
                .ok()
        })
        .filter(|node| {
            let path = PathBuf::from(format!("/sys/devices/system/node/node{node}/meminfo"));
            std::fs::read_to_string(path).is_ok_and(|text| !text.contains("MemTotal:        0 kB"))
        })
        .collect();
    nodes.sort_unstable();
    nodes
}

fn bind(base: *mut u8, len: usize, node: u32) -> Result<()> {
    const MPOL_BIND: libc::c_int = 2;
    let mut mask = [0u64; 16];
    let no_node = || {
        Error::new(
            Kind::Config,
            format!(
                "NUMA node {node} was asked for; this machine has {:?}. Name one of them",
                numa_nodes()
            ),
        )
    };
    if node as usize >= mask.len() * 64 || !numa_nodes().contains(&node) {
        return Err(no_node());
    }
    mask[node as usize / 64] |= 1 << (node % 64);
    // SAFETY: binds only the range that we just mapped; the mask outlives the call.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            base,
            len,
            MPOL_BIND,
            mask.as_ptr(),
            mask.len() * 64,
            0,
        )
    };
    if rc != 0 {
        return Err(Error::os(format!(
            "binding {} to NUMA node {node}",
            Bytes(len as u64)
        )));
    }
    Ok(())
}

/// The NUMA node on which each of these (touched) pages lies, or a negative error number.
pub fn nodes_of(pages: &[*const u8]) -> Result<Vec<i32>> {
    let mut status = vec![0i32; pages.len()];
    // SAFETY: with null `nodes`, move_pages only reports; all arrays have `pages.len()` entries.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            pages.len(),
            pages.as_ptr(),
            std::ptr::null::<i32>(),
            status.as_mut_ptr(),
            0,
        )
    };
    if rc != 0 {
        return Err(Error::os("asking where pages lie (move_pages)"));
    }
    Ok(status)
}
