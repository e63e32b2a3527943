"""What `CupyBackend` asks of a driver, and what it makes of its errors: CuPy's runtime is played here, on memory of the host, by the
rules of CUDA's and CuPy's own documentation. On a GPU `test_devices` has the contract.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.errors import ClosedError, StorageError
from kvtier.tiers import Copy, Delivery
from kvtier.tiers.cuda import CupyBackend

PIECE = 4096
NOT_READY, LOST = 600, 719


class DriverError(RuntimeError):
    """As CuPy's ``CUDARuntimeError``."""


class Driver:
    """The runtime, an event and a stream, which do at once what is asked of them."""

    def __init__(self) -> None:
        self.status = 0
        self.registered: dict[int, int] = {}
        self.most = 1 << 30
        self.copies = 0
        self.memory: list[NDArray[np.uint8]] = []
        runtime = SimpleNamespace(
            CUDARuntimeError=DriverError,
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
            memcpyDefault=4,
            memcpyAsync=self.copy,
            hostRegister=self.register,
            hostUnregister=self.unregister,
            eventQuery=lambda _: self.status,  # CuPy gives the status, whatever it is
        )
        self.streams: list[int] = []

        def stream(address: int) -> Any:
            return SimpleNamespace(
                ptr=address, device_id=0, synchronize=self.check, wait_event=lambda _: self.streams.append(address)
            )

        def make(non_blocking: bool) -> Any:
            assert non_blocking
            return stream(1)

        make.from_external = lambda other: stream(other.__cuda_stream__()[1])  # type: ignore[attr-defined]
        event = SimpleNamespace(ptr=2, record=lambda _: None, synchronize=self.check)
        errors = {"CUDADriverError": type("CUDADriverError", (RuntimeError,), {})}
        self.cupy = SimpleNamespace(
            ndarray=type("ndarray", (), {}),
            RawModule=lambda code: code,
            cuda=SimpleNamespace(
                runtime=runtime,
                driver=SimpleNamespace(**errors),
                memory=SimpleNamespace(OutOfMemoryError=type("OutOfMemoryError", (MemoryError,), {})),
                Device=lambda _: nullcontext(),
                Memory=self.allocate,
                Stream=make,
                Event=lambda block, disable_timing: event,
                get_current_stream=lambda: stream(5),
            ),
        )

    def allocate(self, size: int) -> Any:
        self.memory.append(np.zeros(size, np.uint8))
        return SimpleNamespace(ptr=self.memory[-1].ctypes.data)

    def check(self) -> None:
        if self.status not in (0, NOT_READY):
            raise DriverError(f"cudaError {self.status}")

    def register(self, at: int, size: int, flags: int) -> None:
        assert flags == 1  # portable
        if len(self.registered) == self.most:
            raise DriverError("cudaErrorMemoryAllocation")
        self.registered[at] = size

    def unregister(self, at: int) -> None:
        self.check()
        del self.registered[at]

    def copy(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        assert kind in (1, 2, 4)
        self.streams.append(stream)
        self.check()
        for begin in (to, source):  # in one registered piece, or in none
            if any(at < begin + size and begin < at + n for at, n in self.registered.items()) and not any(
                at <= begin and begin + size <= at + n for at, n in self.registered.items()
            ):
                raise DriverError("cudaErrorInvalidValue")
        self.copies += 1
        ctypes.memmove(to, source, size)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "cupy", driver.cupy)
    monkeypatch.setattr("kvtier.tiers.cuda._REGISTER", PIECE)
    return driver


def noise(size: int) -> NDArray[np.uint8]:
    """From the start of a page on."""
    room = np.random.default_rng(size).integers(0, 256, size + PIECE, np.uint8)
    return room[-room.ctypes.data % PIECE :][:size]


