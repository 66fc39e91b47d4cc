"""Locations: what a path or URL names, and files that are replaced as a whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.base.files import absolute, atomic_file, folder_of, is_url, location_in, refuse_foreign
from forebay.base.output_names import TABLE_FORMATS
from forebay.base.table_formats import FORMATS
from forebay.errors import OutputError


@pytest.mark.parametrize(
    ("folder", "name", "whole"),
    [
        ("out", "a/b", "out/a/b"),
        ("out", "/a", "/a"),
        ("s3://b", "a/b", "s3://b/a/b"),
        ("s3://b/out/", "a", "s3://b/out/a"),
        ("memory://", "a", "memory://a"),
        ("s3://b", "/a", "/a"),
        ("zip://sub::s3://b/c.zip", "a", "zip://sub/a::s3://b/c.zip"),
    ],
)
def test_a_name_in_a_folder_is_a_location(folder, name, whole):
    """Also at a URL, where an absolute path stays one, and in a chain of URLs."""
    assert location_in(folder, name) == whole


def test_the_folder_of_a_file_is_a_location_too():
    """None has a file in an archive: what lies beside it cannot be named."""
    assert folder_of("/a/b.csv") == "/a"
    assert folder_of("s3://b/a/c.csv") == "s3://b/a"
    assert folder_of("memory://c.csv") == "memory://"
    assert folder_of("zip://c.csv::s3://b/a.zip") is None
    assert absolute("s3://b/../a") == "s3://b/../a"
    assert not is_url(absolute("a"))


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_file_that_is_not_finished_replaces_nothing(tmp_path, is_ours):
    """The earlier file stays, and nothing is left beside it."""
    path = Path(tmp_path, "x" * 200)  # a temporary name may not be longer than a file system takes
    for content in (b"first", b"second"):
        with atomic_file(path, is_ours=is_ours) as file:
            file.write(content)
        assert path.read_bytes() == content
    with pytest.raises(KeyboardInterrupt), atomic_file(path, is_ours=is_ours) as file:
        file.write(b"third")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"second"
    assert os.listdir(tmp_path) == [path.name]


def test_every_format_has_a_reader_and_a_writer():
    """The names are apart from the classes: workers need them, and import no table."""
    assert set(FORMATS) == set(TABLE_FORMATS)


@pytest.mark.parametrize("given", ["nothing", "a folder", "a variable"])
def test_settings_of_fsspec_are_read_without_it_only_if_there_are_none(tmp_path, given):
    """Its import takes longer than to start the process that fetches."""
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    if given == "a folder":
        (tmp_path / "own.json").write_text('{"s3": {"anon": true}}')
        environment["FSSPEC_CONFIG_DIR"] = str(tmp_path)
    elif given == "a variable":
        environment["FSSPEC_S3"] = '{"anon": true}'
    program = (
        "import json, sys; from forebay.base.files import settings_of; found = settings_of('s3'); "
        "print(json.dumps([found, 'fsspec' in sys.modules]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        check=True,
    )
    found, is_imported = json.loads(answer.stdout)
    assert (found.get("anon"), is_imported) == (
        (None, False) if given == "nothing" else (True, True)
    )


def test_a_file_that_another_run_removes_meanwhile_is_not_odd(tmp_path, monkeypatch):
    """Runs that start at once are told which of them has the folder, not that it is unusable."""
    (tmp_path / "lock").touch()
    names = [tmp_path / "removed", tmp_path / "lock"]
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(names))
    refuse_foreign(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    names.append(tmp_path / "pipe")
    with pytest.raises(OutputError, match="pipe' is a pipe or a device, which forebay does not"):
        refuse_foreign(tmp_path)
