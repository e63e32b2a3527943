"""What a machine can refuse: room, memory, descriptors, threads, io_uring, permissions. Each is a clear error, after
which the process is as before; nothing that was kept is lost, and nothing hangs.

Each test limits a program of its own (see ``confine``).
"""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blocks import KIB, MIB, key, keys, payload
from kvtier import ClosedError, Cxl, Dram, LockedError, Nvme, Store
from programs import program

START = """
import os, resource, sys, threading, time
from pathlib import Path
from blocks import *
from confine import *
from kvtier import *
payload(key(0), 1)  # imports what it needs
here = Path(sys.argv[1])
def refused(open, *words):
    try:
        open().close()
    except (StorageError, ConfigError) as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in {error}"
        return error
    raise AssertionError("it was not refused")
def settles(true):
    # What nobody joins ends by itself.
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
def read(*tiers):
    with Store(*tiers) as store:
        store.prefaulted(timeout=30)
        for name in keys(20):
            assert store.get(name).tobytes() == payload(name, 50 * KIB)
def works(*tiers):
    with Store(*tiers) as store:
        for name in keys(20):
            assert store.put(name, payload(name, 50 * KIB)).stored
            assert store.get(name).tobytes() == payload(name, 50 * KIB)
        store.register_region(bytearray(MIB))
        store.flush()
    with Store(*tiers) as store:
        assert sum(store.contains(keys(20))) == (20 if len(tiers) > 1 else 0)
        for name in keys(20) if len(tiers) > 1 else []:
            assert store.get(name).tobytes() == payload(name, 50 * KIB)
        return store.stats()
"""


@pytest.fixture
def here() -> Iterator[Path]:
    """A directory that anybody may use, under directories that anybody may enter."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o777)
        yield Path(made)


def confined(here: Path, text: str) -> str:
    """Runs a program that ends well, and returns what it warned of."""
    ran = program(START + text, here)
    if "not allowed here" in ran.stdout:
        pytest.skip(f"the machine does not let us make the condition: {ran.stdout.strip()}")
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def test_a_full_file_system(here: Path) -> None:
    text = """
own_file_system(here, "size=4m")
memory, kv = Dram("2MiB"), here / "kv"
refused(lambda: Store(memory, Nvme(kv, "8MiB")), "8 MiB", "No space left", "smaller size")
works(memory, Nvme(kv, "2MiB"))
try:
    (here / "filler").write_bytes(bytes(4 * MIB))
except OSError:
    pass
store = Store(memory, Nvme(kv, "2MiB"))  # all of its space was taken at once
for name in keys(100, "more"):
    assert store.put(name, payload(name, 50 * KIB)).stored
assert store.stats()["tiers"]["nvme"]["errors"] == 0
store.close()
(here / "filler").unlink()
refused(lambda: Store(memory, Cxl("8MiB", path=here / "memory")), "8 MiB", "No space left", "smaller size")
# Again: what the first try left must not look like a file that has its space.
refused(lambda: Store(memory, Cxl("8MiB", path=here / "memory")), "No space left")
(here / "memory").unlink()
(here / "memory").touch()
os.truncate(here / "memory", 8 * MIB)
refused(lambda: Store(memory, Cxl("8MiB", path=here / "memory")), "No space left")
"""
    confined(here, text)


def test_a_limit_on_the_size_of_files(here: Path) -> None:
    text = """
resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, 4 * MIB))
memory, kv = Dram("2MiB"), here / "kv"
refused(lambda: Store(memory, Nvme(kv, "8MiB")), "8 MiB", "too large", "smaller size")
refused(lambda: Store(memory, Cxl("8MiB", path=here / "memory")), "8 MiB", "too large", "smaller size")
works(memory, Nvme(kv, "2MiB"))
"""
    confined(here, text)


def test_no_locked_memory(here: Path) -> None:
    text = """
