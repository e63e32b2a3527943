"""`kvtier.errors`: one tree, and each error is also what a Python user would catch."""

from __future__ import annotations

import pytest

from kvtier import errors

BUILTINS = {
    "ConfigError": ValueError,
    "InvalidBlockError": ValueError,
    "ClosedError": RuntimeError,
    "LockedError": OSError,
    "FullError": OSError,
    "DeadlineError": TimeoutError,
    "StorageError": OSError,
    "CorruptError": OSError,
    "UnsupportedError": NotImplementedError,
}


@pytest.mark.parametrize(("name", "builtin"), BUILTINS.items())
def test_each_is_a_kvtier_error_and_a_builtin(name: str, builtin: type[Exception]) -> None:
    error = getattr(errors, name)("what, and what to do")
    assert isinstance(error, errors.KvtierError)
    assert isinstance(error, builtin)
    assert str(error) == "what, and what to do"


def test_the_tree_is_complete() -> None:
    assert set(errors.__all__) == {*BUILTINS, "KvtierError"}
