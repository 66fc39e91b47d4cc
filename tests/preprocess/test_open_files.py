"""Files that a function leaves open: refused before the input counts as done."""

from __future__ import annotations

import errno
import fcntl
import gc
import os

import numpy as np
import pytest
from driving import make_inputs, published

import forebay
from forebay.ledger.ledger import Ledger
from forebay.outputs import staging_folders

KEPT = []


class Holder:
    """Keeps its file open, and is part of a cycle of references."""

    def __init__(self, path):
        self.me = self
        self.file = path.open("w")


def keep_in_a_global(source, out):
    """Write to a file that a global variable keeps open."""
    KEPT.append(out.file(source.name).open("w"))
    KEPT[-1].write(source.read_text())


def keep_a_descriptor(source, out):
    """Write to a file whose descriptor stays open, as a library in C may leave one."""
    KEPT.append(os.open(out.file(source.name), os.O_RDWR | os.O_CREAT))
    os.write(KEPT[-1], source.read_bytes())


def keep_one_of_many(source, out):
    """Write many files, and leave one open."""
    for number in range(10):
        with out.file(f"{source.stem}-{number}.txt").open("w") as file:
            file.write("x")
    KEPT.append(out.file(source.name).open("w"))


class KeepInTheObject:
    """Keeps its last file open."""

    def __call__(self, source, out):
        """Open a file while another is open, whose descriptor is free again afterwards."""
        with source.open() as file:
            self.file = out.file(source.name).open("w")
            self.file.write(file.read())


def leave_to_the_collector(source, out):
    """Leave a cycle of references, which Python finds at some time."""
    Holder(out.file(source.name)).file.write(source.read_text())


def close(source, out):
    """Leave open only what cannot lose anything: a file for reading."""
    path = out.file(source.name)
    path.write_bytes(source.read_bytes())
    KEPT.append(path.open())
    array = np.lib.format.open_memmap(out.file(f"{source.stem}.npy"), "w+", np.uint8, (3,))
    array[:] = 7


@pytest.fixture(autouse=True)
def _closed():
    yield
    for each in KEPT:
        if isinstance(each, int):
            os.close(each)
        elif hasattr(each, "close"):
            each.close()
    KEPT.clear()


@pytest.fixture(params=["leases", "no leases"])
def _file_system(request, monkeypatch):
    """With and without leases, as on NFS."""
    if request.param == "no leases":
        real = fcntl.fcntl

        def refuse(descriptor, command, *argument):
            if command == fcntl.F_SETLEASE:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(descriptor, command, *argument)

        monkeypatch.setattr(staging_folders.fcntl, "fcntl", refuse)


def run(work, tmp_path, **options):
    options = {"num_workers": 0, "retries": 0, "progress": False, **options}
    inputs = make_inputs(tmp_path / "in", 3)
    return forebay.preprocess(work, sorted(inputs.iterdir()), tmp_path / "out", **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file", "ignore:Exception ignored")
@pytest.mark.usefixtures("_file_system")
@pytest.mark.parametrize(
    ("work", "name"),
    [
        (keep_in_a_global, "keep_in_a_global"),
        (keep_a_descriptor, "keep_a_descriptor"),
        (keep_one_of_many, "keep_one_of_many"),
        (KeepInTheObject(), "KeepInTheObject"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_file_that_is_left_open_fails_its_input(tmp_path, work, name):
    """The message names the file and the function; nothing of the input is published."""
    report = run(work, tmp_path)
    assert (report.done, report.failed) == (0, 3)
    assert report.failures[0].kind == "output"
    message = report.failures[0].message
    assert message.startswith(f"out.file('0000.txt') is still open for writing: {name} did not")
    assert published(tmp_path / "out") == {}
    if isinstance(work, KeepInTheObject):
        work.file.close()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 2, "backend": "thread"}])
def test_workers_see_it_too(tmp_path, options):
    """A worker process, and a thread beside others."""
    report = run(keep_in_a_global, tmp_path, **options)
    assert (report.done, report.failed) == (0, 3)
    assert "keep_in_a_global did not close it" in report.failures[0].message


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file", "ignore:Exception ignored")
@pytest.mark.usefixtures("_file_system")
def test_a_file_that_only_a_cycle_keeps_open_is_complete(tmp_path):
    """It is closed first, and the ledger has the size that it has then."""
    gc.disable()
    try:
        report = run(leave_to_the_collector, tmp_path)
    finally:
        gc.enable()
    assert (report.done, report.failed) == (3, 0)
    texts = {path.name: path.read_bytes() for path in (tmp_path / "in").iterdir()}
    assert published(tmp_path / "out") == texts
    with Ledger.open(tmp_path / "out" / ".forebay") as ledger:
        sizes = {name: size for name, size, _ in ledger.outputs()}
    assert sizes == {name: len(text) for name, text in texts.items()}


@pytest.mark.usefixtures("_file_system")
def test_what_cannot_lose_anything_may_stay_open(tmp_path):
    """A file that is open for reading, and a memory map that the function drops."""
    report = run(close, tmp_path)
    assert (report.done, report.failed) == (3, 0)
    assert np.load(tmp_path / "out" / "0000.npy").tolist() == [7, 7, 7]


@pytest.mark.slow
def test_a_dataset_and_its_save_are_named(tmp_path):
    """Either may have left the file open."""

    class Numbers:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return index

    def save(sample, out):
        KEPT.append(out.file(f"{sample}.txt").open("w"))

    report = forebay.preprocess(
        Numbers(), output=tmp_path / "out", save=save, num_workers=0, retries=0, progress=False
    )
    assert "Numbers.__getitem__ or " in report.failures[0].message
    assert "save did not close it" in report.failures[0].message
