//! What a machine can forbid: space, memory, io_uring, permissions, the directory itself.
//!
//! Each of these changes the whole process, so it runs in one of its own: this very program again.
//! Where the machine does not let us make the condition, the test says so and passes.

#![allow(clippy::unwrap_used)] // the helpers are tests as well

mod common;

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use common::{id, is_intact, put, read};
use kvtier_nvme::{EngineKind, Error, ErrorKind, NvmeTier, Options, Pages, check, inspect, probe};

const SIZE: u64 = 8 << 20;
const NOBODY: u32 = 65534;

fn options(dir: &Path) -> Options {
    Options::new(vec![dir.to_owned()], SIZE)
}

/// Runs `role` in a process of its own over a fresh directory; fails if it does.
fn alone(role: &str) {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let out = Command::new(std::env::current_exe().unwrap())
        .args(["role", "--exact", "--nocapture", "--test-threads=1"])
        .env("KVTIER_TEST_ROLE", role)
        .env("KVTIER_TEST_DIR", dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    for line in said.lines().filter(|line| line.starts_with("skipped")) {
        eprintln!("{role}: {line}");
    }
    assert!(
        out.status.success(),
        "{role}: {said}\n{}",
        String::from_utf8_lossy(&out.stderr)
    );
}

macro_rules! roles {
    ($($role:ident),* $(,)?) => {
        $(#[test] fn $role() { alone(stringify!($role)); })*

        /// The other process; nothing in a plain run of the tests.
        #[test]
        fn role() {
            let Ok(role) = std::env::var("KVTIER_TEST_ROLE") else { return };
            let dir = PathBuf::from(std::env::var("KVTIER_TEST_DIR").unwrap());
            match role.as_str() {
                $(stringify!($role) => roles::$role(&dir),)*
                _ => panic!("no role {role}"),
            }
        }
    };
}

roles! {
    a_refused_io_uring_falls_back_to_threads_aloud,
    an_io_uring_that_cannot_be_entered_falls_back_too,
    no_locked_memory_costs_only_registration,
    a_full_file_system_is_an_error_and_leaves_nothing,
    a_file_system_without_room_for_a_name_is_an_error,
    a_file_system_that_is_read_only_is_an_error,
    a_directory_of_another_owner_is_refused_and_left_alone,
    a_file_of_another_owner_is_refused_and_left_alone,
    a_directory_that_vanishes_does_not_disturb_the_open_store,
    a_removed_lock_file_does_not_let_a_second_store_in,
    links_are_not_followed_to_what_is_not_ours,
    a_block_device_that_is_gone_is_not_made_a_directory,
    a_block_device_holds_a_store,
    a_block_device_in_use_or_with_other_contents_is_left_alone,
    a_path_that_is_gone_at_open_is_bypassed,
    check_finds_parents_on_the_other_paths,
}

/// The kernel refused to make the condition that is to be tested.
fn skipped(what: &str, why: impl std::fmt::Display) {
    println!("skipped: {what}: {why}");
}

fn fails(options: Options) -> Error {
    match NvmeTier::open(options) {
        Ok(_) => panic!("it must not open"),
        Err(e) => e,
    }
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn done(returned: libc::c_int) -> io::Result<()> {
    if returned == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// A file system in memory over `dir`, seen by this process only.
fn mount_tmpfs(dir: &Path, options: &str) -> io::Result<()> {
    let dir = CString::new(dir.to_str().unwrap()).unwrap();
    let options = CString::new(options).unwrap();
    let private = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: valid strings and null pointers where the calls allow them.
    unsafe {
        done(libc::unshare(libc::CLONE_NEWNS))?;
        let none = std::ptr::null();
        done(libc::mount(none, c"/".as_ptr(), none, private, none.cast()))?;
        let kind = c"tmpfs".as_ptr();
        done(libc::mount(
            kind,
            dir.as_ptr(),
            kind,
            0,
            options.as_ptr().cast(),
        ))
    }
}

/// From now on this process is nobody in particular.
fn become_nobody() -> io::Result<()> {
    // SAFETY: plain numbers.
    unsafe {
        done(libc::setgroups(0, std::ptr::null()))?;
        done(libc::setresgid(NOBODY, NOBODY, NOBODY))?;
        done(libc::setresuid(NOBODY, NOBODY, NOBODY))
    }
}

/// From now on the kernel answers this system call with EPERM, as container runtimes make it.
fn forbid(call: libc::c_long) -> io::Result<()> {
    let step = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let mut steps = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0), // the number of the call
        step(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            0,
            1,
            call as u32,
        ),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, refuse),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog {
        len: steps.len() as u16,
        filter: steps.as_mut_ptr(),
    };
    // SAFETY: plain numbers, and a filter that outlives the call. Threads made later inherit it.
    unsafe {
        done(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        done(libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &filter,
        ))
    }
}

/// Collects what is logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{value:?} ");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }
}

mod roles {
    use super::*;

    fn falls_back(dir: &Path, call: libc::c_long) {
        let log = Log::default();
        tracing::subscriber::set_global_default(log.clone()).unwrap();
        if let Err(e) = forbid(call) {
            return skipped("seccomp", e);
        }
        let (tier, _) = NvmeTier::open(options(dir)).unwrap();
        assert_eq!(tier.engine_name(), "threads");
        let slot = put(&tier, id(1), 100_000);
        assert!(read(&tier, slot).is_ok());
        tier.close(None).unwrap();
        let log = log.0.lock().unwrap().clone();
        let told = log
            .iter()
            .filter(|line| line.contains("io_uring does not work here"));
        assert_eq!(told.count(), 1, "{log:?}");
        let mut asked = options(dir);
        asked.engine = EngineKind::IoUring;
        let error = fails(asked);
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.to_string().contains("choose the engine"), "{error}");
        let probe = probe(dir);
        assert!(!probe.io_uring && probe.io_uring_reason.contains("seccomp"));
    }

    pub fn a_refused_io_uring_falls_back_to_threads_aloud(dir: &Path) {
        falls_back(dir, libc::SYS_io_uring_setup);
    }

    pub fn an_io_uring_that_cannot_be_entered_falls_back_too(dir: &Path) {
        falls_back(dir, libc::SYS_io_uring_enter);
    }

    pub fn no_locked_memory_costs_only_registration(dir: &Path) {
        chown(dir, Some(NOBODY), Some(NOBODY)).unwrap_or_else(|e| skipped("chown", e));
        if let Err(e) = become_nobody() {
            skipped("leaving root, which no limit holds for", e);
        }
        let none = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: the structure outlives the call.
        done(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &none) }).unwrap();
        assert_eq!(probe(dir).memlock, Some(0));
        let (tier, _) = NvmeTier::open(options(dir)).unwrap();
        let regions: Vec<_> = (0..20).map(|_| Arc::new(Pages::new(256))).collect();
        // SAFETY: nobody uses the memory.
        let mut held: Vec<_> = regions
            .iter()
            .map(|region| tier.register(unsafe { region.io() }))
            .collect();
        for n in 0..20 {
            let slot = put(&tier, id(n), 100_000);
            assert!(read(&tier, slot).is_ok());
            held.pop(); // entries that were refused are given back as well
        }
        tier.close(None).unwrap();
    }

    pub fn a_full_file_system_is_an_error_and_leaves_nothing(dir: &Path) {
        if let Err(e) = mount_tmpfs(dir, "size=4m") {
            return skipped("a file system of our own", e);
        }
        let home = dir.join("store");
        let error = fails(options(&home));
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        let text = error.to_string();
        assert!(
            text.contains("8 MiB") && text.contains("smaller size"),
            "{text}"
        );
        assert_eq!(names(&home), ["kvtier.lock"]);
        // What fits opens, and goes on when everything else is full.
        let fits = Options::new(vec![home.clone()], 2 << 20);
        let (tier, _) = NvmeTier::open(fits.clone()).unwrap();
        assert!(fs::write(dir.join("filler"), vec![1; 4 << 20]).is_err());
        for n in 0..40 {
            let slot = put(&tier, id(n), 50_000);
            tier.flush(None).unwrap();
            tier.remove(slot, &id(n));
        }
        let kept = put(&tier, id(99), 50_000);
        tier.close(None).unwrap();
        let (tier, recovered) = NvmeTier::open(fits).unwrap();
        assert_eq!(recovered[recovered.len() - 1].slot, kept);
        tier.close(None).unwrap();
        // A second store on what is left.
        let error = fails(Options::new(vec![dir.join("other")], 2 << 20));
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        assert_eq!(names(&dir.join("other")), ["kvtier.lock"]);
    }

    pub fn a_file_system_without_room_for_a_name_is_an_error(dir: &Path) {
        if let Err(e) = mount_tmpfs(dir, "size=16m,nr_inodes=3") {
            return skipped("a file system of our own", e);
        }
        let error = fails(options(&dir.join("store"))); // root, directory, lock file, and no more
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        assert_eq!(names(&dir.join("store")), ["kvtier.lock"]);
    }

    pub fn a_file_system_that_is_read_only_is_an_error(dir: &Path) {
        if let Err(e) = mount_tmpfs(dir, "size=32m") {
            return skipped("a file system of our own", e);
        }
        let (tier, _) = NvmeTier::open(options(dir)).unwrap();
        put(&tier, id(1), 100);
        tier.close(None).unwrap();
        drop(tier); // and with it the open file
        let name = CString::new(dir.to_str().unwrap()).unwrap();
        let again = libc::MS_REMOUNT | libc::MS_RDONLY;
        let none = std::ptr::null();
        // SAFETY: a valid path, and null pointers where the call allows them.
        done(unsafe { libc::mount(none, name.as_ptr(), none, again, none.cast()) }).unwrap();
        let error = fails(options(dir));
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.to_string().contains("Read-only"), "{error}");
        assert!(check(dir, false).is_err());
        assert_eq!(inspect(dir).unwrap().blocks, 1, "looking is allowed");
    }

    /// The contents and attributes of all files.
    fn snapshot(dir: &Path) -> Vec<(String, Vec<u8>, u32, u32, i64)> {
        let each = |name: String| {
            let meta = fs::metadata(dir.join(&name)).unwrap();
            let bytes = fs::read(dir.join(&name)).unwrap();
            (name, bytes, meta.mode(), meta.uid(), meta.mtime())
        };
        names(dir).into_iter().map(each).collect()
    }

    fn refused_to_nobody(dir: &Path, prepare: impl Fn()) {
        let (tier, _) = NvmeTier::open(options(dir)).unwrap();
        put(&tier, id(1), 100);
        tier.close(None).unwrap();
        prepare();
        let before = snapshot(dir);
        let (uid, error, checked) = std::thread::scope(|scope| {
            // Credentials belong to a thread, as far as the kernel is concerned: keep root here.
            let other = scope.spawn(|| {
                // SAFETY: plain numbers; the raw call changes this thread only.
                let left = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
                if left != 0 {
                    skipped("leaving root", io::Error::last_os_error());
                }
                // SAFETY: no arguments.
                let uid = unsafe { libc::geteuid() };
                let opened = NvmeTier::open(options(dir)).err();
                (uid, opened, check(dir, true).err())
            });
            other.join().unwrap()
        });
        if uid == 0 {
            return;
        }
        let error = error.unwrap();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.to_string().contains("Permission denied"), "{error}");
        assert!(error.to_string().contains(dir.to_str().unwrap()), "{error}");
        assert!(checked.is_some());
        assert!(snapshot(dir) == before, "nothing was changed");
    }

    pub fn a_directory_of_another_owner_is_refused_and_left_alone(dir: &Path) {
        refused_to_nobody(dir, || {});
    }

    pub fn a_file_of_another_owner_is_refused_and_left_alone(dir: &Path) {
        refused_to_nobody(dir, || {
            let all = fs::Permissions::from_mode(0o777);
            fs::set_permissions(dir, all).unwrap();
            let readable = fs::Permissions::from_mode(0o666);
            fs::set_permissions(dir.join("kvtier.lock"), readable).unwrap();
        });
    }

    pub fn a_directory_that_vanishes_does_not_disturb_the_open_store(dir: &Path) {
        let home = dir.join("store");
        let (tier, _) = NvmeTier::open(options(&home)).unwrap();
        let first = put(&tier, id(1), 50_000);
        fs::remove_dir_all(&home).unwrap();
        let second = put(&tier, id(2), 50_000);
        tier.flush(None).unwrap();
        assert!(read(&tier, first).is_ok() && read(&tier, second).is_ok());
        tier.close(None).unwrap();
        assert!(!home.exists(), "nothing was made anew");
        assert!(check(&home, false).is_err() && inspect(&home).is_err());
        assert!(!home.exists());
        assert!(NvmeTier::open(options(&home)).unwrap().1.is_empty());
    }

    pub fn a_removed_lock_file_does_not_let_a_second_store_in(dir: &Path) {
        let (tier, _) = NvmeTier::open(options(dir)).unwrap();
        put(&tier, id(1), 100);
        fs::remove_file(dir.join("kvtier.lock")).unwrap();
        let error = fails(options(dir));
        assert!(matches!(error.kind(), ErrorKind::Locked { .. }), "{error}");
        let error = check(dir, true).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Locked { .. }), "{error}");
        tier.close(None).unwrap();
        assert_eq!(NvmeTier::open(options(dir)).unwrap().1.len(), 1);
    }

    pub fn links_are_not_followed_to_what_is_not_ours(dir: &Path) {
        let victim = dir.join("victim");
        for name in ["kvtier.lock", "kvtier.dat.new"] {
            let home = dir.join(format!("at-{name}"));
            fs::create_dir(&home).unwrap();
            fs::write(&victim, b"precious").unwrap();
            std::os::unix::fs::symlink(&victim, home.join(name)).unwrap();
            assert_eq!(fails(options(&home)).kind(), ErrorKind::Io);
            assert_eq!(fs::read(&victim).unwrap(), b"precious");
        }
    }

    pub fn a_block_device_that_is_gone_is_not_made_a_directory(_: &Path) {
        let gone = Path::new("/dev/kvtier-no-such-device");
        let error = fails(options(gone));
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        assert!(!gone.exists());
    }

    /// A block device over a file; it goes with this.
    struct Loop(PathBuf, #[allow(dead_code)] fs::File);

    impl Loop {
        fn over(file: &Path, bytes: &[u8]) -> Option<Loop> {
            // One test at a time: a device that is detached could be given to another.
            let turn = fs::File::create(std::env::temp_dir().join("kvtier-test-loop")).unwrap();
            turn.lock().unwrap();
            fs::write(file, bytes).unwrap();
            let made = Command::new("losetup")
                .args(["--find", "--show"])
                .arg(file)
                .output();
            match made {
                Ok(out) if out.status.success() => {
                    let name = String::from_utf8(out.stdout).unwrap();
                    Some(Loop(PathBuf::from(name.trim()), turn))
                }
                Ok(out) => {
                    skipped("a loop device", String::from_utf8_lossy(&out.stderr).trim());
                    None
                }
                Err(e) => {
                    skipped("losetup", e);
                    None
                }
            }
        }
    }

    impl Drop for Loop {
        fn drop(&mut self) {
            let _ = Command::new("losetup")
                .arg("--detach")
                .arg(&self.0)
                .status();
        }
    }

    pub fn a_block_device_holds_a_store(dir: &Path) {
        let Some(device) = Loop::over(&dir.join("disk"), &vec![0; 16 << 20]) else {
            return;
        };
        let too_much = Options::new(vec![device.0.clone()], 32 << 20);
        assert_eq!(fails(too_much).kind(), ErrorKind::Config);
        for engine in [EngineKind::IoUring, EngineKind::Threads] {
            let mut asked = options(&device.0);
            asked.engine = engine;
            let (tier, recovered) = match NvmeTier::open(asked) {
                Err(e) if engine == EngineKind::IoUring => {
                    skipped("io_uring", e);
                    continue;
                }
                opened => opened.unwrap(),
            };
            for block in &recovered {
                assert!(is_intact(block, &read(&tier, block.slot).unwrap()));
            }
            let from = recovered.len() as u64;
            for n in from..from + 30 {
                put(&tier, id(n), 1 + n as usize * 4001);
                tier.flush(None).unwrap();
            }
            tier.close(None).unwrap();
        }
        let report = check(&device.0, false).unwrap();
        assert!(report.blocks >= 30 && report.corrupt == 0 && report.damaged.is_empty());
        assert_eq!(inspect(&device.0).unwrap().blocks, report.blocks);
    }

    pub fn a_block_device_in_use_or_with_other_contents_is_left_alone(dir: &Path) {
        let file = dir.join("disk");
        let mut foreign = vec![0; 16 << 20];
        foreign[(1 << 20) - 1] = 1;
        {
            let Some(device) = Loop::over(&file, &foreign) else {
                return;
            };
            assert_eq!(fails(options(&device.0)).kind(), ErrorKind::Damaged);
            assert!(check(&device.0, true).is_err());
        }
        assert!(fs::read(&file).unwrap() == foreign, "nothing was changed");
        let Some(device) = Loop::over(&file, &vec![0; 16 << 20]) else {
            return;
        };
        // Another name for the same device does not help.
        let alias = dir.join("alias");
        let number = fs::metadata(&device.0).unwrap().rdev();
        let name = CString::new(alias.to_str().unwrap()).unwrap();
        // SAFETY: a valid path and plain numbers.
        let made = done(unsafe { libc::mknod(name.as_ptr(), libc::S_IFBLK | 0o600, number) });
        let (tier, _) = NvmeTier::open(options(&device.0)).unwrap();
        put(&tier, id(1), 100);
        let mut others = vec![device.0.clone()];
        match made {
            Ok(()) => others.push(alias),
            Err(e) => skipped("mknod", e),
        }
        for other in others {
            let error = fails(options(&other));
            assert!(matches!(error.kind(), ErrorKind::Locked { .. }), "{error}");
        }
        tier.close(None).unwrap();
        assert_eq!(NvmeTier::open(options(&device.0)).unwrap().1.len(), 1);
    }

    fn two(dir: &Path) -> (Options, [PathBuf; 2]) {
        let paths = [dir.join("a"), dir.join("b")];
        (Options::new(paths.to_vec(), 2 * SIZE), paths)
    }

    pub fn a_path_that_is_gone_at_open_is_bypassed(dir: &Path) {
        // Never there.
        let paths = vec![dir.join("a"), PathBuf::from("/dev/kvtier-no-such-device")];
        let (tier, _) = NvmeTier::open(Options::new(paths, 2 * SIZE)).unwrap();
        assert_eq!(tier.stats().failed_paths, 1);
        put(&tier, id(1), 100);
        tier.close(None).unwrap();
        // There, gone, and there again.
        let (file, zeros) = (dir.join("disk"), vec![0; SIZE as usize]);
        let Some(device) = Loop::over(&file, &zeros) else {
            return;
        };
        let paths = vec![dir.join("b"), device.0.clone()];
        let both = Options::new(paths, 2 * SIZE);
        let (tier, _) = NvmeTier::open(both.clone()).unwrap();
        for n in 0..10 {
            put(&tier, id(n), 5000);
        }
        tier.close(None).unwrap();
        drop(tier);
        let losetup = |args: &[&std::ffi::OsStr]| {
            let done = Command::new("losetup").args(args).status().unwrap();
            assert!(done.success());
        };
        losetup(&["--detach".as_ref(), device.0.as_ref()]);
        let (tier, recovered) = NvmeTier::open(both.clone()).unwrap();
        assert_eq!((tier.stats().failed_paths, recovered.len()), (1, 5));
        for block in &recovered {
            assert!(is_intact(block, &read(&tier, block.slot).unwrap()));
        }
        put(&tier, id(20), 5000);
        tier.close(None).unwrap();
        losetup(&[device.0.as_ref(), file.as_ref()]);
        let (tier, recovered) = NvmeTier::open(both).unwrap();
        assert_eq!((tier.stats().failed_paths, recovered.len()), (0, 11));
        tier.close(None).unwrap();
    }

    pub fn check_finds_parents_on_the_other_paths(dir: &Path) {
        let (both, paths) = two(dir);
        let (tier, _) = NvmeTier::open(both).unwrap();
        let mut parent = None;
        for n in 0..10 {
            let slot = tier.reserve(2).unwrap();
            let (done, answer) = common::answer();
            let mut write = common::write_of(slot, id(n), 5000, done);
            write.parent = parent;
            tier.write(write);
            answer.recv().unwrap().unwrap();
            parent = id(n)[..16].try_into().ok();
        }
        tier.close(None).unwrap();
        let alone = check(&paths[0], false).unwrap();
        assert!(alone.orphaned > 0 && alone.damaged.is_empty());
        let reports = kvtier_nvme::check_all(&paths, false).unwrap();
        let orphaned: Vec<_> = reports.iter().map(|r| (r.blocks, r.orphaned)).collect();
        assert_eq!(orphaned, [(5, 0), (5, 0)]);
    }
}
