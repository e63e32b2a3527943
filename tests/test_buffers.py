"""Buffers of every kind, as sources and as targets: what fits is taken without a copy, what does not is refused aloud."""

from __future__ import annotations

import array
import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from blocks import key, keys
from kvtier import InvalidBlockError, KVLayout, Namespace, Store
from kvtier._kvtier import DlpackView
from kvtier.layout import DTYPES

BF16 = KVLayout(3, "gqa", kv_heads=2, head_dim=4, dtype="bf16", block_tokens=8)
SHAPE = BF16.shape()
BYTES = bytes(np.random.default_rng(0).integers(0, 256, BF16.block_bytes, np.uint8))

TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
NUMPY = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
    "uint8": np.uint8,
}
TORCH_ALL = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
NUMPY_ALL = [
    "?", "b", "B", "h", "H", "i", "I", "q", "Q", "e", "f", "d", "F", "D", "g", "S3", "U2", "M8[s]", "m8[s]",
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3, ml_dtypes.int4,
    [("a", "f4"), ("Object", "i2")],
]  # fmt: skip


class OnlyDlpack:
    """An object of a library that has DLPack and nothing else, of before or after DLPack 1.0."""

    def __init__(self, inner: Any, versioned: bool, device: tuple[int, int] | None = (1, 0)) -> None:
        self.inner, self.versioned, self.device = inner, versioned, device
        if device is not None:
            self.__class__ = type("OnlyDlpack", (OnlyDlpack,), {"__dlpack_device__": lambda self: self.device})

    def __dlpack__(self, **options: Any) -> Any:
        if not self.versioned and options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.inner.__dlpack__(**options)


