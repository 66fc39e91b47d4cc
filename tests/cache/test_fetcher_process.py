"""The process that fetches: a child of who reads, found by nobody else, and never silent."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch
from reading import SAMPLES, URL, ask, equal, fetchers, texts

import forebay
from buckets import PATIENCE_S
from forebay.base.process import SENT_TO_ALL
from forebay.caching import link
from forebay.caching.fetcher_process import FetcherProcess

WINDOW = {"window": "150KB"}


@pytest.fixture
def whole(root):
    """Return the hash of each of two epochs."""
    return ask(forebay.open_cache(root / "bucket" / "cache", **WINDOW), epochs=2)


def read_elsewhere(call):
    """Return what a call returns or raises in another thread, which has a connection of its own."""
    found = []

    def read():
        try:
            found.append(call())
        except forebay.ForebayError as error:
            found.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(PATIENCE_S)
    return found[0]


@pytest.mark.slow
def test_what_is_on_disk_may_be_anything(endpoint, whole, tmp_path):
    """Each block is compared with its checksum when it is read."""
    disk = {"directory": tmp_path, "disk": "50MB"}
    assert ask(forebay.open_cache(URL, **disk, **WINDOW), epochs=2) == whole
    for number, path in enumerate(sorted(tmp_path.glob("*.block"))):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data[: -number % 3 or None])
    endpoint.set()
    assert ask(forebay.open_cache(URL, **disk, **WINDOW), epochs=2) == whole
    assert len(list(forebay.open_cache(URL, **disk))) == SAMPLES


@pytest.mark.slow
def test_no_path_is_too_long_for_it(endpoint, local, tmp_path, monkeypatch):
    """It has no socket with a name, and listens to nobody; its parent is who reads."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(folder))
    cached = forebay.open_cache(URL)
    assert equal(cached[7], local[7])
    (pid,) = fetchers()
    assert f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{pid}/status").read_text()
    assert list(folder.iterdir()) == []
    own = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    named = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    assert not [each for each in named if f"socket:[{each[6]}]" in own and len(each) > 7]


@pytest.mark.slow
def test_a_python_without_memfd_create_reads_a_bucket(endpoint, local, tmp_path, monkeypatch):
    """As conda's was built; neither who reads nor who fetches needs it."""
    (tmp_path / "sitecustomize.py").write_text("import os\nos.__dict__.pop('memfd_create', 0)\n")
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{path}")
    monkeypatch.delattr(os, "memfd_create")
    assert equal(forebay.open_cache(URL)[7], local[7])


@pytest.mark.slow
def test_a_fetcher_that_was_stopped_is_continued(endpoint, local, monkeypatch):
    """It is silent, so whoever waits sends SIGCONT."""
    monkeypatch.setattr(link, "_STEP_S", 0.05)
    monkeypatch.setattr(link, "CHECK_S", 0.05)
    cached = forebay.open_cache(URL)
    (pid,) = fetchers()
    os.kill(pid, signal.SIGSTOP)
    assert equal(cached[7], local[7])
    assert fetchers() == [pid]


@pytest.mark.slow
def test_a_fetcher_leaves_signals_to_the_program(endpoint, local):
    """What a scheduler sends to all processes does not make it fetch everything again."""
    cached = forebay.open_cache(URL)
    cached[7]
    (pid,) = fetchers()
    for each in SENT_TO_ALL:
        os.kill(pid, each)
    assert equal(cached[8], local[8])
    assert fetchers() == [pid]


@pytest.mark.slow
def test_a_frozen_fetcher_is_an_error_and_the_same_call_starts_another(
    endpoint, local, monkeypatch
):
    """A loader's `next()`, too, ends with its process ID and what was done."""
    monkeypatch.setattr(link, "_STEP_S", 0.05)
    monkeypatch.setattr(link, "CHECK_S", 0.05)
    monkeypatch.setattr(FetcherProcess, "resume", lambda _: None)  # as in a frozen control group
    cached = forebay.open_cache(URL, **WINDOW)
    with forebay.DataLoader(cached, 24, shuffle=True, seed=3, collate_fn=texts) as loader:
        batches = iter(loader)
        next(batches)
        (pid,) = fetchers()
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(link, "SILENT_S", 0.3)  # not earlier: it may wait for a core
        with pytest.raises(forebay.InputError, match=rf"(?s)process ID {pid}\) has been silent"):
            list(batches)
    monkeypatch.setattr(link, "SILENT_S", 60.0)
    assert equal(cached[7], local[7])
    assert fetchers() != [pid]


@pytest.mark.slow
def test_a_fetcher_without_open_files_refuses_a_reader_and_serves_the_others(endpoint, local):
    """The error names the limit; with more of them, the same call works."""
    cached = forebay.open_cache(URL)
    (pid,) = fetchers()
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    few = min({*range(99)} - {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()})
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, limits[1]))
    refused = read_elsewhere(lambda: cached[7])
    assert isinstance(refused, forebay.InputError) and "ulimit -n" in str(refused)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert equal(read_elsewhere(lambda: cached[7]), local[7])
    assert equal(cached[7], local[7])
    assert fetchers() == [pid]


@pytest.mark.slow
def test_a_reader_without_open_files_is_told_so(endpoint, monkeypatch):
    """Before anything is fetched."""

    def refuse(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("socket.socketpair", refuse)
    with pytest.raises(forebay.InputError, match=r"(?s)Too many open files.*ulimit -n"):
        forebay.open_cache(URL)


@pytest.mark.slow
@pytest.mark.parametrize("start", [None, "fork", "spawn"])
def test_workers_share_the_fetcher_of_who_opened_the_cache(endpoint, whole, start):
    """However they are started: its descriptors are inherited, or passed."""
    context = {} if start is None else {"multiprocessing_context": start}
    cached = forebay.open_cache(URL, **WINDOW)
    with forebay.DataLoader(
        cached, 24, shuffle=True, seed=3, collate_fn=texts, num_workers=2, **context
    ) as loader:
        counts = [len(fetchers()) for _ in loader]
    assert {*counts} == {1}
    if start == "spawn":
        loader = torch.utils.data.DataLoader(
            cached, 200, num_workers=2, collate_fn=texts, multiprocessing_context="spawn"
        )
        assert {len(fetchers()) for _ in loader} == {1}


@pytest.mark.slow
def test_it_ends_with_the_last_dataset_of_its_process(endpoint, monkeypatch):
    """Two of the same cache share it; another endpoint or other credentials have their own."""
    one, other = forebay.open_cache(URL), forebay.open_cache(URL)
    assert len(fetchers()) == 1
    monkeypatch.setenv("AWS_SESSION_TOKEN", "other")
    third = forebay.open_cache(URL)
    assert len(fetchers()) == 2
    del one
    other[0]
    assert len(fetchers()) == 2
    del other
    assert len(fetchers()) == 1
    del third
    assert fetchers() == []
