"""Files in memory: as Python makes them, as the system does, and what serves where both refuse."""

from __future__ import annotations

import os
import warnings

import pytest

from forebay.base import process
from forebay.base.process import memory_file


@pytest.fixture
def opened():
    """Descriptors that the test closes."""
    found: list[int] = []
    yield found
    for descriptor in found:
        os.close(descriptor)


def link_of(descriptor):
    return os.readlink(f"/proc/self/fd/{descriptor}")


def test_a_python_without_memfd_create_has_files_in_memory(monkeypatch, opened):
    """As conda's: the system call is made without it, with the name that /proc shows."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    opened.append(memory_file("forebay-test"))
    assert link_of(opened[0]) == "/memfd:forebay-test (deleted)"
    assert not os.get_inheritable(opened[0])


def refuse(name):
    raise PermissionError("seccomp")


def test_where_the_system_refuses_a_file_without_a_name_serves(monkeypatch, opened, tmp_path):
    """First in shared memory; in a folder that may be on a disk only with a warning, once."""
    for way in ("_by_python", "_by_libc"):
        monkeypatch.setattr(process, way, refuse)
    monkeypatch.setattr(process, "_was_warned", False)
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(process, "_SHARED_MEMORY", str(shared))
    opened.append(memory_file("forebay"))
    assert link_of(opened[0]).startswith(f"{shared}/")
    assert list(shared.iterdir()) == []
    monkeypatch.setattr(process, "_SHARED_MEMORY", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.warns(RuntimeWarning, match=rf"unlinked files in {tmp_path} serve"):
        opened.append(memory_file("forebay"))
    assert link_of(opened[1]).startswith(f"{tmp_path}/")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened.append(memory_file("forebay"))
