"""Folders that may not be read: an error that says so, and nothing counts as missing."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from doctored import run

from forebay.cli import verify_command
from forebay.errors import LedgerError, OutputError
from forebay.ledger.snapshot import read_snapshot

NOBODY = 65534


@contextlib.contextmanager
def as_nobody():
    """Be a user to whom permissions apply."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def own_output(honest):
    """An output folder of that user, where the user may search all folders above."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(honest, folder, dirs_exist_ok=True)
        if os.geteuid() == 0:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        yield folder / "out"


def test_a_folder_that_may_not_be_read_is_not_missing(own_output):
    """Its files would be made again, and they are there."""
    own_output.joinpath("sub").chmod(0)
    with as_nobody(), pytest.raises(OutputError, match=r"sub' cannot be read: Permission denied"):
        verify_command.callback(str(own_output))
    own_output.joinpath("sub").chmod(0o755)
    with as_nobody():
        assert verify_command.callback(str(own_output)) == 0


def test_a_folder_that_may_not_be_read_does_not_end_a_run(own_output):
    """Such as `lost+found`, where the output folder is a whole disk; the run looks for strays."""
    own_output.joinpath("other").mkdir()
    own_output.joinpath("other").chmod(0)
    if os.geteuid() == 0:
        os.chown(own_output / "other", NOBODY, NOBODY)
    with as_nobody(), contextlib.chdir(own_output.parent):
        report = run(Path("in"), own_output, redo="a")
    assert (report.done, report.failed, report.notes) == (2, 1, ())


@pytest.mark.parametrize("path", [".forebay", ".forebay/ledger.sqlite"])
def test_a_ledger_that_may_not_be_read_is_an_error(own_output, path):
    """Of whoever looks at it from outside."""
    own_output.joinpath(path).chmod(0)
    with as_nobody(), pytest.raises(LedgerError, match=r"cannot be read: Permission denied"):
        read_snapshot(own_output / ".forebay")