class NumpyVersioned:
    """NumPy's own, which passes on what it is asked for."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> Any:
        return self.inner.__dlpack__(max_version=max_version)


@pytest.fixture
def cache(store: Store) -> Namespace:
    return store.namespace(b"model", BF16)


def writable(kind: str) -> Any:
    """A target of each kind for one block of ``BF16``."""
    size = len(BYTES)
    flat = np.zeros(size, np.uint8)
    mapped = mmap.mmap(-1, size)
    return {
        "bytearray": lambda: bytearray(size),
        "memoryview": lambda: memoryview(bytearray(size)),
        "cast memoryview": lambda: memoryview(bytearray(size)).cast("H"),
        "array.array": lambda: array.array("B", bytes(size)),
        "array.array H": lambda: array.array("H", bytes(size)),
        "ctypes": lambda: (ctypes.c_uint8 * size)(),
        "mmap": lambda: mapped,
        "numpy uint8": lambda: flat,
        "numpy uint16": lambda: flat.view(np.uint16).reshape(SHAPE),
        "numpy bf16": lambda: flat.view(ml_dtypes.bfloat16).reshape(SHAPE),
        "torch uint8": lambda: torch.zeros(size, dtype=torch.uint8),
        "torch bf16": lambda: torch.zeros(SHAPE, dtype=torch.bfloat16),
        "torch grad": lambda: torch.zeros(SHAPE, dtype=torch.bfloat16, requires_grad=True),
        "dlpack numpy": lambda: OnlyDlpack(flat, False),
        "dlpack numpy 1.0": lambda: NumpyVersioned(flat),
        "dlpack torch": lambda: OnlyDlpack(torch.zeros(SHAPE, dtype=torch.bfloat16), False),
        "dlpack torch 1.0": lambda: OnlyDlpack(torch.zeros(SHAPE, dtype=torch.bfloat16), True, None),
    }[kind]()


KINDS = [
    "bytearray", "memoryview", "cast memoryview", "array.array", "array.array H", "ctypes", "mmap", "numpy uint8",
    "numpy uint16", "numpy bf16", "torch uint8", "torch bf16", "torch grad", "dlpack numpy", "dlpack numpy 1.0",
    "dlpack torch", "dlpack torch 1.0",
]  # fmt: skip


def read(obj: Any) -> bytes:
    if isinstance(obj, OnlyDlpack | NumpyVersioned):
        obj = obj.inner
    if isinstance(obj, torch.Tensor):
        return obj.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return obj.tobytes() if isinstance(obj, np.ndarray) else bytes(obj)


def write(obj: Any, data: bytes) -> None:
    if isinstance(obj, OnlyDlpack | NumpyVersioned):
        obj = obj.inner
    if isinstance(obj, torch.Tensor):
        obj.detach().reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    elif isinstance(obj, np.ndarray):
        obj.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    else:
        memoryview(obj).cast("B")[:] = data


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_source_and_a_target(cache: Namespace, kind: str) -> None:
    source, target = writable(kind), writable(kind)
    write(source, BYTES)
    assert cache.put(key("a"), source).stored
    assert cache.get(key("a")).tobytes() == BYTES  # type: ignore[union-attr]
    write(target, bytes(len(BYTES)))
    assert cache.get_into([key("a")], [target])[0].hit
    assert read(target) == BYTES


@pytest.mark.parametrize("source", [BYTES, memoryview(BYTES), np.frombuffer(BYTES, np.uint8)], ids=type)
def test_read_only_memory_is_a_source_but_no_target(cache: Namespace, source: Any) -> None:
    assert cache.put(key("a"), source).stored
    with pytest.raises(InvalidBlockError, match="a target must be writable"):
        cache.get_into([key("a")], [source])


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_a_layout(store: Store, name: str) -> None:
    layout = KVLayout(2, "gqa", kv_heads=1, head_dim=8, dtype=name, block_tokens=4)
    cache = store.namespace(b"model", layout)
    bits = np.random.default_rng(1).integers(0, 256, layout.block_bytes, np.uint8)
    tensor = torch.from_numpy(bits.copy()).view(TORCH[name]).reshape(layout.shape())
    ndarray = bits.view(NUMPY[name]).reshape(layout.shape())
    for i, data in enumerate([tensor, ndarray, OnlyDlpack(tensor, False), NumpyVersioned(tensor)]):
        assert cache.put(key(i), data).stored
        for target in (torch.zeros_like(tensor), np.zeros_like(ndarray)):
            assert cache.get_into([key(i)], [target])[0].hit
            assert read(target) == bits.tobytes()


@pytest.mark.parametrize("dtype", TORCH_ALL, ids=str)
def test_an_opaque_block_is_a_tensor_of_any_dtype(store: Store, dtype: torch.dtype) -> None:
    tensor = torch.arange(48, dtype=torch.uint8).view(dtype).reshape(-1, 1) if dtype != torch.bool else torch.ones(3, 1)
    assert store.put(key("a"), tensor).stored
    out = torch.zeros_like(tensor)
    assert store.get_into([key("a")], [out])[0].hit
    assert read(out) == read(tensor)


@pytest.mark.parametrize("dtype", NUMPY_ALL, ids=str)
def test_an_opaque_block_is_an_array_of_any_dtype(store: Store, dtype: Any) -> None:
    ndarray = np.zeros((3, 4), dtype)
    ndarray.reshape(-1).view(np.uint8)[:] = 1
    assert store.put(key("a"), ndarray).stored
    out = np.zeros_like(ndarray)
    assert store.get_into([key("a")], [out])[0].hit
    assert out.tobytes() == ndarray.tobytes()


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in ("bf16", "uint8")])
def test_another_dtype_than_the_layouts_is_refused(cache: Namespace, name: str) -> None:
    """Bits that mean something else are never taken for the layout's own."""
    elements = len(BYTES) // DTYPES[name]
    for data in (
        torch.zeros(elements, dtype=TORCH[name]),
        np.zeros(elements, NUMPY[name]),
        OnlyDlpack(torch.zeros(elements, dtype=TORCH[name]), True),
        OnlyDlpack(torch.zeros(elements, dtype=TORCH[name]), False),
    ):
        if name == "int8" and isinstance(data, np.ndarray):
            continue  # a plain byte to the buffer protocol
        for use in (lambda data: cache.put(key("a"), data), lambda data: cache.get_into([key("a")], [data])):
            with pytest.raises(InvalidBlockError, match="this layout takes bf16 or plain bytes"):
                use(data)
    assert cache.contains([key("a")]) == [False]


NAMED = np.dtype((np.uint16, [("low", "u1"), ("high", "u1")]))
"""A number to NumPy, a structure to the buffer protocol."""


@pytest.mark.parametrize("bad", [np.float64, np.complex64, ">u2", "S6", "?", ml_dtypes.float8_e4m3fnuz, NAMED], ids=str)
def test_what_no_layout_has_is_refused(cache: Namespace, bad: Any) -> None:
    data = np.zeros(len(BYTES) // np.dtype(bad).itemsize, bad)
    with pytest.raises(InvalidBlockError, match="this layout takes bf16 or plain bytes"):
        cache.put(key("a"), data)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        (SHAPE, True),
        ((3, 2, 5, 2, 4), True),  # fewer tokens
        ((3, 2, 16, 4), True),  # another number of axes: flat bytes
        ((2, 3, 8, 2, 4), False),
        ((3, 2, 2, 8, 4), False),  # transposed: as many bytes
        ((3, 8, 2, 2, 4), False),
        ((3, 2, 8, 4, 2), False),
    ],
)
def test_a_shape_with_the_layouts_axes_is_held_to_it(cache: Namespace, shape: tuple[int, ...], fits: bool) -> None:
    makers: list[Callable[[], Any]] = [
        lambda: torch.zeros(shape, dtype=torch.bfloat16),
        lambda: np.zeros(shape, ml_dtypes.bfloat16),
        lambda: np.zeros(shape, np.uint16),
        lambda: OnlyDlpack(torch.zeros(shape, dtype=torch.bfloat16), True),
    ]
    for name, make in zip(keys(4), makers, strict=True):
        if fits:
            assert cache.put(name, make()).stored
        else:
            with pytest.raises(InvalidBlockError, match="ranspose it, or pass flat bytes"):
                cache.put(name, make())


