"""A cache for an inference server in a few lines: store the KV of a prompt, and find it again by its prefix.

The "engine" here makes KV from the tokens with NumPy; a real one hands over its own buffers (torch tensors, DLPack, NumPy).
Run it twice with the same directory: the second time the blocks come from NVMe.

    python examples/embed.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from kvtier import Dram, Identity, KVLayout, Nvme, Store

LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=64, dtype="fp16", block_tokens=16)
# What the bytes mean. A real server fingerprints its weights: kvtier.Identity.from_model(directory).
IDENTITY = Identity(weights=b"the digest of the weights", kv_dtype="fp16")


def compute(tokens: list[int]) -> np.ndarray:
    """Stands for the model: the KV of one block, in the layout's shape."""
    rng = np.random.default_rng(tokens)
    return rng.standard_normal(LAYOUT.shape(len(tokens)), dtype=np.float32).astype(np.float16)


def main(directory: Path) -> None:
    """Serve one prompt: load the prefix that is stored, compute the rest, store it."""
    prompt = list(range(1, 100))
    directory.mkdir(parents=True, exist_ok=True)
    with Store(Dram("64MiB"), Nvme(directory, "256MiB")) as store:
        cache = store.namespace(IDENTITY, LAYOUT)
        keys = cache.chain(prompt)
        found = cache.match(keys)
        print(f"{found.tokens} of {len(prompt)} tokens are stored: {found.bytes}")

        blocks = [np.empty(LAYOUT.shape(), np.float16) for _ in keys]
        results = cache.get_into(keys[: found.blocks], blocks[: found.blocks])
        ready = next((i for i, result in enumerate(results) if not result.hit), found.blocks)

        size = LAYOUT.block_tokens
        for i in range(ready, len(keys)):
            blocks[i] = compute(prompt[i * size : (i + 1) * size])
        parents = [None, *keys[:-1]]
        cache.put_many(keys[ready:], blocks[ready:], parents=parents[ready:])
        right = all(np.array_equal(blocks[i], compute(prompt[i * size : (i + 1) * size])) for i in range(len(keys)))
        print(f"{ready} blocks loaded, {len(keys) - ready} computed; all as computed: {right}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/embed.py DIRECTORY")
    main(Path(sys.argv[1]))
