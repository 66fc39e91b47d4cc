"""A folder to doctor, and a world around it that must stay as it is."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from doctored import contents, run


@pytest.fixture(scope="session")
def honest(tmp_path_factory):
    """A run over three inputs, of which one fails; named by relative paths, so it can be copied."""
    folder = tmp_path_factory.mktemp("honest")
    (folder / "in").mkdir()
    for name in ("a", "b", "c"):
        (folder / "in" / name).write_text("bad" if name == "c" else name)
    with contextlib.chdir(folder):
        run(Path("in"), folder / "out")
    return folder


@pytest.fixture
def inputs(tmp_path, honest, monkeypatch):
    """Its inputs."""
    shutil.copytree(honest / "in", tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    return Path("in")


@pytest.fixture
def output(tmp_path, honest, inputs):
    """Its output folder."""
    shutil.copytree(honest / "out", tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def outside(tmp_path):
    """A folder that no run may touch; whether it was is looked at in the end."""
    folder = tmp_path / "outside"
    (folder / "staging").mkdir(parents=True)
    for name in ("precious", "staging/precious", "a", "ledger.sqlite"):
        (folder / name).write_text(f"years of work on {name}")
    before = contents(folder)
    yield folder
    assert contents(folder) == before
