"""The audit of a running loader: a few samples are made a second time, and compared."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import random
import time
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, get_worker_info

import forebay
from forebay import DataLoader
from forebay.loading.audit_plan import Difference, audited_offsets, is_due, words_of
from forebay.loading.audit_process import AuditProcess

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:buffer= has no effect"
)


class Samples(Dataset):
    """A thousand samples, each a dict with a part that `part` makes."""

    def __init__(self, part):
        self.part, self.rng, self.order, self.calls = part, np.random.default_rng(), None, 0

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return {"index": index, "part": self.part(self, index)}


def right(samples, index):
    """Draw from all that is seeded."""
    drawn = random.random(), np.random.rand(), samples.rng.random(), torch.rand(3)
    return {"drawn": drawn, "name": f"{index}.jpg"}


def entropy(samples, index):
    """Draw from a generator that is made anew."""
    return index + np.random.default_rng().random()


def of_time(samples, index):
    """Look at the clock."""
    return time.perf_counter()


def counted(samples, index):
    """Count the calls."""
    samples.calls += 1
    return samples.calls


def lazy_order(samples, index):
    """Draw an order when it is first needed."""
    if samples.order is None:
        samples.order = samples.rng.permutation(1000)
    return int(samples.order[index])


def of_worker(samples, index):
    """Ask which worker this is."""
    info = get_worker_info()
    return 0 if info is None else info.id


WRONG = (entropy, of_time, counted, lazy_order, of_worker)
WAYS = {
    "no workers": {},
    "2 workers": {"num_workers": 2},
    "1 worker": {"num_workers": 1},
    "4 workers": {"num_workers": 4},
    "a buffer": {"num_workers": 2, "buffer": "1MB"},
    "a sampler": {"num_workers": 2, "sampler": range(999, -1, -1)},
    "batches": {
        "num_workers": 0,
        "batch_sampler": [[*range(at, at + 8)] for at in range(0, 96, 8)],
    },
    "no batches": {"batch_size": None},
}


def epoch_of(part, way):
    """Return the statistics of a loader after one epoch."""
    options = {"seed": 0, "batch_size": 8, **WAYS[way]}
    options = options if "batch_sampler" not in options else {**options, "batch_size": 1}
    with DataLoader(Samples(part), **options) as loader:
        for _ in loader:
            pass
        return loader.statistics(), str(loader.diagnose())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", WRONG)
def test_what_is_no_function_of_the_seed_is_found_in_the_first_epoch(part, way):
    """In one warning, with sample, part and values; and when the loader is asked."""
    with pytest.warns(UserWarning, match="a sample is not a function of seed=0") as caught:
        statistics, diagnosis = epoch_of(part, way)
    (warning,) = [str(each.message) for each in caught if "function of" in str(each.message)]
    assert "of epoch 0, ['part']: " in warning
    assert statistics.audited >= 4
    assert statistics.differences[0] in warning
    assert statistics.differences[0] in diagnosis
    is_same = part in (lazy_order, of_worker)
    assert ("differs between processes" in warning) == is_same


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_what_is_right_is_not_named(way):
    """At least four samples of the first epoch were compared."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a sample is not")
        statistics, diagnosis = epoch_of(right, way)
    assert (statistics.audited >= 4, statistics.differences) == (True, ())
    assert "a second time" not in diagnosis


def collated(samples, numbers=itertools.count()):  # noqa: B008 - it counts
    """Number the batches."""
    return torch.tensor([each["index"] for each in samples]), next(numbers)


def test_what_collate_fn_does_is_compared():
    """For one batch."""
    with pytest.warns(UserWarning, match=r"the batch of samples \[8, 9, .* of epoch 0, \[1\]: 1"):
        list(DataLoader(Samples(right), 8, seed=0, collate_fn=collated))


class Whole(Samples):
    """Draws numbers for whole batches."""

    def __getitems__(self, indices):
        noise = torch.rand(len(indices))
        return [noise[at] + index for at, index in enumerate(indices)]


def test_whole_batches_are_made_again_as_such():
    """Their samples are a function of the batch."""
    with DataLoader(Whole(right), 8, seed=0) as loader:
        list(loader)
        assert loader.statistics().audited == 1
        assert loader.statistics().differences == ()


