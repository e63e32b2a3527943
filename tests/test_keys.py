"""`kvtier.keys`: against a second implementation, and against the vectors of `docs/FORMAT.md`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvtier import InvalidBlockError, KVLayout, Namespace, Store, keys

FORMAT = Path(__file__).parent.parent / "docs" / "FORMAT.md"


def by_hand(
    identity: bytes, tokens: list[int], block_tokens: int, extras: list[bytes | None], partial: bool
) -> list[bytes]:
    """The chain as the page describes it, with another implementation of BLAKE3."""
    namespace = blake3(identity).digest()
    chain: list[bytes] = []
    for at in range(0, len(tokens), block_tokens):
        block = tokens[at : at + block_tokens]
        if len(block) < block_tokens and not partial:
            break
        number = at // block_tokens
        extra = extras[number] if number < len(extras) else None
        fields = [
            namespace,
            chain[-1] if chain else b"",
            b"".join(token.to_bytes(4, "little") for token in block),
            extra or b"",
        ]
        chain.append(blake3(b"".join(len(field).to_bytes(8, "little") + field for field in fields)).digest())
    return chain


@given(
    st.binary(max_size=200),
    st.lists(st.integers(0, 2**32 - 1), max_size=100),
    st.integers(1, 40),
    st.lists(st.none() | st.binary(max_size=40), max_size=2),
    st.booleans(),
)
def test_the_chain_is_what_the_page_says(
    identity: bytes, tokens: list[int], block_tokens: int, extras: list[bytes | None], partial: bool
) -> None:
    blocks = -(-len(tokens) // block_tokens) if partial else len(tokens) // block_tokens
    extras = extras[:blocks]
    expected = by_hand(identity, tokens, block_tokens, extras, partial)
    assert keys.chain(identity, tokens, block_tokens, extras=extras, partial=partial) == expected
    by_number = {number: extra for number, extra in enumerate(extras) if extra is not None}
    assert keys.chain(identity, tokens, block_tokens, extras=by_number, partial=partial) == expected
    assert keys.namespace_digest(identity) == blake3(identity).digest()


def vectors() -> list[dict[str, Any]]:
    (text,) = re.findall(r"```json\n(\[.*?\])\n```", FORMAT.read_text(), re.DOTALL)
    return json.loads(text)


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: vector["what"])
def test_the_vectors(vector: dict[str, Any]) -> None:
    identity = bytes.fromhex(vector["identity"])
    extras = [bytes.fromhex(extra) for extra in vector["extras"]]
    arguments = (identity, vector["tokens"], vector["block_tokens"])
    assert keys.namespace_digest(identity).hex() == vector["namespace"]
    chain = keys.chain(*arguments, extras=extras, partial=vector["partial"])
    assert [key.hex() for key in chain] == vector["keys"]
    assert by_hand(*arguments, list(extras), vector["partial"]) == chain


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3, 4],
        (1, 2, 3, 4),
        range(1, 5),
        np.array([1, 2, 3, 4], np.int64),
        np.array([1, 2, 3, 4], np.uint8),
        np.array([1, 2, 3, 4], ">i4"),
        np.array([1, 0, 2, 0, 3, 0, 4, 0], np.int16)[::2],
        torch.tensor([1, 2, 3, 4]),
    ],
    ids=str,
)
def test_tokens_of_every_kind(tokens: Any) -> None:
    assert keys.chain(b"model", tokens, 2) == by_hand(b"model", [1, 2, 3, 4], 2, [], False)


@pytest.mark.parametrize(
    "tokens", [[-1], [2**32], [1.0], ["a"], [[1, 2]], [True], np.array([1.5]), [2**70], b"\1\2\3\4"], ids=str
)
def test_what_are_no_tokens(tokens: Any) -> None:
    with pytest.raises(InvalidBlockError, match="were given; allowed"):
        keys.chain(b"model", tokens, 1)


def test_no_tokens_make_no_keys(store: Store) -> None:
    for nothing in ([], (), np.array([]), torch.tensor([])):
        assert keys.chain(b"model", nothing, 4) == keys.chain(b"model", nothing, 4, partial=True) == []
    assert store.namespace(b"model").chain([1, 2, 3]) == []


@pytest.mark.parametrize("count", [0, -4])
def test_a_block_has_a_token(count: int) -> None:
    with pytest.raises(InvalidBlockError, match="at least 1 token"):
        keys.chain(b"model", [1, 2], count)


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({2: b"image"}, "blocks 0 to 1"),
        ({-1: b"image"}, "blocks 0 to 1"),
        ({"0": b"image"}, "blocks 0 to 1"),
        ([b"", b"", b"image"], "blocks 0 to 1"),
        ({0: "image"}, "must be bytes"),
        ([None, 3], "must be bytes"),
    ],
)
def test_what_are_no_extras(extras: Any, message: str) -> None:
    with pytest.raises(InvalidBlockError, match=message):
        keys.chain(b"model", [1, 2, 3, 4], 2, extras=extras)


def test_a_namespaces_own_chain(store: Store) -> None:
    cache: Namespace = store.namespace(b"model", KVLayout(1, "gqa", kv_heads=1, head_dim=8, block_tokens=4))
    chain = cache.chain(range(10), {1: b"image"}, partial=True)
    assert len(chain) == 3
    assert chain[:1] == cache.chain(range(4))
    assert chain[1] != cache.chain(range(8))[1]