def test_a_copy_over_several_registered_pieces_is_one_in_each(driver: Driver) -> None:
    backend, host = CupyBackend(1 << 20), noise(5 * PIECE)
    backend.register(host)
    assert [(at % PIECE, size) for at, size in driver.registered.items()] == [(0, PIECE)] * 5
    parts = [Copy(0, host[:PIECE]), Copy(PIECE, host[PIECE : 3 * PIECE + 5]), Copy(1 << 19, host[-PIECE - 7 :])]
    assert backend.copy_in(parts).wait()
    assert driver.copies == 1 + 3 + 2
    back, target = noise(5 * PIECE)[7:], noise(100)
    backend.register(back)
    assert [(at % PIECE, size) for at, size in driver.registered.items()][5:] == [(7, PIECE - 7), *[(0, PIECE)] * 4]
    assert backend.copy_out([Copy(PIECE, back[100 : 2 * PIECE + 105])]).wait()
    assert back[100 : 2 * PIECE + 105].tobytes() == host[PIECE : 3 * PIECE + 5].tobytes()
    assert backend.deliver([Delivery(host[PIECE - 50 : PIECE + 50], target)]).wait()
    assert target.tobytes() == host[PIECE - 50 : PIECE + 50].tobytes()
    backend.close()
    assert not driver.registered


def test_memory_that_the_driver_takes_a_part_of_copies_as_well(driver: Driver) -> None:
    backend, host = CupyBackend(1 << 20), noise(3 * PIECE)
    driver.most = 2
    with pytest.raises(DriverError):
        backend.register(host)
    assert len(driver.registered) == 2
    assert backend.copy_in([Copy(0, host)]).wait()
    assert driver.memory[0][: host.nbytes].tobytes() == host.tobytes()
    backend.close()
    assert not driver.registered


def test_copies_go_on_while_memory_is_registered_and_so_does_closing(driver: Driver) -> None:
    backend, host = CupyBackend(1 << 20), noise(3 * PIECE)
    register, copied = driver.cupy.cuda.runtime.hostRegister, []

    def slowly(*args: int) -> None:
        register(*args)
        if len(driver.registered) == 2:
            copied.append(backend.copy_in([Copy(0, host)]).wait())
            backend.close()

    driver.cupy.cuda.runtime.hostRegister = slowly
    with pytest.raises(ClosedError):
        backend.register(host)
    assert copied == [True]
    assert not driver.registered


@pytest.mark.parametrize("timeout", [None, 10])
def test_a_copy_that_fails_on_its_way_has_ended_and_says_so(driver: Driver, timeout: float | None) -> None:
    backend, host = CupyBackend(1 << 20), noise(100)
    kept = weakref.ref(host)
    event = backend.copy_in([Copy(0, host)])
    del host
    driver.status = NOT_READY
    assert not event.done()
    assert not event.wait(0)
    driver.status = LOST
    assert event.done()
    with pytest.raises(StorageError, match="a copy failed"):
        event.wait(timeout)
    gc.collect()
    assert kept() is None
    driver.status = 0
    backend.close()


def test_a_lost_device_refuses_in_words_and_can_be_closed(driver: Driver) -> None:
    backend, host = CupyBackend(1 << 20), noise(100)
    backend.register(host)
    driver.status = LOST
    with pytest.raises(StorageError, match="refused a copy"):
        backend.copy_in([Copy(0, host)])
    backend.close()


def test_work_is_queued_where_it_was_asked_for(driver: Driver) -> None:
    backend, host, target = CupyBackend(1 << 20), noise(100), noise(100)
    of_torch, of_others = SimpleNamespace(cuda_stream=7), SimpleNamespace(__cuda_stream__=lambda: (0, 8))
    for stream in (None, 0, 6, of_torch, of_others, SimpleNamespace(ptr=9)):
        copying = backend.deliver([Delivery(host, target)], stream)
        copying.before(0 if stream is None else None)
    backend.copy_in([Copy(0, host)], after=copying)
    assert driver.streams == [5, 0, 0, 5, 6, 5, 7, 5, 8, 5, 9, 5, 1, 1]
    backend.close()


def test_the_rates_that_are_printed_where_a_gpu_is(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "scripts"))
    from gpu_copies import lines

    told = [
        re.fullmatch(r"(\w+ \w+): ([\d.]+) GB/s in blocks, plain ([\d.]+) GB/s, ratio [\d.]+", line)
        for line in lines(1 << 20, 1 << 16)
    ]
    assert [line and line[1] for line in told] == ["H2D pageable", "D2H pageable", "H2D pinned", "D2H pinned"]
    assert driver.copies >= 4 * 9 * (16 + 1)
    assert not driver.registered
