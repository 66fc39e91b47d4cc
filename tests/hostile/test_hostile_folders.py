"""Links, pipes and folders in unexpected places: nothing outside of the folder is touched."""

from __future__ import annotations

import os

import pytest
from doctored import CALLS, contents, doctor, run, verify

from forebay.errors import ForebayError, OutputError

OWN = ["ledger.sqlite", "ledger.sqlite-journal", "lock", "staging", "probe", "cache.json.new"]


@pytest.mark.parametrize("name", OWN)
def test_a_link_in_the_place_of_forebays_own_files_is_refused(inputs, output, outside, name):
    """It would be written through, or emptied."""
    own = output / ".forebay" / name
    own.unlink(missing_ok=True)
    own.symlink_to(outside / ("staging" if name == "staging" else "precious"))
    for call in ("the same call", "redo=*", "retry"):
        with pytest.raises(ForebayError, match=r"is a link to|is damaged"):
            CALLS[call](inputs, output)


def test_forebays_own_folder_is_no_link(inputs, output, outside):
    """Its `staging` is emptied by every run."""
    (output / ".forebay").rename(output / "moved")
    (output / ".forebay").symlink_to(outside)
    for call in ("the same call", "redo=*", "retry"):
        with pytest.raises(ForebayError, match=r"is a link to|is damaged"):
            CALLS[call](inputs, output)


@pytest.mark.parametrize("name", ["lock", "probe", "ledger.sqlite-journal"])
def test_a_pipe_in_the_place_of_forebays_own_files_is_refused(inputs, output, name):
    """Whoever opens it might wait for ever."""
    (output / ".forebay" / name).unlink(missing_ok=True)
    os.mkfifo(output / ".forebay" / name)
    with pytest.raises(OutputError, match="is a pipe or a device"):
        run(inputs, output)


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_removed_through_a_link(tmp_path, inputs, output, outside, call):
    """A folder of outputs became a link: what it leads to is somebody else's."""
    os.rename(output / "sub", tmp_path / "moved")
    (output / "sub").symlink_to(outside)
    doctor(output, "INSERT INTO file_changes VALUES('sub/precious', NULL)")
    CALLS[call](inputs, output)
    assert (output / "sub").is_symlink()


def test_nothing_is_published_through_a_link(tmp_path, inputs, output, outside):
    """Its input fails, and names the link; the rest is done."""
    os.rename(output / "sub", tmp_path / "moved")
    (output / "sub").symlink_to(outside)
    (inputs / "d").write_text("d")
    report = run(inputs, output)
    (failure,) = [each for each in report.failures if each.source.endswith("d")]
    assert "a symbolic link leads to" in failure.message


@pytest.mark.parametrize("pending", [("sub/new", "x"), ("link/new", "y")])
def test_no_link_in_the_staging_folder_is_followed(inputs, output, outside, pending):
    """Nothing from outside is moved in."""
    staging = output / ".forebay" / "staging"
    staging.mkdir()
    (staging / "w").symlink_to(outside)
    name, _ = pending
    doctor(output, "INSERT INTO file_changes VALUES(?, '.forebay/staging/w/precious')", name)
    assert verify(output) == 3
    assert name not in contents(output)
