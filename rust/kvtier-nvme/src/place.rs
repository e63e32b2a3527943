//! What is at a path: a directory with our file in it, or a block device.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvtier_codec::image::PAGE;

use crate::device::Device;
use crate::device::file::{DATA_FILE, FileDevice, is_block_device};
use crate::device::lock::Lock;
use crate::error::{Error, ErrorKind};
use crate::recover::{self, Found};
use crate::superblock::Geometry;
use crate::units::Bytes;

/// A new file has this name until it is formatted, so that a crash leaves none half made.
const NEW_FILE: &str = "kvtier.dat.new";

/// Locks `path` and opens what is there, made and formatted if there is nothing yet.
pub fn open(path: &Path, share: u64) -> Result<(Arc<dyn Device>, Lock), Error> {
    let name = path.display().to_string();
    if is_block_device(path) {
        let lock = Lock::device(path)?;
        let device = FileDevice::open(path, true)?;
        if device.is_empty() {
            let gone = io::Error::from_raw_os_error(libc::ENOMEDIUM);
            return Err(Error::io(format!("{name} has no bytes"), gone));
        }
        if recover::is_blank(&device, &name)? {
            recover::format(&device, share, &name)?;
        }
        return Ok((Arc::new(device), lock));
    }
    make_directory(path, &name)?;
    let mut lock = Lock::directory(path)?;
    let file = path.join(DATA_FILE);
    let blank = match fs::metadata(&file) {
        Ok(found) => found.len() == 0,
        Err(e) if e.kind() == io::ErrorKind::NotFound => true,
        Err(e) => return Err(Error::io(format!("cannot open {}", file.display()), e)),
    };
    if blank {
        create(path, &file, share, &name)?;
    }
    lock.extend(&file)?;
    Ok((Arc::new(FileDevice::open(&file, true)?), lock))
}

/// Makes the last part of `path`, if it is not there: a drive that is not mounted must not fill the
/// one below it.
fn make_directory(path: &Path, name: &str) -> Result<(), Error> {
    let failed = |e| Error::io(format!("cannot make the directory {name}"), e);
    if path.is_dir() {
        return Ok(());
    }
    if !path.exists() && path.starts_with("/dev") && !path.starts_with("/dev/shm") {
        // A device that is gone, not a directory to make: that would fill the memory.
        return Err(failed(io::Error::from_raw_os_error(libc::ENODEV)));
    }
    match fs::create_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(Error::new(
            ErrorKind::Config,
            format!(
                "{name} cannot be made, because the directory it is to lie in is not there: mount its \
                 drive, or make that first"
            ),
        )),
        // Another process was faster.
        Err(_) if path.is_dir() => Ok(()),
        made => made.map_err(failed),
    }
}

/// Locks `path` and opens the store that must be there.
pub fn open_existing(path: &Path) -> Result<(FileDevice, Lock), Error> {
    if is_block_device(path) {
        let lock = Lock::device(path)?;
        return Ok((FileDevice::open(path, true)?, lock));
    }
    let data = data_path(path);
    if let Err(e) = fs::metadata(&data) {
        // Before a lock file is made where no store is.
        return Err(no_store(path, e));
    }
    let mut lock = Lock::directory(path)?;
    lock.extend(&data)?;
    Ok((FileDevice::open(&data, true)?, lock))
}

/// What to say where there should be a store: `error` is why its file cannot be opened.
pub fn no_store(path: &Path, error: io::Error) -> Error {
    let name = path.display();
    let what = match error.kind() {
        io::ErrorKind::NotFound if path.is_dir() => {
            format!("{name} holds no store: it has no {DATA_FILE}")
        }
        io::ErrorKind::NotFound => format!("{name} is not there"),
        _ => format!("cannot open the store in {name}"),
    };
    Error::io(
        format!("{what}. Give the path of an nvme tier, as in Nvme(path, ...)"),
        error,
    )
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
                "{name} was made with {}, the size given makes it {}: give the old size, or \
                 remove the store to start anew",
                Bytes(superblock.geometry.total * PAGE as u64),
                Bytes(wanted.total * PAGE as u64),
            ),
        ));
    }
    // What a killed process wrote without a barrier must be durable before anything relies on it.
    device
        .sync()
        .map_err(|e| Error::io(format!("cannot sync {name}"), e))?;
    let mut found = recover::recover(device, &superblock);
    recover::prepare(device, &found)
        .map_err(|e| Error::io(format!("cannot write the metadata of {name}"), e))?;
    found.damaged.extend(damage);
    for line in &found.damaged {
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
