"""Whose bytes these are: everything that changes the meaning of a KV block.

A namespace is the BLAKE3 digest of :meth:`Identity.to_bytes`. A missing or different field is another namespace, so
it is a miss, never a guess.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier import canonical
from kvtier.errors import ConfigError
from kvtier.layout import KVLayout, dtype_name

__all__ = ["Identity", "digest_directory", "digest_model"]

# Fields of a Hugging Face configuration that say where it came from or what to return, not what the numbers mean.
_MEANINGLESS = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    }
)


@dataclass(frozen=True)
class Identity:
    """What a model, its slice and its tenant are, down to the content.

    Args:
        weights: a fingerprint of the weights' *content*, such as :func:`digest_directory` gives. A name is not enough.
        revision: the revision of the checkpoint, where the engine knows one.
        config: the model's configuration, RoPE parameters included.
        kv_dtype: the logical dtype of the KV, as the engine means it; see :func:`kvtier.layout.dtype_name`.
        tp_rank: which tensor-parallel slice these blocks are, 0 to ``tp_size - 1``.
        tp_size: how many tensor-parallel slices there are.
        pp_rank: which pipeline stage.
        pp_size: how many stages.
        lora: a digest of the adapter's *content*, ``None`` without one.
        salt: a secret of the tenant: tenants with different salts never share a block. ``None`` shares.

    Raises:
        ConfigError: for empty weights, an unknown dtype, or a rank outside its size.
    """

    weights: bytes
    revision: str | None = None
    config: Mapping[str, Any] | None = None
    kv_dtype: str | None = None
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    lora: bytes | None = None
    salt: bytes | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.weights, bytes) or not self.weights:
            raise ConfigError(
                f"weights={self.weights!r} is not a fingerprint; it must be bytes made from the weights' content: use digest_directory(DIR)"
            )
        for name in ("lora", "salt"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bytes):
                raise ConfigError(
                    f"{name} is a {type(value).__name__}; it must be bytes (a digest of the content) or None"
                )
        if self.kv_dtype is not None:
            object.__setattr__(self, "kv_dtype", dtype_name(self.kv_dtype))
        for rank, size, name in ((self.tp_rank, self.tp_size, "tp"), (self.pp_rank, self.pp_size, "pp")):
            if not 0 <= rank < size:
                raise ConfigError(
                    f"{name}_rank={rank} with {name}_size={size}; allowed is 0 <= {name}_rank < {name}_size"
                )

    def to_bytes(self, layout: KVLayout) -> bytes:
        """Canonical bytes of this identity and of ``layout``: what the namespace digest is made from. Does not block."""
        return canonical.encode(
            {
                "identity": 1,
                "weights": self.weights,
                "revision": self.revision,
                "config": None if self.config is None else canonical.encode(_meaning(self.config)),
                "kv_dtype": self.kv_dtype,
                "tp": [self.tp_rank, self.tp_size],
                "pp": [self.pp_rank, self.pp_size],
                "lora": self.lora,
                "salt": self.salt,
                "layout": layout.fingerprint(),
            }
        )

    @classmethod
    def from_model(cls, model: Any, **fields: Any) -> Identity:
        """The identity of a Hugging Face model, by the content of its weights.

        Args:
            model: a directory with ``config.json`` and ``*.safetensors``, or a loaded torch model with a ``config``.
                The two kinds of fingerprint differ: use one kind for one store.
            fields: the other fields of :class:`Identity`; ``revision``, ``lora`` and ``salt`` are never guessed.
                ``kv_dtype`` is by default that of a loaded model, and ``None`` for a directory (the layout's dtype
                counts in any case).

        Blocks while it hashes every byte of the weights, at about 1 GB/s a file. Do it once and keep the result.

        Raises:
            ConfigError: where there is no configuration or there are no weights.
        """
        if isinstance(model, str | Path):
            config = _read_config(Path(model))
            fields.setdefault("weights", digest_directory(model))
        else:
            if not hasattr(model, "config") or not hasattr(model, "state_dict"):
                raise ConfigError(
                    f"a {type(model).__name__} was given; allowed are a model's directory, or a loaded model, which has a config "
                    "and a state_dict"
                )
            config = model.config.to_dict()
            fields.setdefault("weights", digest_model(model))
            fields.setdefault("kv_dtype", model.dtype)
        return cls(config=config, **fields)


def digest_directory(directory: str | Path) -> bytes:
    """A digest of every byte of the ``*.safetensors`` files of a directory: a model's weights, or a LoRA adapter.

    Args:
        directory: holds the files; sub-directories do not count.

    Returns:
        32 bytes. The files' names do not count, their order by name does. Blocks while it reads, a thread a file.

    Raises:
        ConfigError: where there is no such file.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{directory} holds no *.safetensors files: give the directory of a model or of an adapter")
    with ThreadPoolExecutor(max_workers=min(8, len(files))) as pool:
        digests = list(pool.map(_digest_file, files))
    return hashlib.blake2b(canonical.encode(["files", *digests]), digest_size=32).digest()


def digest_model(model: Any) -> bytes:
    """A digest of every tensor of a loaded torch model: names, dtypes, shapes and bytes.

    Args:
        model: anything with a ``state_dict()`` of torch tensors, on any device.

    Returns:
        32 bytes. Blocks while it reads; a tensor on a GPU is copied to the host, one at a time.
    """
    import torch

    digest = hashlib.blake2b(digest_size=32)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(canonical.encode([name, str(tensor.dtype), [int(n) for n in tensor.shape]]))
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        digest.update(flat.numpy())
    return digest.digest()


def _digest_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).digest()


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        what = "is not here" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise ConfigError(
            f"{path} {what}: give a loaded model, or the directory of a Hugging Face model with its config.json and "
            "*.safetensors; names of the Hub are not looked up"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, not the fields of a configuration")
    return config


def _meaning(value: Any) -> Any:
    """``value`` without the fields that change no meaning, and with everything that is not plain data as its text."""
    if isinstance(value, Mapping):
        return {str(key): _meaning(item) for key, item in value.items() if str(key) not in _MEANINGLESS}
    if isinstance(value, list | tuple):
        return [_meaning(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    return str(value)
