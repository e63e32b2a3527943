"""Arguments that a newcomer mistakes: each is refused with what was given, what is allowed, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvtier import Cxl, Dram, Identity, KVLayout, Namespace, Nvme, Store
from kvtier.errors import ConfigError, InvalidBlockError
from kvtier.prefill import namespace
from kvtier.prefill.prompt import check_parts, token_ids

KEY = b"k" * 32
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=4, dtype="fp16", block_tokens=8)


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(Dram("1MiB")) as store:
        yield store


@pytest.fixture
def cache(store: Store) -> Namespace:
    return store.namespace(Identity(weights=b"w", kv_dtype="fp16"), LAYOUT)


LISTS: list[Callable[[Store, Any], Any]] = [
    lambda store, keys: store.match(keys),
    lambda store, keys: store.prefetch(keys),
    lambda store, keys: store.contains(keys),
    lambda store, keys: store.remove(keys),
    lambda store, keys: store.pin(keys),
    lambda store, keys: store.lease(keys),
    lambda store, keys: store.get_into(keys, []),
]


@pytest.mark.parametrize("verb", LISTS)
def test_a_key_where_a_list_belongs(store: Store, verb: Callable[[Store, Any], Any]) -> None:
    for key in (KEY, bytearray(KEY), memoryview(KEY)):
        with pytest.raises(InvalidBlockError, match=r"was given for keys, which is a list of keys: .* \[key\]"):
            verb(store, key)
    with pytest.raises(InvalidBlockError, match=r"type str .* was given for keys; allowed is a list"):
        verb(store, "abc")
    with pytest.raises(InvalidBlockError, match=r"keys\[1\] is an object of type str .*a key is 16 to 64 bytes"):
        verb(store, [KEY, "abc"])
    with pytest.raises(InvalidBlockError, match=r"type int \(7\) was given for keys"):
        verb(store, 7)


def test_a_key_of_another_type(store: Store) -> None:
    with pytest.raises(InvalidBlockError, match=r"type str \('abc'\) was given as a key; a key is 16 to 64 bytes"):
        store.put("abc", b"x")  # type: ignore[arg-type]
    with pytest.raises(InvalidBlockError, match=r"type int \(3\) was given as a key"):
        store.put(KEY, b"x", parent=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidBlockError, match="given for parents, which is a list"):
        store.put_many([KEY], [b"x"], parents=KEY)  # type: ignore[arg-type]
    with pytest.raises(InvalidBlockError, match=r"parents\[0\] is .* None for a block without a parent"):
        store.put_many([KEY], [b"x"], parents=["a"])  # type: ignore[list-item]
    assert store.stats()["blocks"] == 0


@pytest.mark.parametrize("bad", ["a", [1], b"1"])
def test_a_timeout_that_is_no_number(store: Store, bad: Any) -> None:
    for verb in (lambda: store.put(KEY, b"x", timeout=bad), lambda: store.flush(timeout=bad)):
        with pytest.raises(ConfigError, match="was given as a timeout or deadline; allowed are seconds from 0 on"):
            verb()
    with pytest.raises(ConfigError, match="was given as a timeout or deadline; allowed are seconds from 0 on"):
        store.prefetch([KEY], deadline=bad)


def test_bytes_in_the_shape_of_a_block_are_taken(cache: Namespace) -> None:
    shape = LAYOUT.shape()
    block = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape).view(np.float16)
    views = [block.view(np.uint8), torch.from_numpy(block).view(torch.uint8), torch.from_numpy(block.view(np.uint16))]
    assert views[0].shape == (*shape[:-1], 2 * shape[-1])
    for number, view in enumerate(views):
        key = bytes([number]) * 16
        assert cache.put(key, view).stored
        out = torch.zeros_like(view) if isinstance(view, torch.Tensor) else np.zeros_like(view)
        (result,) = cache.get_into([key], [out])
        assert result.hit
        assert np.asarray(out).tobytes() == block.tobytes()
    swapped = block.transpose(0, 1, 3, 2, 4).copy().view(np.uint8)
    for wrong in (swapped, torch.from_numpy(swapped)):
        with pytest.raises(InvalidBlockError, match="ranspose it, or pass flat bytes"):
            cache.put(b"w" * 16, wrong)
    with pytest.raises(InvalidBlockError, match="this layout takes fp16"):
        cache.put(b"w" * 16, torch.from_numpy(block.view(np.uint32)))


@pytest.mark.parametrize("tiers", [lambda path: [Nvme(path, "16MiB")], lambda path: [Cxl("1MiB", numa_node=0)]])
def test_a_store_without_dram_says_what_to_add(tmp_path: Path, tiers: Callable[[Path], list[Any]]) -> None:
    with pytest.raises(ConfigError, match=r'no DRAM tier was given.*Add one in front, such as Dram\("1GiB"\)'):
        Store(*tiers(tmp_path / "kv"))
    assert not (tmp_path / "kv").exists()


def test_only_the_last_part_of_a_path_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there: mount its drive, or make that first"):
        Store(Dram("1MiB"), Nvme(tmp_path / "mnt" / "kv", "16MiB"))
    assert not (tmp_path / "mnt").exists()
    (tmp_path / "mnt").mkdir()
    Store(Dram("1MiB"), Nvme(tmp_path / "mnt" / "kv", "16MiB")).close()


def test_stores_and_namespaces_show_what_they_are(store: Store, cache: Namespace) -> None:
    cache.put(KEY, bytes(LAYOUT.block_bytes))
    assert repr(store).startswith("<Store(Dram(size='1MiB', ")
    assert repr(store).endswith(f"policy={store.config.policy!r}): 1 blocks>")
    assert repr(cache).startswith(f"Namespace(digest={cache.digest.hex()[:12]}…, layout=KVLayout(")
    store.close()
    assert repr(store).endswith(": closed>")


class Model(torch.nn.Module):
    config = object()

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return torch.nn.Embedding(100, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hello", r"'hello' is text; .* tokenizer\(text\).input_ids"),
        (transformers.BatchEncoding({"input_ids": [1]}), "a BatchEncoding; .* pass its input_ids"),
        ([1, 100], "the token 100; allowed are 0 to 99: use the model's own tokenizer"),
        ([1, -100], "the token -100; allowed are 0 to 99"),
        ([1.5], "something else than whole numbers"),
        ([[1, 2]], "something else than whole numbers"),
        (7, "something else than whole numbers"),
        (torch.zeros(2, 3, dtype=torch.long), r"shape \(2, 3\)"),
        ([], "empty"),
    ],
    ids=str,
)
def test_what_is_no_prompt(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        token_ids(given, Model())


def test_a_prompt() -> None:
    for given in ([0, 99], np.array([0, 99]), torch.tensor([0, 99]), torch.tensor([[0, 99]]), (0, 99)):
        assert token_ids(given, Model()) == [0, 99]


def test_swapped_arguments(store: Store) -> None:
    for model, other, what in (
        (store, Model(), "as the model"),
        (Model(), [1, 2], "as the store"),
        (Model(), Model(), "as the store"),
    ):
        with pytest.raises(ConfigError, match=f"{what}; allowed is .* order is model, store, input_ids"):
            check_parts(model, other)
    check_parts(Model(), store)
    for given in ((store, "gpt2"), (Model(), store)):
        with pytest.raises(ConfigError, match=r"as the (model|store); allowed is .* order is store, model$"):
            namespace(*given)
    with pytest.raises(ConfigError, match=r"a str \('gpt2'\) was given as the model"):
        namespace(store, "gpt2")
