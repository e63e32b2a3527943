"""Print what an extra of pyproject.toml needs, one requirement a line: so that it can be installed before the build."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(project: dict[str, object], extra: str) -> list[str]:
    """The project's own dependencies and those of ``extra``, with extras that name other extras resolved."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    found: list[str] = []
    for line in extras[extra]:
        inner = re.fullmatch(rf"{project['name']}\[(\w+)\]", line)
        found += requirements(project, inner[1]) if inner else [line]
    dependencies = project["dependencies"]
    assert isinstance(dependencies, list)
    return sorted({*dependencies, *found})


if __name__ == "__main__":
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    print("\n".join(requirements(tomllib.loads(pyproject.read_text())["project"], sys.argv[1])))
