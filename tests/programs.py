"""Runs Python programs of their own beside the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def program(text: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of its own, which finds the tests' helpers; ended after two minutes."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", text, *map(str, arguments)],
        text=True,
        capture_output=True,
        check=False,
        timeout=120,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )
