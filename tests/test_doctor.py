"""`forebay doctor` says what a bug report needs, wherever it runs, and nothing secret."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import forebay
from forebay import cli_doctor
from forebay.base import machine
from forebay.cli import cli
from forebay.cli_doctor import answer_of, kind_of_file_system, table_row

SOURCE = str(Path(forebay.__file__).parents[1])
# Without what takes seconds.
QUICK = ("doctor", "--seconds", "0")


def rows_of(text: str) -> dict[str, str]:
    """Return the table's rows; each line has to be one."""
    lines = text.splitlines()
    found = [re.fullmatch(r"\| (.+?) +\| (.*) \|", line) for line in lines]
    assert all(found), text
    return {row[1].strip(): row[2] for row in found}


def fail(error: Exception):
    def check(*_):
        raise error

    return check


def test_a_row_is_a_row_of_markdown_whatever_is_in_it():
    """Bars are escaped, lines become one, and rows are aligned on a terminal."""
    rows = [table_row("cores", "2"), table_row("limits", "a | b\nc")]
    assert rows == ["| cores          | 2 |", "| limits         | a \\| b c |"]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            OSError(13, "Permission denied", "/home/somebody/x"),
            "PermissionError: Permission denied",
        ),
        (ImportError("no libx.so: /home/somebody/lib/libx.so\nmore"), "no libx.so: <path>"),
        (RuntimeError("see 'https://me:word@host/a'"), "see 'https:<path>'"),
        (ValueError(), "FAILED: ValueError"),
    ],
)
def test_a_check_that_fails_says_so_without_paths(error, shown):
    """The line tells what is wrong, and its end is that of the message's first line."""
    value, is_right = answer_of(fail(error))
    assert not is_right
    assert value.startswith("FAILED: ") and value.endswith(shown)


def test_one_failed_check_leaves_the_others(monkeypatch):
    """The exit code says that there is one."""
    monkeypatch.setattr(cli_doctor, "memory_file", fail(OSError(24, "Too many open files")))
    result = CliRunner().invoke(cli, QUICK, standalone_mode=False)
    rows = rows_of(result.stdout)
    assert result.return_value == cli_doctor.FAILURES
    assert rows["file in memory"] == "FAILED: OSError: Too many open files"
    assert rows["forebay"] == forebay.__version__


def test_it_works_without_proc(monkeypatch, tmp_path):
    """What cannot be known is said to be unknown."""
    monkeypatch.setattr(machine, "PROC", tmp_path / "none")
    monkeypatch.setattr(cli_doctor, "PROC", tmp_path / "none")
    monkeypatch.setattr(cli_doctor, "free_memory", lambda: machine.free_memory(tmp_path))
    result = CliRunner().invoke(cli, QUICK, standalone_mode=False)
    rows = rows_of(result.stdout)
    assert result.return_value == cli_doctor.DONE, result.stdout
    assert rows["the folder"].startswith("unknown file system, ")


def test_a_containers_limits_are_whole_on_their_lines(monkeypatch, tmp_path):
    """Groups of both versions limit it, and it is said what the machine has."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    groups = "4:memory:/job\n3:pids:/job\n2:cpu,cpuacct:/job\n0::/\n"
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    files = {"memory/job/memory.limit_in_bytes": str(700 << 20), "pids/job/pids.max": "60"}
    files |= {"pids/job/pids.current": "4"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    usable = machine.usable_memory(tmp_path / "proc", tmp_path)
    monkeypatch.setattr("forebay.show.report.usable_memory", lambda: usable)
    rows = rows_of(CliRunner().invoke(cli, QUICK, standalone_mode=False).stdout)
    assert rows["memory"].startswith("734 MB usable of ")
    assert "control group, 60, of which 4 are in use" in rows["limits"]
    assert rows["limits"].endswith("(ulimit -n)")


def test_the_file_system_is_that_of_the_nearest_mount(monkeypatch, tmp_path):
    """A folder whose name only begins like a mount is not on it; blanks are written in octal."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mounts").write_text(
        "root / ext4 rw 0 0\nserver:/x /da\\040ta nfs4 rw 0 0\ntmp /da\\040ta/in tmpfs rw 0 0\n"
    )
    monkeypatch.setattr(cli_doctor, "PROC", tmp_path)
    found = {
        name: kind_of_file_system(name) for name in ("/", "/da ta", "/da ta/in/a", "/da tables")
    }
    assert [*found.values()] == ["ext4", "nfs4", "tmpfs", "ext4"]


@pytest.mark.slow
def test_the_command_names_nobody_and_writes_nothing(tmp_path):
    """In isolated mode, as a whole; the table fits on a screen."""
    home = tmp_path / "somebodys-home"
    home.mkdir()
    secrets = {"AWS_SECRET_ACCESS_KEY": "not-for-others", "USER": "somebodys-name"}
    code = f"import sys; sys.path.insert(0, {SOURCE!r}); from forebay.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, "doctor", "--seconds", "0.02", "."],
        cwd=home,
        env=os.environ | secrets | {"HOME": str(home)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout)
    assert {"cores", "memory", "/dev/shm", "a worker", "loaders"} <= rows.keys()
    assert "batches/s" in rows["loaders"] and "isolated" in rows["interpreter"]
    assert len(rows) <= 24
    assert not re.search("somebody|not-for-others", done.stdout + done.stderr)
    assert [*home.iterdir()] == []
