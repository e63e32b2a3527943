"""The contract of a device's memory, on the host, and on a GPU where there is one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from blocks import MIB, host
from kvtier import KVLayout
from kvtier.errors import ClosedError, ConfigError, InvalidBlockError, StorageError, UnsupportedError
from kvtier.tiers import Copy, Delivery, DeviceBackend, HostBackend, open_backend
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


def test_what_is_queued_behind_a_copy_finds_it_done(backend: DeviceBackend) -> None:
    """A stream waits for a copy, and nobody else does."""
    target = np.zeros(1 << 20, np.uint8)
    for seed in range(8):
        backend.copy_in([Copy(0, noise(1 << 20, seed))]).before(None)
        read = backend.deliver([Delivery(backend.view(0, 1 << 20), target)])
        assert read.wait()
        assert np.array_equal(target, noise(1 << 20, seed))


def test_an_empty_batch_ends(backend: DeviceBackend) -> None:
    assert backend.copy_in([]).wait()


@pytest.mark.parametrize(("at", "size"), [(-1, 1), (CAPACITY, 1), (CAPACITY - 1, 2), (0, CAPACITY + 1)])
def test_places_outside_the_pool_are_refused(backend: DeviceBackend, at: int, size: int) -> None:
    good = Copy(0, noise(16))
    with pytest.raises(InvalidBlockError, match=f"{size} bytes at {at}"):
        backend.copy_in([good, Copy(at, noise(size))])
    assert not out(backend, 0, 16).any()  # nothing of the batch was begun


@pytest.mark.parametrize("given", [noise(16)[::2], noise(16).reshape(4, 4), noise(16).view(np.int32)])
def test_memory_of_another_kind_is_refused(backend: DeviceBackend, given: Any) -> None:
    with pytest.raises(InvalidBlockError, match="uint8"):
        backend.copy_out([Copy(0, given)])


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mla", [False, True])
def test_blocks_and_paged_kv(kind: str, mla: bool) -> None:
    """A contract of its own: layouts, page orders and slots as engines have them, against plain indexing."""
    rng = np.random.default_rng(int(mla))
    pages, page_tokens, layers, heads, dim = 7, 4, 3, 2, 8
    backend = open_backend(MIB, kind)
    lib: Any = np
    if kind == "cuda":
        import cupy

        lib = cupy
    layout = (
        KVLayout(layers, "mla", rank=5, rope_dim=2, dtype="fp16", block_tokens=6)  # rows that no wide word divides
        if mla
        else KVLayout(layers, "gqa", kv_heads=heads, head_dim=dim, dtype="fp16", block_tokens=6)
    )

    def paged() -> tuple[list[Any], list[Any]]:
        """Planes as the engine holds them, and as a reader of this test sees them."""
        if mla:
            whole = [lib.asarray(filled((pages, page_tokens, 7))) for _ in range(layers)]
            return whole, whole
        planes = []
        for layer in range(layers):
            # keys and values first; behind the pages; and with the heads before the tokens of a page.
            match layer:
                case 0:
                    kv = lib.asarray(filled((2, pages, page_tokens, heads, dim)))
                    planes += [kv[0], kv[1]]
                case 1:
                    kv = lib.asarray(filled((pages, 2, page_tokens, heads, dim)))
                    planes += [kv[:, 0], kv[:, 1]]
                case _:
                    kv = lib.asarray(filled((2, pages, heads, page_tokens, dim)))
                    planes += [kv[0].transpose(0, 2, 1, 3), kv[1].transpose(0, 2, 1, 3)]
        return planes, planes

    def filled(shape: tuple[int, ...]) -> NDArray[np.float16]:
        return rng.integers(0, 2**16, shape).astype(np.uint16).view(np.float16)

    counts = [6, 6, 4]  # the last block is a partial one
    order = rng.permutation(pages * page_tokens)
    slots = [order[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(3)]
    blocks = [rng.integers(0, 256, count * layout.bytes_per_token, np.uint8) for count in counts]

    def expected(planes: list[NDArray[Any]], count: int, where: NDArray[Any]) -> bytes:
        return b"".join(plane[slot // page_tokens, slot % page_tokens].tobytes() for plane in planes for slot in where)

    planes, seen = paged()
    before = [host(plane).copy() for plane in seen]
    device_blocks = [lib.asarray(block) for block in blocks]
    assert backend.scatter(device_blocks, planes, slots).wait()
    after = [host(plane) for plane in seen]
    for block, count, where in zip(blocks, counts, slots, strict=True):
        assert expected(after, count, where) == block.tobytes()
    left = np.setdiff1d(order, np.concatenate(slots))
    for old, new in zip(before, after, strict=True):  # no other token was touched
        assert (
            old[left // page_tokens, left % page_tokens].tobytes()
            == new[left // page_tokens, left % page_tokens].tobytes()
        )
    gathered = [lib.zeros(block.nbytes, np.uint8) for block in blocks]
    assert backend.gather(gathered, planes, slots).wait()
    assert [host(array).tobytes() for array in gathered] == [block.tobytes() for block in blocks]
    # The same planes as torch has them, in a dtype that neither NumPy nor CuPy knows.
    tensors = [torch.from_dlpack(plane).view(torch.bfloat16) for plane in planes]
    again = [lib.zeros(block.nbytes, np.uint8) for block in blocks]
    assert backend.gather(again, tensors, slots).wait()
    assert [host(array).tobytes() for array in again] == [block.tobytes() for block in blocks]
    assert backend.scatter([], planes, []).wait()
    for wrong, message in (
        ((device_blocks[:1], planes, [slots[0][:-1]]), "one slot a token"),
        ((device_blocks[:1], planes[:-1], slots[:1]), "one slot a token"),
        ((device_blocks[:1], planes, slots), "one a block"),
        ((device_blocks[:1], planes, [slots[0] + 1000]), "allowed are 0 to 27"),
        ((device_blocks[:1], planes, [slots[0].astype(float)]), "one number a token"),
        ((device_blocks[:1], [plane[..., ::2] for plane in planes], slots[:1]), "last axis contiguous"),
    ):
        with pytest.raises(InvalidBlockError, match=message):
            backend.scatter(*wrong)
    backend.close()


@pytest.mark.parametrize("kind", KINDS)
def test_delivery_and_views_that_keep(kind: str) -> None:
    """The rest of the contract that the tier is built on."""
    backend = open_backend(MIB, kind)
    data = np.random.default_rng(1).integers(0, 256, 4096, np.uint8)
    assert backend.copy_in([Copy(8192, data)]).wait()

    class Kept:
        gone = False

        def __del__(self) -> None:
            Kept.gone = True

    view = backend.view(8192, 4096, Kept())
    part = view[100:200]
    del view
    gc.collect()
    assert not Kept.gone
    assert np.array_equal(host(part), data[100:200])
    del part
    gc.collect()
    assert Kept.gone
    assert backend.array(np.zeros(4, np.uint8)) is None
    assert backend.array(torch.zeros(4)) is None
    assert backend.array(b"1234") is None
    last = backend.view(8192, 4096)
    backend.close()
    assert np.array_equal(host(last), data)  # the pool lives as long as a view of it
    with pytest.raises(ClosedError):
        backend.deliver([])
    with pytest.raises(ClosedError):
        backend.scatter([], [], [])
