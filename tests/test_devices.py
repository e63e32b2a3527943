"""The contract of a device's memory, on the host, and on a GPU where there is one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtier.errors import ClosedError, ConfigError, InvalidBlockError, StorageError, UnsupportedError
from kvtier.tiers import Copy, DeviceBackend, HostBackend, open_backend
from kvtier.tiers.cuda import missing

CAPACITY = 4 << 20
WITHOUT = missing()
KINDS = ["host"] if WITHOUT else ["host", "cuda"]
"""Where no GPU is, its tests do not exist: `scripts/gpu_check.sh` runs them where one is."""


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest) -> Iterator[DeviceBackend]:
    backend = open_backend(CAPACITY, request.param)
    yield backend
    backend.close()


def noise(size: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def out(backend: DeviceBackend, at: int, size: int) -> NDArray[np.uint8]:
    target = np.zeros(size, np.uint8)
    assert backend.copy_out([Copy(at, target)]).wait()
    return target


def test_what_goes_in_comes_out(backend: DeviceBackend) -> None:
    parts = [(0, noise(1, 1)), (1, noise(4095, 2)), (65536, noise(1 << 20, 3)), (CAPACITY - 7, noise(7, 4))]
    event = backend.copy_in([Copy(at, data) for at, data in parts])
    assert event.wait()
    assert event.done()
    targets = [np.zeros_like(data) for _, data in parts]
    assert backend.copy_out([Copy(at, to) for (at, _), to in zip(parts, targets, strict=True)]).wait()
    for (_, data), target in zip(parts, targets, strict=True):
        assert np.array_equal(data, target)


def test_batches_of_one_direction_are_done_in_order(backend: DeviceBackend) -> None:
    events = [backend.copy_in([Copy(0, noise(1 << 20, seed))]) for seed in range(20)]
    assert events[-1].wait()
    assert all(event.done() for event in events)
    assert np.array_equal(out(backend, 0, 1 << 20), noise(1 << 20, 19))


def test_a_copy_can_wait_for_one_of_the_other_direction(backend: DeviceBackend) -> None:
    backend.copy_in([Copy(0, noise(1 << 20, 1))]).wait()
    old, new = np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    read = backend.copy_out([Copy(0, old)])
    written = backend.copy_in([Copy(0, noise(1 << 20, 2))], after=read)
    assert backend.copy_out([Copy(0, new)], after=written).wait()
    assert np.array_equal(old, noise(1 << 20, 1))
    assert np.array_equal(new, noise(1 << 20, 2))


def test_an_empty_batch_ends(backend: DeviceBackend) -> None:
    assert backend.copy_in([]).wait()


@pytest.mark.parametrize(("at", "size"), [(-1, 1), (CAPACITY, 1), (CAPACITY - 1, 2), (0, CAPACITY + 1)])
def test_places_outside_the_pool_are_refused(backend: DeviceBackend, at: int, size: int) -> None:
    good = Copy(0, noise(16))
    with pytest.raises(InvalidBlockError, match=f"{size} bytes at {at}"):
        backend.copy_in([good, Copy(at, noise(size))])
    assert not out(backend, 0, 16).any()  # nothing of the batch was begun


@pytest.mark.parametrize("host", [noise(16)[::2], noise(16).reshape(4, 4), noise(16).view(np.int32)])
def test_memory_of_another_kind_is_refused(backend: DeviceBackend, host: Any) -> None:
    with pytest.raises(InvalidBlockError, match="uint8"):
        backend.copy_out([Copy(0, host)])


def test_the_hosts_memory_is_kept_until_the_copy_has_ended(backend: DeviceBackend) -> None:
    events = [backend.copy_in([Copy(at << 18, noise(1 << 18, at))]) for at in range(16)]  # no one else holds them
    for event in events:
        event.wait()
    for at in range(16):
        assert np.array_equal(out(backend, at << 18, 1 << 18), noise(1 << 18, at))


def test_registered_memory_copies_as_well(backend: DeviceBackend) -> None:
    arena = noise(1 << 20, 5)
    backend.register(arena)
    assert backend.copy_in([Copy(0, arena[4096:8192])]).wait()
    assert np.array_equal(out(backend, 0, 4096), arena[4096:8192])
    backend.close()  # before the arena is unmapped


def test_a_view_is_the_pool(backend: DeviceBackend) -> None:
    backend.copy_in([Copy(100, noise(50, 6))]).wait()
    view = backend.view(100, 50)
    assert hasattr(view, "__dlpack__")
    host = view if isinstance(view, np.ndarray) else view.get()
    assert np.array_equal(host, noise(50, 6))
    for at, size in ((CAPACITY, 1), (0, CAPACITY + 1), (-1, 1), (1, -1)):
        with pytest.raises(InvalidBlockError, match=f"{size} bytes at {at}"):
            backend.view(at, size)


def test_closing_waits_and_ends_everything(backend: DeviceBackend) -> None:
    event = backend.copy_in([Copy(0, noise(CAPACITY))])
    backend.close()
    assert event.done()
    backend.close()
    with pytest.raises(ClosedError):
        backend.copy_in([])
    with pytest.raises(ClosedError):
        backend.view(0, 1)


def test_many_threads(backend: DeviceBackend) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(20):
            data = noise(1 << 14, number * 100 + turn)
            event = backend.copy_in([Copy(number << 14, data)])
            target = np.zeros(1 << 14, np.uint8)
            backend.copy_out([Copy(number << 14, target)], after=event).wait()
            if not np.array_equal(data, target):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 255), st.booleans()), max_size=40))
def test_any_sequence_is_that_of_an_array(moves: list[tuple[int, int, bool]]) -> None:
    """Copies in and out of slots, each after the one before it, against a plain array."""
    backend = open_backend(1 << 20, "host" if WITHOUT else "cuda")
    model = np.zeros(16 * 64, np.uint8)
    pending, last = [], None
    for slot, value, inward in moves:
        place = slice(slot * 64, slot * 64 + 64)
        if inward:
            model[place] = value
            last = backend.copy_in([Copy(slot * 64, np.full(64, value, np.uint8))], after=last)
        else:
            target = np.full(64, 77, np.uint8)
            last = backend.copy_out([Copy(slot * 64, target)], after=last)
            pending.append((last, target, model[place].copy()))
    for event, target, expected in pending:
        event.wait()
        assert np.array_equal(target, expected)
    backend.close()


def test_a_failed_copy_says_so_and_the_next_one_works() -> None:
    """On the host a copy fails when its target cannot be written."""
    backend = HostBackend(CAPACITY)
    target = np.zeros(16, np.uint8)
    target.flags.writeable = False
    failed = backend.copy_out([Copy(0, target)])
    with pytest.raises(StorageError, match="copy it again"):
        failed.wait()
    assert failed.done()
    with pytest.raises(StorageError):  # what waits for it fails with it
        backend.copy_in([Copy(0, noise(4))], after=failed).wait()
    assert not out(backend, 0, 16).any()
    backend.close()


@pytest.mark.parametrize("device", ["tpu", -1, True, 1.5])
def test_unknown_devices_are_refused(device: Any) -> None:
    with pytest.raises(ConfigError, match="device="):
        open_backend(CAPACITY, device)


def test_auto_takes_what_is_there() -> None:
    backend = open_backend(CAPACITY)
    assert backend.name == ("host" if WITHOUT else "cuda:0")
    assert backend.capacity == CAPACITY
    backend.close()


def test_cuda_that_is_not_there_says_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.cuda.missing", lambda device=0: "CuPy cannot be imported (no module)")
    with pytest.raises(
        UnsupportedError, match=r"a GPU was asked for .device='cuda'., but CuPy cannot be imported .*host"
    ):
        open_backend(CAPACITY, "cuda")
    with pytest.raises(UnsupportedError, match="device=3"):
        open_backend(CAPACITY, 3)
