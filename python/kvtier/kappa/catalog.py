"""The models, GPUs and links that come with the package, and those of a user's own TOML. Every figure has its source."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.kappa.hardware import HardwareSpec, LinkSpec
from kvtier.kappa.hfconfig import read as read_config
from kvtier.kappa.model import ModelSpec

__all__ = ["Catalog", "catalog", "published"]

_HARDWARE = {
    "dense_flops": "bf16_dense_flops",
    "sparse_flops": "bf16_sparse_flops",
    "hbm_bandwidth": "hbm_bw",
    "hbm_bytes": "hbm_bytes",
    "tdp_w": "tdp_w",
}


class Catalog:
    """Named models, hardware and links.

    Args:
        models: Hugging Face fields by name (with ``model_type``), or a :class:`ModelSpec`.
        hardware: specifications by name.
        links: specifications by name.
    """

    def __init__(
        self,
        models: Mapping[str, Mapping[str, Any] | ModelSpec],
        hardware: Mapping[str, HardwareSpec],
        links: Mapping[str, LinkSpec],
    ) -> None:
        self._models = dict(models)
        self._hardware = dict(hardware)
        self._links = dict(links)

    @property
    def models(self) -> tuple[str, ...]:
        """The models' names."""
        return tuple(self._models)

    @property
    def hardware_names(self) -> tuple[str, ...]:
        """The hardware's names."""
        return tuple(self._hardware)

    @property
    def links(self) -> tuple[str, ...]:
        """The links' names."""
        return tuple(self._links)

    def model(self, name: str) -> ModelSpec:
        """A model; see :meth:`ModelSpec.named`.

        Raises:
            ConfigError: for none or several that fit.
        """
        full = _match(name, self._models, "model")
        entry = self._models[full]
        return entry if isinstance(entry, ModelSpec) else read_config(entry, full)

    def hardware(self, name: str) -> HardwareSpec:
        """Hardware; see :meth:`HardwareSpec.named`.

        Raises:
            ConfigError: for none or several that fit.
        """
        return self._hardware[_match(name, self._hardware, "hardware")]

    def link(self, name: str) -> LinkSpec:
        """A link; see :meth:`LinkSpec.named`.

        Raises:
            ConfigError: for none or several that fit.
        """
        return self._links[_match(name, self._links, "link")]

    def extended(self, path: str | Path) -> Catalog:
        """This catalog with a user's own entries, which win over those of the same name.

        Args:
            path: a TOML file with tables ``[model.NAME]`` (fields of :class:`ModelSpec`), ``[hardware.NAME]``
                (``dense_flops``, ``hbm_bandwidth`` and what else :class:`HardwareSpec` has) and ``[link.NAME]``
                (``read`` and what else :class:`LinkSpec` has), in bytes, bytes/s and FLOP/s.

        Raises:
            ConfigError: where the file cannot be read, or for a missing or unknown key or a bad value.
        """
        document = load_toml(path, {"model", "hardware", "link"})
        models = dict(self._models)
        for name, table in document.get("model", {}).items():
            models[name] = ModelSpec.from_fields({"name": name, **table}, f"{path}: [model.{name}]")
        hardware, links = dict(self._hardware), dict(self._links)
        for name, table in document.get("hardware", {}).items():
            hardware[name] = _build(HardwareSpec, name, table, f"{path}: [hardware.{name}]")
        for name, table in document.get("link", {}).items():
            links[name] = _build(LinkSpec, name, table, f"{path}: [link.{name}]")
        return Catalog(models, hardware, links)


def load_toml(path: str | Path, tables: set[str]) -> dict[str, Any]:
    """A TOML file's content.

    Args:
        path: the file.
        tables: the top-level keys that are allowed.

    Raises:
        ConfigError: where it cannot be read, is not TOML, or has another top-level key.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give the path of a TOML file") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    if unknown := sorted(set(document) - tables):
        raise ConfigError(f"{path} has the unknown table {', '.join(unknown)}; allowed are {', '.join(sorted(tables))}")
    return document


def _build(kind: type[Any], name: str, table: Mapping[str, Any], where: str) -> Any:
    allowed = set(kind.__dataclass_fields__) - {"name"}
    if unknown := sorted(set(table) - allowed):
        raise ConfigError(f"{where} has the unknown key {', '.join(unknown)}; allowed are {', '.join(sorted(allowed))}")
    needed = {"dense_flops", "hbm_bandwidth"} if kind is HardwareSpec else {"read"}
    if missing := sorted(needed - set(table)):
        raise ConfigError(f"{where} has no {', '.join(missing)}: add {'it' if len(missing) == 1 else 'them'}")
    try:
        return kind(name, **table)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _match(name: str, entries: Mapping[str, object], what: str) -> str:
    """The one entry that ``name`` means: equal, else the only one that begins with it, else the only one that has it
    (if it is of three letters or more).
    """
    wanted = _plain(name)
    found: list[str] = []
    if wanted:
        plain = {entry: _plain(entry) for entry in entries}
        for fits in (str.__eq__, str.startswith, str.__contains__)[: 3 if len(wanted) > 2 else 2]:
            found = [entry for entry, text in plain.items() if fits(text, wanted)]
            if found:
                break
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"the {what} {name!r} may be {', '.join(found)}: give more of the name")
    raise ConfigError(
        f"the {what} {name!r} is not in the catalog; it has {', '.join(entries)}: or describe your own in a TOML file"
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _data(name: str) -> Any:
    return json.loads((files("kvtier.kappa") / "data" / name).read_text(encoding="utf-8"))


@cache
def catalog() -> Catalog:
    """The package's own catalog: 14 models, 6 GPUs, 10 links."""
    data = _data("catalog.json")
    hardware = {}
    for name, entry in data["hardware"].items():
        figures = {ours: entry.get(theirs) for ours, theirs in _HARDWARE.items()}
        values = {key: figure["value"] for key, figure in figures.items() if figure is not None}
        sources = {key: figure["source"] for key, figure in figures.items() if figure is not None}
        hardware[name] = HardwareSpec(name, **values, sources=sources, note=entry.get("conflict", ""))
    links = {
        name: LinkSpec(
            name,
            read=entry.get("per_dir", entry.get("read")),
            write=entry.get("write"),
            measured=tuple((each["value"], each["source"]) for each in entry.get("measured", ())),
            source=entry["source"],
        )
        for name, entry in data["links"].items()
    }
    return Catalog(data["models"], hardware, links)


@cache
def published() -> tuple[dict[str, Any], ...]:
    """The cells of the article's tables: ``id, quantity, published, unit, verdict, note`` each."""
    return tuple(_data("published.json"))
