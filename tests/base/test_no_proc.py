"""A container without /proc: everything works, and only measurements are missing."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import Dataset

import forebay
from forebay.base import machine, process


class Numbers(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.full((3,), index)


@pytest.fixture(autouse=True)
def _no_proc(monkeypatch, tmp_path):
    for module in (machine, process):
        monkeypatch.setattr(module, "PROC", tmp_path / "none")


def double(batch):
    return batch * 2


def copy(source, out):
    out.file(source.name).write_bytes(source.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"seed": 0, "buffer": "1GB"}])
def test_workers_share_their_batches_with_the_trainer(options):
    """The slab finds its own descriptor, which it has to send to them."""
    with forebay.DataLoader(Numbers(), batch_size=4, num_workers=2, **options) as loader:
        assert torch.cat(list(loader))[:, 0].tolist() == list(range(20))
        assert loader.statistics().batch == 5
        assert str(loader.diagnose())


def test_a_cache_is_read(tmp_path):
    """By its path, since there is no name for what a descriptor has open."""
    cached = forebay.cache(Numbers(), tmp_path / "cache", num_workers=0, progress=False)
    assert [int(sample[0]) for sample in cached] == list(range(20))
    assert forebay.open_cache(tmp_path / "cache")[7].tolist() == [7, 7, 7]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_runs_end_well(tmp_path, workers):
    """Nothing that they measure is needed; the next run finds the lock of this one free."""
    options = {"num_workers": workers, "progress": False}
    report = forebay.predict(double, Numbers(), tmp_path / "parts", **options)
    assert (report.done, report.failed) == (20, 0)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a")
    for resumed in (0, 1):
        report = forebay.preprocess(copy, tmp_path / "in", tmp_path / "out", **options)
        assert (report.done, report.resumed) == (1, resumed)
        assert str(report.diagnosis)


def test_measurements_are_missing():
    """Each says so in its own way."""
    assert process.kernel() == "" and process.state_and_start(os.getpid()) == ("", "")
    assert machine.queued_s() == 0 and machine.read_bytes() == 0
    assert machine.cores_idle_s() is None
    times = machine.ProcessTimes()
    times.add([os.getpid()])
    times.add([os.getpid()])
    assert (times.cpu_s, times.queued_s, times.threads_s) == (0, 0, 0)
    assert process.is_alive(os.getpid(), "")
