//! What is at a path: a directory with our file in it, or a block device.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvtier_codec::image::PAGE;

use crate::device::Device;
use crate::device::file::{DATA_FILE, FileDevice, is_block_device};
use crate::device::lock::Lock;
use crate::error::{Error, ErrorKind};
use crate::recover::{self, Found};
use crate::superblock::Geometry;

/// A new file has this name until it is formatted, so that a crash leaves none half made.
const NEW_FILE: &str = "kvtier.dat.new";

/// Locks `path` and opens what is there, made and formatted if there is nothing yet.
pub fn open(path: &Path, share: u64) -> Result<(Arc<dyn Device>, Lock), Error> {
    let name = path.display().to_string();
    if is_block_device(path) {
        let lock = Lock::device(path)?;
        let device = FileDevice::open(path, true)?;
        if recover::is_blank(&device, &name)? {
            recover::format(&device, share, &name)?;
        }
        return Ok((Arc::new(device), lock));
    }
    fs::create_dir_all(path)
        .map_err(|e| Error::io(format!("cannot make the directory {name}"), e))?;
    let lock = Lock::directory(path)?;
    let file = path.join(DATA_FILE);
    if fs::metadata(&file).map_or(true, |m| m.len() == 0) {
        create(path, &file, share, &name)?;
    }
    Ok((Arc::new(FileDevice::open(&file, true)?), lock))
}

/// Locks `path` and opens the store that must be there.
pub fn open_existing(path: &Path) -> Result<(FileDevice, Lock), Error> {
    let lock = if is_block_device(path) {
        Lock::device(path)?
    } else {
        Lock::directory(path)?
    };
    Ok((FileDevice::open(&data_path(path), true)?, lock))
}

/// The file or device that holds the bytes of `path`.
pub fn data_path(path: &Path) -> PathBuf {
    if is_block_device(path) {
        path.to_owned()
    } else {
        path.join(DATA_FILE)
    }
}

/// Recovers `device`, which must have been made with `share` bytes.
pub fn recover(device: &dyn Device, name: &str, share: u64) -> Result<Found, Error> {
    let (superblock, damage) = recover::superblock(device, name)?;
    let wanted = Geometry::new(share)?;
    if superblock.geometry != wanted {
        return Err(Error::new(
            ErrorKind::Config,
            format!(
                "{name} was made with {} bytes, the size given makes it {}: give the old size, or \
                 remove the store to start anew",
                superblock.geometry.total * PAGE as u64,
                wanted.total * PAGE as u64,
            ),
        ));
    }
    // What a killed process wrote without a barrier must be durable before anything relies on it.
    device
        .sync()
        .map_err(|e| Error::io(format!("cannot sync {name}"), e))?;
    let found = recover::recover(device, &superblock);
    for line in damage.iter().chain(&found.damaged) {
        tracing::warn!("{name}: {line}");
    }
    Ok(found)
}

fn create(dir: &Path, file: &Path, share: u64, name: &str) -> Result<(), Error> {
    Geometry::new(share)?; // before anything is written
    let new = dir.join(NEW_FILE);
    let made = FileDevice::create(&new, share).and_then(|device| {
        recover::format(&device, share, name)?;
        fs::rename(&new, file)
            .and_then(|()| File::open(dir)?.sync_all())
            .map_err(|e| Error::io(format!("cannot make {}", file.display()), e))
    });
    if made.is_err() {
        let _ = fs::remove_file(&new); // it may hold much space; the error that matters is `made`
    }
    made
}