become_nobody()
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
works(Dram("4MiB"), Nvme(here / "kv", "8MiB"))
"""
    confined(here, text)


def test_too_little_address_space(here: Path) -> None:
    text = """
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 400 * MIB, -1))
refused(lambda: Store(Dram("1TiB"), Nvme(here / "kv", "8MiB")), "this process may use", "Give less")
refused(lambda: Store(Dram("410MiB"), Nvme(here / "kv", "8MiB")), "smaller size", "limit on address space")
works(Dram("4MiB"), Nvme(here / "kv", "8MiB"))
"""
    confined(here, text)


@pytest.mark.parametrize("call", ["IO_URING_SETUP", "IO_URING_ENTER"])
def test_a_seccomp_profile_without_io_uring(call: str, here: Path) -> None:
    text = """
forbid(CALL)
stats = works(Dram("4MiB"), Nvme(here / "kv", "8MiB"))
assert stats["engine"] == "threads"
refused(lambda: Store(Dram("4MiB"), Nvme(here / "kv", "8MiB", engine="io_uring")), 'choose the engine "threads"')
"""
    warned = confined(here, text.replace("CALL", call))
    assert warned.count("io_uring does not work here") == 2, "once for each store that fell back, and aloud"


def test_every_number_of_descriptors(here: Path) -> None:
    """However many are left: it opens or says what is missing, and then leaves no lock and no descriptor behind."""
    text = """
memory, nvme = Dram("2MiB"), Nvme(here / "kv", "4MiB")
works(memory, nvme)
def taken():
    return sorted(os.listdir("/proc/self/fd"))
before, outcomes = taken(), set()
top = max(map(int, before)) + 1
for more in range(24):
    resource.setrlimit(resource.RLIMIT_NOFILE, (top + more, 4096))
    try:
        read(memory, nvme)
        outcomes.add("open")
    except (StorageError, ConfigError) as error:
        assert "Too many open files" in str(error), str(error)
        outcomes.add("refused")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    settles(lambda: taken() == before)
    read(memory, nvme)
assert outcomes == {"open", "refused"}
"""
    confined(here, text)


def test_every_number_of_threads(here: Path) -> None:
    """Wherever the start of a thread fails: the store says so, the threads before it end, and the directory is free."""
    text = """
memory, nvme = Dram("2MiB"), Nvme(here / "kv", "4MiB")
become_nobody()
hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
works(memory, nvme)
def threads():
    return len(os.listdir("/proc/self/task"))
def mine():
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            total += len(os.listdir(process / "task")) if process.stat().st_uid == os.getuid() else 0
        except OSError:
            pass
    return total
before, outcomes = threads(), set()
for more in range(20):
    soft = mine() + more
    resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    try:
        read(memory, nvme)
        outcomes.add("open")
    except StorageError as error:
        assert "thread" in str(error), str(error)
        assert "Resource temporarily unavailable" in str(error), str(error)
        outcomes.add("refused")
    resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
    settles(lambda: threads() == before)
    read(memory, nvme)
assert outcomes == {"open", "refused"}
"""
    confined(here, text)


def test_a_read_only_file_system(here: Path) -> None:
    text = """
own_file_system(here, "size=8m")
works(Dram("1MiB"), Nvme(here / "kv", "2MiB"))
make_read_only(here)
refused(lambda: Store(Dram("1MiB"), Nvme(here / "kv", "2MiB")), "Read-only file system", str(here / "kv"))
refused(lambda: Store(Dram("1MiB"), Nvme(here / "new", "2MiB")), "Read-only file system", str(here / "new"))
refused(lambda: Store(Dram("1MiB"), Cxl("1MiB", path=here / "memory")), "Read-only file system", str(here / "memory"))
"""
    confined(here, text)


def snapshot(folder: Path) -> list[tuple[str, bytes, int, int]]:
    files = sorted(folder.iterdir())
    return [(file.name, file.read_bytes(), file.stat().st_uid, file.stat().st_mode) for file in files]


def test_a_directory_of_another_owner(here: Path) -> None:
    kv = here / "kv"
    with Store(Dram("1MiB"), Nvme(kv, "2MiB")) as store:
        store.put(key("a"), b"a")
    kv.chmod(0o500)  # without root for another owner, these say the same
    for file in kv.iterdir():
        file.chmod(0o400)
    before = snapshot(kv)
    text = """
