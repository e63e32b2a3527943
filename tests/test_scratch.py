"""Where the commands work: folders that go with them, and places that cannot be used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtier.cli import main
from kvtier.errors import ConfigError
from kvtier.scratch import home, scratch


def test_a_folder_goes_with_its_user(tmp_path: Path) -> None:
    with scratch(tmp_path / "new", "demo-") as folder:
        (folder / "store").mkdir()
        assert folder.parent == tmp_path / "new"
    assert list((tmp_path / "new").iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_running_one_uses_is_not(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from kvtier.scratch import scratch\n"
        "with scratch(pathlib.Path(sys.argv[1]), 'demo-') as folder:\n"
        "    (folder / 'data').write_text('x')\n"
        "    print(folder, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    (tmp_path / "smollm2").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        used = Path(other.stdout.readline().strip())
        with scratch(tmp_path, "demo-"):
            assert (used / "data").exists()
        other.send_signal(signal.SIGTERM)
        other.wait()
    assert (used / "data").exists(), "nobody could clean up"
    with scratch(tmp_path, "kvtier-bench-"):
        assert used.exists(), "another command's"
    with scratch(tmp_path, "demo-"):
        assert not used.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_command_that_is_told_to_end_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    program = (
        "import sys, pathlib, click\n"
        "from kvtier.cli import main\n"
        "from kvtier.scratch import scratch\n"
        "@main.command()\n"
        "def wait():\n"
        "    with scratch(pathlib.Path(sys.argv[1]), 'bench-') as folder:\n"
        "        (folder / 'data').write_text('x')\n"
        "        print('ready', flush=True)\n"
        "        sys.stdin.read()\n"
        "main(['wait'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "ready\n"
        assert len(list(tmp_path.iterdir())) == 1
        command.send_signal(number)
        assert command.wait(60) == code
    assert list(tmp_path.iterdir()) == []


def test_commands_leave_the_signals_of_the_process_as_they_were() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        CliRunner().invoke(main, ["kappa", "show", "Mistral-7B"])
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_missing_parent_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there: mount its drive"):
        home(tmp_path / "missing" / "last")
    assert not (tmp_path / "missing").exists()


def test_a_place_that_takes_no_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        home(tmp_path / "file")
    (tmp_path / "shut").mkdir()
    (tmp_path / "shut").chmod(0o500)
    if os.geteuid():
        with pytest.raises(ConfigError, match="takes no files"):
            home(tmp_path / "shut")
    else:  # to root nothing is shut but what the kernel shuts
        with pytest.raises(ConfigError, match="cannot be made"):
            home(Path("/proc/kvtier"))