def test_nothing_is_made_twice_without_a_seed_or_if_the_dataset_says_so():
    """Of a queue, or of a server that charges; also within another dataset."""
    once = Samples(entropy)
    once.made_once = True
    for dataset, seed in ((Samples(entropy), None), (once, 0), (Subset(once, range(100)), 0)):
        with DataLoader(dataset, 8, seed=seed) as loader:
            list(loader)
            assert loader.statistics().audited == 0


class InOneFile(Dataset):
    """Reads its samples from a file that is open."""

    def __init__(self, path):
        self.file = io.FileIO(path)

    def __len__(self):
        return 400

    def __getitem__(self, index):
        self.file.seek(index)
        time.sleep(0)  # another process may run
        return self.file.read(1)[0]


def test_the_position_in_an_open_file_stays(tmp_path):
    """The process that makes samples again reads the same file, by itself."""
    (tmp_path / "numbers").write_bytes(bytes(each % 251 for each in range(400)))
    dataset = InOneFile(tmp_path / "numbers")
    with DataLoader(dataset, 1, seed=0) as loader:
        found = torch.cat(list(loader)).tolist()
        assert loader.statistics().audited == 5
        assert loader.statistics().differences == ()
    dataset.file.close()
    assert found == [each % 251 for each in range(400)]


class Connected(Dataset):
    """Asks a server for its samples, over a connection that is open."""

    def __init__(self):
        self.ours, self.theirs = multiprocessing.Pipe()

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.ours.send(index)
        return self.theirs.recv()


def test_an_open_connection_is_not_used():
    """Messages of another process would be taken for those of the trainer."""
    dataset = Connected()
    with DataLoader(dataset, 2, seed=0) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(40))
        assert loader.statistics().audited == 0


def test_a_sample_that_hangs_in_a_fork_makes_nobody_wait_long(monkeypatch):
    """It is given up, with its process."""
    monkeypatch.setattr(forebay.loading.iterators, "WAIT_S", 0.05)
    monkeypatch.setattr(forebay.loading.audit_process, "END_S", 0.05)
    trainer = os.getpid()

    def hanging(samples, index):
        if os.getpid() != trainer:
            multiprocessing.Event().wait()
        return index

    with DataLoader(Samples(hanging), 8, seed=0) as loader:
        for _ in range(3):
            assert len(list(loader)) == 125
        assert loader.statistics().audited == 0


def test_a_batch_is_as_without_the_audit():
    """Also of a dataset that counts, which a second time would move."""
    dataset = Samples(counted)
    with pytest.warns(UserWarning, match="a sample is not"):
        found = torch.cat([batch["part"] for batch in DataLoader(dataset, 8, seed=0)])
    assert found.tolist() == list(range(1, 1001))
    assert dataset.calls == 1000


def test_the_price_of_the_audit_is_all_that_its_process_took():
    """Not the samples alone: to begin and to end takes longer than to make small ones."""

    def prepare():
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
        return lambda message: message

    process = AuditProcess(prepare)
    assert process.send("sample")
    assert process.received(20.0) == ["sample"]
    assert process.close() >= 0.05
    assert process.close() == 0.0


# ---- what is decided -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8, 1000])
def test_so_many_samples_are_made_again(size):
    """Five of a first epoch, and one of each later one."""
    first = [audited_offsets(step, size, is_first=True) for step in range(100)]
    places = [at for each in first for at in each if at >= 0]
    assert len(places) == 5
    assert all(0 <= at < size for at in places)
    assert sum(-1 in each for each in first) == 1
    later = [audited_offsets(step, size, is_first=False) for step in range(100)]
    assert later == [(0,), *[()] * 99]


def test_the_audit_takes_a_small_share():
    """After the first epoch: half a percent of what workers do."""
    assert not is_due(made_s=1.0, cost_s=0.01)
    assert is_due(made_s=2.0, cost_s=0.01)


def test_a_difference_is_one_warning():
    """With what to do about it."""
    differences = [
        Difference(0, index, "['x']", "0.5", "0.25", is_stable=index == 7) for index in (7, 3, 3)
    ]
    words = words_of(differences, 5)
    assert words.startswith(
        "a sample is not a function of seed=5, epoch and index: "
        "sample 7 of epoch 0, ['x']: 0.5, and then 0.25, and 1 more\n"
    )
    assert "differs between processes" in words
    assert "OpenCV" in words_of(differences[1:], 5)
    assert "dataset.made_once = True" in words