become_nobody()
refused(lambda: Store(Dram("1MiB"), Nvme(here / "kv", "2MiB")), "Permission denied", str(here / "kv"))
"""
    confined(here, text)
    assert snapshot(kv) == before
    kv.chmod(0o700)
    for file in kv.iterdir():
        file.chmod(0o600)
    with Store(Dram("1MiB"), Nvme(kv, "2MiB")) as store:
        assert store.get(key("a")).tobytes() == b"a"  # type: ignore[union-attr]


def test_a_path_that_is_missing_is_said_aloud(here: Path) -> None:
    """One of two paths cannot be used: the store opens with the other, serves from it, and warns."""
    text = """
(here / "b").mkdir()
own_file_system(here / "b", "size=8m")
memory, both = Dram("2MiB"), Nvme((here / "a", here / "b"), "8MiB")
works(memory, both)
make_read_only(here / "b")
store = Store(memory, both)
stats = store.stats()["tiers"]["nvme"]
assert stats["failed_paths"] == 1
left = [name for name in keys(20) if store.contains([name])[0]]
assert 0 < len(left) < 20
for name in left:
    assert store.get(name).tobytes() == payload(name, 50 * KIB)
store.close()
make_read_only(here / "b", False)
with Store(memory, both) as store:
    assert all(store.contains(keys(20)))
"""
    assert "is bypassed" in confined(here, text)


def test_a_second_store_on_the_same_memory_file(here: Path) -> None:
    """Two stores never share the file of a CXL tier: what one writes would be in the other's leases."""
    text = """
tiers = Dram("1MiB"), Cxl("2MiB", path=here / "memory")
try:
    Store(*tiers)
except LockedError as error:
    assert "in use by another process" in str(error)
else:
    raise AssertionError("both opened")
"""
    tiers = Dram("1MiB"), Cxl("2MiB", path=here / "memory")
    with Store(*tiers) as store:
        store.put_many(keys(6), [payload(name, 256 * KIB) for name in keys(6)])
        confined(here, text)
        assert (here / "memory").stat().st_mode & 0o077 == 0, "others may not read what users said"
        assert "cxl" in store.match(keys(6)).tiers
        lease = store.lease(keys(6))
    # Closed, and the file is still in use: by the lease.
    assert [bytes(view or b"") for view in lease.views] == [payload(name, 256 * KIB) for name in keys(6)]
    with pytest.raises(LockedError):
        Store(*tiers)
    lease.release()
    del lease
    Store(*tiers).close()


def test_a_closed_store_gives_its_memory_back() -> None:
    """Though somebody still refers to it, and but for what a lease holds."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    store = Store(Dram("256MiB"))
    assert store.prefaulted(timeout=60)
    store.put_many(keys(64), [payload(name, 2 * MIB) for name in keys(64)])
    lease = store.lease(keys(8))
    before = resident()
    store.close()
    assert resident() < before - 200 * MIB
    assert [bytes(view or b"") for view in lease.views] == [payload(name, 2 * MIB) for name in keys(8)]


VERBS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: [store.put(name, payload(name, 64 * KIB)) for name in keys(40, "new")],
    "get": lambda store: [store.get(name) for name in keys(10)],
    "prefetch": lambda store: store.prefetch(keys(10)).result(),
    "flush": lambda store: store.flush(),
    "close": lambda store: store.close(),
}


def test_threads_started_in_every_order(tmp_path: Path) -> None:
    """All verbs at once, each from a thread of its own, in all orders of their start: done, or refused as closed."""
    for turn, order in enumerate(itertools.permutations(VERBS)):
        if order.index("close") < 2:
            continue  # nearly nothing would run
        tiers = Dram("1MiB", prefault=False), Nvme(tmp_path / str(turn % 2), "4MiB")
        wrong: list[BaseException] = []
        with Store(*tiers) as store:

            def run(verb: str, store: Store = store, wrong: list[BaseException] = wrong) -> None:
                try:
                    VERBS[verb](store)
                except ClosedError:
                    pass
                except BaseException as error:
                    wrong.append(error)

            store.put_many(keys(10), [payload(name, 64 * KIB) for name in keys(10)])
            threads = [threading.Thread(target=run, args=(verb,), name=verb) for verb in order]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), (thread.name, order)
        assert wrong == [], order
    with Store(*tiers) as store:
        for name in [*keys(10), *keys(40, "new")]:
            data = store.get(name)
            assert data is None or data.tobytes() == payload(name, 64 * KIB)
