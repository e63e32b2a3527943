"""Blocks that are coded on NVMe: fewer bytes, more blocks, and never anything else than was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import reference
from blocks import MIB, keys
from kvtier import ConfigError, Dram, KVLayout, Nvme, Store, codecs, rates

LAYOUT = KVLayout(8, "gqa", kv_heads=2, head_dim=64, dtype="bf16")
WIDE = KVLayout(8, "gqa", kv_heads=6, head_dim=64, dtype="bf16")
"""Blocks of several segments."""
IDENTITY = b"a model"


def block(seed: int, tokens: int = 16, heads: int = 2) -> NDArray[Any]:
    """Keys and values, 64 KiB of 16 tokens and 2 heads: normal, with channels of their own size."""
    random = np.random.default_rng(seed)
    channels = random.normal(size=(8, 2, 1, heads, 64)) * 2
    return (random.normal(size=(8, 2, tokens, heads, 64)) + channels).astype(ml_dtypes.bfloat16)


def open_store(path: Path, size: str = "16MiB", **options: Any) -> Store:
    return Store(Dram("8MiB"), Nvme(path, size, **options))


def coded(array: NDArray[Any], codec: str) -> bytes:
    return np.stack([reference.lossy(codec, layer) for layer in array]).tobytes()


def got(cache: Any, name: bytes, **part: Any) -> bytes:
    data = cache.get(name, **part)
    assert data is not None
    return bytes(data.tobytes())


@pytest.mark.parametrize("ask", ["namespace", "tier", "toml"])
def test_zstd_takes_less_room_and_gives_every_bit_back(tmp_path: Path, ask: str) -> None:
    names, blocks = keys(20), [block(i, tokens=16 if i % 3 else 5) for i in range(20)]
    used = {}
    for codec in (None, "zstd"):
        path = tmp_path / str(codec)
        for fresh in (True, False):
            if codec and ask == "toml":
                (tmp_path / "store.toml").write_text(
                    '[[tier]]\nkind = "dram"\nsize = "8MiB"\n'
                    f'[[tier]]\nkind = "nvme"\nsize = "16MiB"\npath = "{path}"\ncodec = "zstd"\n'
                )
                store = Store.from_toml(tmp_path / "store.toml")
            else:
                store = open_store(path, codec=codec if ask == "tier" else None)
            with store:
                cache = store.namespace(IDENTITY, LAYOUT, codec=codec if ask == "namespace" else None)
                if fresh:
                    assert all(r.stored for r in cache.put_many(names, blocks))
                    store.flush()
                    used[codec] = store.stats()["tiers"]["nvme"]["used_bytes"]
                    continue
                assert cache.match(names).tiers == ["nvme"] * 20
                assert sum(cache.match(names).bytes.values()) <= used[codec]
                assert got(cache, names[1], layers=(2, 4)) == blocks[1][2:4].tobytes()
                assert got(cache, names[2], tokens=(3, 7)) == blocks[2][:, :, 3:7].tobytes()
                assert [got(cache, n) == b.tobytes() for n, b in zip(names, blocks, strict=True)] == [True] * 20
    assert used["zstd"] < 0.85 * used[None]


@pytest.mark.parametrize("codec", ["int8", "int4+zstd", "fp8_e4m3"])
def test_a_lossy_codec_gives_what_its_reference_does_and_a_put_makes_it_exact(tmp_path: Path, codec: str) -> None:
    names, blocks = keys(6), [block(i) for i in range(6)]
    with open_store(tmp_path) as store:
        cache = store.namespace(IDENTITY, LAYOUT, codec=codec)
        for i, (name, data) in enumerate(zip(names, blocks, strict=True)):
            assert cache.put(name, data, parent=names[i - 1] if i else None).stored
        store.flush()
        assert got(cache, names[0]) == blocks[0].tobytes(), "memory has it as it was put"
        assert cache.put(names[0], blocks[0]).present
        assert store.stats()["tiers"]["nvme"]["used_bytes"] <= 0.7 * 6 * LAYOUT.block_bytes
    with open_store(tmp_path) as store:
        assert store.namespace(IDENTITY, LAYOUT).contains(names) == [False] * 6, "who did not ask for it gets none"
        cache = store.namespace(IDENTITY, LAYOUT, codec=codec)
        assert got(cache, names[3]) == coded(blocks[3], codec)
        for name, data in ((names[3], blocks[3]), (names[4], blocks[4])):  # one in memory, one only on NVMe
            assert cache.put(name, data, parent=names[2]).stored
            assert got(cache, name) == data.tobytes()
            assert cache.put(name, data, parent=names[2]).present
        assert cache.contains(names) == [True] * 6, "the blocks that follow it stay"
        with cache.lease([names[5]], verify=True) as lease:
            assert lease.views[0] is not None
            assert bytes(lease.views[0]) == coded(blocks[5], codec)
        store.flush()
    with open_store(tmp_path) as store:
        cache = store.namespace(IDENTITY, LAYOUT, codec=codec)
        assert got(cache, names[4]) == coded(blocks[4], codec)
        assert [r.hit for r in cache.prefetch(names).result()] == [True] * 6


@pytest.mark.parametrize("codec", ["zstd", "int8", "int8+zstd", "int4", None])
def test_layers_and_tokens_of_a_coded_block_are_decoded_alone(tmp_path: Path, codec: str | None) -> None:
    names, blocks = keys(3), [block(i, tokens=16 if i else 9, heads=6) for i in range(3)]
    with open_store(tmp_path) as store:
        cache = store.namespace(IDENTITY, WIDE, codec=codec)
        assert all(result.stored for result in cache.put_many(names, blocks))
        store.flush()
    with open_store(tmp_path) as store:
        cache = store.namespace(IDENTITY, WIDE, codec=codec)
        for name, data in zip(names, blocks, strict=True):
            whole = coded(data, codec) if codec in codecs.LOSSY else data.tobytes()
            back = np.frombuffer(whole, np.uint8).reshape(8, 2, len(data[0][0]), -1)
            for start, stop in ((2, 3), (0, 4), (7, 8)):
                assert got(cache, name, layers=(start, stop)) == back[start:stop].tobytes()
                for first, last in ((0, 1), (3, 7), (6, 7)):
                    some = got(cache, name, layers=(start, stop), tokens=(first, last))
                    assert some == back[start:stop, :, first:last].tobytes()
                own = np.isin(np.arange(16), [1, 2, 6])[None]
                place, few = np.full_like(back[start:stop], 7), own[0, : back.shape[2]]
                assert cache.get_into([name], [place.reshape(-1)], layers=(start, stop), tokens=own)[0].hit
                assert (place[:, :, few] == back[start:stop][:, :, few]).all()
                assert (place[:, :, ~few] == 7).all()
            assert cache.match([name]).tiers == ["nvme"], "the block stays where it is"
            before = store.stats()["tiers"]["nvme"]["read_bytes"]
            assert got(cache, name, layers=(5, 6)) == back[5:6].tobytes()
            read = store.stats()["tiers"]["nvme"]["read_bytes"] - before
            assert read <= max(0.3 * data.nbytes, 16 << 12), "a table, and the frames of one layer"
            outs = [np.empty(2 * back[0].nbytes, np.uint8)]
            assert cache.get_into([name], outs, layers=(1, 3))[0].tier == "nvme"
            assert outs[0].tobytes() == back[1:3].tobytes()
            assert got(cache, name, layers=(3, 3)) == got(cache, name, layers=(2, 3), tokens=(2, 2)) == b""


@pytest.mark.parametrize("codec", ["zstd", "int4"])
def test_a_damaged_layer_of_a_coded_block_is_a_miss(tmp_path: Path, codec: str) -> None:
    name = keys(1)[0]
    with open_store(tmp_path) as store:
        cache = store.namespace(IDENTITY, WIDE, codec=codec)
        cache.put(name, block(1, heads=6))
        store.flush()
    data = tmp_path / "kvtier.dat"
    raw = bytearray(data.read_bytes())
    found = [at for at in range(len(raw)) if raw[at : at + 4] == b"KVCF"]
    assert len(found) == 8
    raw[found[2] + 600] ^= 1
    data.write_bytes(raw)
    with open_store(tmp_path) as store:
        cache = store.namespace(IDENTITY, WIDE, codec=codec)
        out = np.empty(block(1, heads=6)[0].nbytes, np.uint8)
        assert cache.get_into([name], [out], layers=(2, 3))[0].reason == "corrupt"
        assert cache.get_into([name], [out], layers=(3, 4))[0].reason == "absent", "all of it is dropped"


def test_a_pinned_block_stays_pinned_when_a_put_makes_it_exact(tmp_path: Path) -> None:
    names = keys(300)
    with open_store(tmp_path) as store:
        cache = store.namespace(IDENTITY, LAYOUT, codec="int8")
        assert cache.put(names[0], block(0)).stored
    with open_store(tmp_path) as store:
        cache = store.namespace(IDENTITY, LAYOUT, codec="int8")
        assert cache.pin(names[:1]) == [True]
        assert cache.put(names[0], block(0)).stored
        for i, name in enumerate(names[1:], 1):
            assert cache.put(name, block(i)).stored
        assert cache.match([names[1]]).tiers == ["nvme"], "memory was filled over and over"
        assert cache.match(names[:1]).tiers == ["dram"]
        assert got(cache, names[0]) == block(0).tobytes()
        assert cache.unpin(names[:1]) == [True]


def test_fewer_bytes_become_more_blocks(tmp_path: Path) -> None:
    kept = {}
    for codec in (None, "int4"):
        with open_store(tmp_path / str(codec), "8MiB") as store:
            cache = store.namespace(IDENTITY, LAYOUT, codec=codec)
            names = keys(200)
            for i, name in enumerate(names):
                assert cache.put(name, block(i)).stored
            store.flush()
            kept[codec] = sum(tier == "nvme" for tier in store_tiers(cache, names))
    assert kept["int4"] > 2 * kept[None]


def store_tiers(cache: Any, names: list[bytes]) -> list[str]:
    return [cache.match([name]).tiers[0] for name in names if cache.contains([name])[0]]


def test_what_does_not_shrink_is_stored_as_it_is(tmp_path: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 256, LAYOUT.block_bytes, np.uint8).tobytes()
    name = keys(1)[0]
    for fresh in (True, False):
        with open_store(tmp_path, codec="zstd") as store:
            cache = store.namespace(IDENTITY, LAYOUT)
            assert cache.put(name, noise).stored == fresh
            store.flush()
            assert got(cache, name) == noise
            assert store.stats()["tiers"]["nvme"]["used_bytes"] >= LAYOUT.block_bytes


def test_a_damaged_coded_block_is_a_miss(tmp_path: Path) -> None:
    names = keys(3)
    with open_store(tmp_path, codec="zstd") as store:
        cache = store.namespace(IDENTITY, LAYOUT)
        cache.put_many(names, [block(i) for i in range(3)])
        store.flush()
    data = tmp_path / "kvtier.dat"
    raw = bytearray(data.read_bytes())
    frames = [at for at in range(0, len(raw), 4096) if raw[at : at + 4] == b"KVCF"]
    assert len(frames) >= 3
    for at in frames:
        raw[at + 600] ^= 1
    data.write_bytes(raw)
    with open_store(tmp_path, codec="zstd") as store:
        cache = store.namespace(IDENTITY, LAYOUT)
        outs = [np.empty(LAYOUT.block_bytes, np.uint8) for _ in names]
        results = cache.get_into(names, outs)
        assert not any(result.hit for result in results)
        assert {result.reason for result in results} == {"corrupt"}


ZSTD = rates.CodecRates("zstd", saved=0.31, encode_gbs=0.6, decode_gbs=2.0)


@pytest.mark.parametrize(("tier_gbs", "codec"), [(0.5, "zstd"), (1.99, "zstd"), (2.0, None), (7.0, None)])
def test_a_tier_that_is_faster_than_its_codec_is_not_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier_gbs: float, codec: str | None
) -> None:
    choice = rates.choose(ZSTD, tier_gbs)
    assert choice.codec == codec
    assert "decodes 2 GB/s" in choice.why
    assert f"reads {tier_gbs:.2g} GB/s" in choice.why
    monkeypatch.setattr(rates, "codec_rates", lambda name: ZSTD)
    with open_store(tmp_path, codec="auto", emulate_gbs=tier_gbs) as store:
        cache = store.namespace(IDENTITY, LAYOUT)
        assert cache.put(keys(1)[0], block(1)).stored
        store.flush()
        used = store.stats()["tiers"]["nvme"]["used_bytes"]
        assert (used < 0.9 * LAYOUT.block_bytes) == (codec is not None)


def test_auto_takes_the_tiers_own_rate_where_none_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rates.drive_rate(tmp_path, size=4 << 20) > 1e6
    assert list(tmp_path.iterdir()) == []
    measured = rates.codec_rates("zstd")
    assert 0.2 < measured.saved < 0.5
    assert measured.decode_gbs > 0.01 < measured.encode_gbs
    monkeypatch.setattr(rates, "drive_rate", lambda path: 1e18)
    assert rates.codec_of(Nvme(tmp_path, "16MiB")).codec is None
    monkeypatch.setattr(rates, "drive_rate", lambda path: 1.0)
    assert rates.codec_of(Nvme((tmp_path / "a", tmp_path / "b"), "16MiB")).codec == "zstd"
    monkeypatch.undo()
    missing = rates.codec_of(Nvme(tmp_path / "not" / "there", "16MiB"))
    assert missing.codec is None
    assert "cannot be tried" in missing.why


def test_opaque_blocks_are_compressed_too(tmp_path: Path) -> None:
    data = (b"all work and no play " * 20_000)[: 300 << 10]
    name = keys(1)[0]
    for fresh in (True, False):
        with open_store(tmp_path, codec="zstd") as store:
            cache = store.namespace(b"text")
            assert cache.put(name, data).stored == fresh
            store.flush()
            assert got(cache, name) == data
            assert store.stats()["tiers"]["nvme"]["used_bytes"] < MIB // 10


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="A lossy codec is a namespace's to ask for"):
        Nvme(tmp_path, "16MiB", codec="int8")  # type: ignore[arg-type]
    with open_store(tmp_path) as store:
        with pytest.raises(ConfigError, match="codec='gzip' is not known"):
            store.namespace(IDENTITY, LAYOUT, codec="gzip")
        with pytest.raises(ConfigError, match="lossy codecs take"):
            store.namespace(IDENTITY, codec="int8")
