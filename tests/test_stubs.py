"""The stub of the extension says what it has, and every public name says what it does."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier import _kvtier

MODULES = ["kvtier"] + [
    f"kvtier.{name}"
    for name in [
        "aio",
        "buffers",
        "codecs",
        "config",
        "errors",
        "identity",
        "job",
        "keys",
        "layout",
        "lease",
        "machine",
        "results",
        "store",
    ]
]


def test_the_stub_is_true(tmp_path: Path) -> None:
    # Python shows `__buffer__` from 3.12 on.
    allowed = tmp_path / "allowed"
    allowed.write_text(r"kvtier\._kvtier\.\w+\.__buffer__" if sys.version_info < (3, 12) else "")
    command = [sys.executable, "-m", "mypy.stubtest", "kvtier._kvtier", "--mypy-config-file", "pyproject.toml"]
    run = subprocess.run(
        [*command, "--allowlist", str(allowed)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    assert [bare for public in module.__all__ for bare in _undocumented(public, getattr(module, public))] == []


def test_every_name_of_the_extension_is_documented() -> None:
    assert _kvtier.__doc__
    public = [name for name in dir(_kvtier) if not name.startswith("_")]
    assert [bare for name in public for bare in _undocumented(name, getattr(_kvtier, name))] == []


def test_the_package_gives_what_it_says() -> None:
    assert all(hasattr(kvtier, name) for name in kvtier.__all__)
    shown = {name for name, value in vars(kvtier).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert shown <= set(kvtier.__all__)


def _undocumented(name: str, value: Any) -> list[str]:
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return []  # data, modules, and aliases of types
    bare = [] if inspect.getdoc(value) else [name]
    if inspect.isclass(value) and not issubclass(value, BaseException):
        for part, member in vars(value).items():
            if not part.startswith("_") and callable(getattr(value, part)) and not inspect.getdoc(member):
                bare.append(f"{name}.{part}")
    return bare