@pytest.mark.parametrize("size", [0, 1, len(BYTES) - 1, len(BYTES) + 1, 2 * len(BYTES), BF16.bytes_per_token - 1])
def test_a_wrong_size_is_refused(cache: Namespace, size: int) -> None:
    with pytest.raises(
        InvalidBlockError, match=rf"a block of {size} bytes was given; this layout takes {len(BYTES)} bytes"
    ):
        cache.put(key("a"), bytes(size))
    cache.put(key("a"), BYTES)
    with pytest.raises(InvalidBlockError, match=f"a buffer of {size} bytes was given for {len(BYTES)} bytes"):
        cache.get_into([key("a")], [bytearray(size)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros((2 * len(BYTES),), np.uint8)[::2],
        lambda: np.zeros((len(BYTES) // 2, 2), np.uint8).T,
        lambda: np.zeros(len(BYTES), np.uint8)[::-1],
        lambda: np.zeros((2 * len(BYTES) // 2,), ml_dtypes.bfloat16)[::2],
        lambda: memoryview(bytearray(2 * len(BYTES)))[::2],
        lambda: torch.zeros(2 * len(BYTES), dtype=torch.uint8)[::2],
        lambda: torch.zeros(len(BYTES) // 2, 2, dtype=torch.uint8).T,
        lambda: torch.zeros(1, dtype=torch.uint8).expand(len(BYTES)),
        lambda: OnlyDlpack(torch.zeros(2 * len(BYTES), dtype=torch.uint8)[::2], True),
        lambda: OnlyDlpack(torch.zeros(len(BYTES) // 2, 2, dtype=torch.uint8).T, False),
    ],
)
def test_what_is_not_contiguous_is_refused(cache: Namespace, make: Callable[[], Any]) -> None:
    for use in (lambda data: cache.put(key("a"), data), lambda data: cache.get_into([key("a")], [data])):
        with pytest.raises(InvalidBlockError, match="contiguous"):
            use(make())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: "text", "a str was given"),
        (lambda: 3, "a int was given"),
        (lambda: None, "a NoneType was given"),
        (lambda: [1, 2], "a list was given"),
        (lambda: np.array([object()]), "objects"),
        (lambda: np.zeros(2, [("a", "O")]), "objects"),
        (lambda: (ctypes.c_void_p * 2)(), "pointers"),
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.zeros(3, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: torch.zeros(3, device="meta"), "a tensor on meta"),
        (lambda: OnlyDlpack(np.zeros(3, np.uint8), False, (2, 0)), r"DLPack device \(2, 0\)"),
        (lambda: OnlyDlpack(None, False), "'NoneType' object has no attribute"),
    ],
)
def test_what_is_no_buffer_is_refused(store: Store, make: Callable[[], Any], message: str) -> None:
    error = AttributeError if "attribute" in message else InvalidBlockError
    with pytest.raises(error, match=message):
        store.put(key("a"), make())
    assert store.stats()["blocks"] == 0


def test_a_scalar_is_a_source_but_no_target(store: Store) -> None:
    for i, scalar in enumerate([np.float32(1.5), ml_dtypes.bfloat16(2), np.array(3.0)]):
        assert store.put(key(i), scalar).stored
        assert store.get(key(i)).tobytes() == scalar.tobytes()  # type: ignore[union-attr]
        if not isinstance(scalar, np.ndarray):
            with pytest.raises(InvalidBlockError, match="a target must be writable"):
                store.get_into([key(i)], [scalar])


def test_read_only_dlpack(store: Store) -> None:
    frozen = np.arange(8, dtype=np.uint8)
    frozen.flags.writeable = False
    assert store.put(key("a"), NumpyVersioned(frozen)).stored
    with pytest.raises(InvalidBlockError, match="a read-only NumpyVersioned was given"):
        store.get_into([key("a")], [NumpyVersioned(frozen)])
    with pytest.raises(InvalidBlockError, match="DLPack cannot lend"):
        store.put(key("b"), OnlyDlpack(frozen, False))


class Capsule:
    """Gives whatever it was made with as its capsule."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule


def test_what_is_no_capsule_is_refused(store: Store) -> None:
    consumed = np.zeros(3, np.uint8).__dlpack__()
    np.from_dlpack(Both(consumed))
    with pytest.raises(InvalidBlockError, match="consumed before"):
        store.put(key("a"), Capsule(consumed))
    with pytest.raises(InvalidBlockError, match="where a capsule is due"):
        store.put(key("a"), Capsule(b"bytes"))
    with pytest.raises(InvalidBlockError, match="consumed before"):
        store.put(key("a"), Capsule(__import__("datetime").datetime_CAPI))


class Both(Capsule):
    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_a_dlpack_view_says_what_it_is() -> None:
    view = DlpackView(torch.zeros(2, 3, dtype=torch.bfloat16).__dlpack__())
    assert (view.dtype, view.shape, view.readonly, memoryview(view).nbytes) == ("bfloat16", (2, 3), False, 12)


def test_a_lease_is_a_source(store: Store) -> None:
    """Also of the very store that it came from."""
    store.put(key("a"), b"bytes")
    with store.lease([key("a")]) as lease:
        assert store.put(key("b"), lease.blocks[0]).stored
        assert store.put(key("c"), lease.views[0]).stored
        with pytest.raises(InvalidBlockError, match="writable"):
            store.get_into([key("a")], [lease.views[0]])
        for options in ({"stream": 1}, {"dl_device": (2, 0)}, {"copy": True}):
            with pytest.raises(BufferError, match="CPU memory, lent without a copy"):
                lease.blocks[0].__dlpack__(**options)
        assert lease.blocks[0].__dlpack_device__() == (1, 0)
    assert [store.get(name).tobytes() for name in (key("b"), key("c"))] == [b"bytes"] * 2  # type: ignore[union-attr]


def test_a_capsule_that_nobody_takes_lets_go(store: Store) -> None:
    store.put(key("a"), b"bytes")
    lease = store.lease([key("a")])
    for version in (None, (1, 0), (0, 8)):
        capsule = lease.blocks[0].__dlpack__(max_version=version)
        del capsule
    lease.release()
    store.remove([key("a")])
    assert store.stats()["tiers"]["dram"]["used_bytes"] == 0


# What is lent comes back


def grow(buffers: list[bytearray]) -> None:
    """A bytearray cannot be resized while anybody holds its memory."""
    for buffer in buffers:
        buffer.append(0)


def test_no_memory_is_kept_after_success_or_error(cache: Namespace, store: Store) -> None:
    buffers = [bytearray(BYTES) for _ in range(4)]
    names = keys(4)
    cache.put_many(names[:3], buffers[:3])
    cache.get_into(names[:3], buffers[:3])
    attempts: list[Callable[[], Any]] = [
        lambda: cache.put(b"short", buffers[0]),
        lambda: cache.put(key("a"), buffers[0], timeout=-1),
        lambda: cache.put_many(names, [*buffers[:3], bytearray(3)]),
        lambda: cache.put_many(names, [*buffers[:3], object()]),
        lambda: cache.put_many(names[:2], buffers),
        lambda: cache.put_many(names, buffers, importance=[-1] * 4),
        lambda: cache.get_into(names[:3], buffers),
        lambda: cache.get_into(names, [*buffers[:3], b"read-only"]),
        lambda: cache.get_into(names, buffers, layers=(0, 9)),
        lambda: cache.get_into([*names[:2], b"short"], buffers[:3]),
    ]
    for attempt in attempts:
        with pytest.raises(ValueError, match=r"."):
            attempt()
        grow(buffers)
        for buffer in buffers:
            del buffer[-1]
    store.close()
    with pytest.raises(RuntimeError):
        cache.put_many(names, buffers)
    grow(buffers)


def test_an_iterator_that_fails_gives_back_what_it_gave(cache: Namespace) -> None:
    buffers = [bytearray(BYTES) for _ in range(2)]

    def failing() -> Any:
        yield from buffers
        raise KeyError("mine")

    for use in (lambda: cache.put_many(keys(3), failing()), lambda: cache.get_into(keys(3), failing())):
        with pytest.raises(KeyError, match="mine"):
            use()
        grow(buffers)


def test_a_region_is_given_back(store: Store) -> None:
    buffer = bytearray(1 << 20)
    region = store.register_region(buffer)
    assert region.in_flight() == 0
    with pytest.raises(BufferError):
        buffer.append(0)
    store.close()
    del region
    buffer.append(0)
    with pytest.raises(RuntimeError):
        store.register_region(buffer)
    buffer.append(0)


def test_a_tensor_is_let_go_of(store: Store) -> None:
    import weakref

    tensor = torch.zeros(100, dtype=torch.bfloat16)
    gone = weakref.ref(tensor)
    store.put(key("a"), tensor)
    store.get_into([key("a")], [tensor])
    store.put(key("b"), OnlyDlpack(tensor, True))
    with pytest.raises(InvalidBlockError):
        store.put(b"short", OnlyDlpack(tensor, False))
    del tensor
    assert gone() is None
