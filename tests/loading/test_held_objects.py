"""Which of a dataset's attributes holds the many objects that workers copy."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from streams import until
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import forebay
from forebay.base import machine
from forebay.loading.held_objects import largest_objects

COUNT = 20_000


class Dataset(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]["label"]


class Slotted:
    __slots__ = ("names", "unset")

    def __init__(self):
        self.names = [f"name {number}" for number in range(COUNT)]


def dicts(count=COUNT):
    return [{"path": f"{number}.jpg", "label": number} for number in range(count)]


CASES = {
    "list": (lambda: Dataset(dicts()), "dataset.items", "a list of 20,000 dicts"),
    "tuple": (lambda: Dataset(tuple(dicts())), "dataset.items", "a tuple of 20,000 dicts"),
    "dict": (lambda: Dataset(dict(enumerate(dicts()))), "dataset.items", "a dict of 20,000 dicts"),
    "set": (lambda: Dataset({str(each) for each in range(COUNT)}), "dataset.items", "20,000 strs"),
    "deque": (lambda: Dataset(deque(dicts())), "dataset.items", "a deque of 20,000 dicts"),
    "array": (
        lambda: Dataset(np.array(dicts(), object)),
        "dataset.items",
        "an array of 20,000 dicts",
    ),
    "mixed": (lambda: Dataset([*dicts(10_000), *"ab" * 9_000]), "dataset.items", "28,000 objects"),
    "nested": (
        lambda: ConcatDataset([TensorDataset(torch.zeros(9)), Subset(Dataset(dicts()), range(9))]),
        "dataset.datasets[1].dataset.items",
        "a list of 20,000 dicts",
    ),
    "in a dict": (lambda: Dataset({"train": dicts()}), "dataset.items['train']", "20,000 dicts"),
    "slots": (Slotted, "dataset.names", "a list of 20,000 strs"),
    "itself": (dicts, "dataset", "a list of 20,000 dicts"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "path", "what"), CASES.values(), ids=CASES)
def test_the_attribute_with_the_most_memory_is_named(make, path, what):
    """Whatever kind of container it is, and within whatever dataset."""
    found = largest_objects(make())
    assert found.path == path
    assert found.what.endswith(what)
    assert found.remedy.startswith(f"forebay.PackedSequence({path}")


def test_columns_of_objects_of_pandas_are_found():
    """The larger one; columns of numbers are not objects."""
    pandas = pytest.importorskip("pandas")
    names = np.array([f"a longer name {number}" for number in range(COUNT)], object)
    frame = pandas.DataFrame({"number": np.arange(COUNT)})
    frame["name"] = pandas.Series(names, dtype=object)
    found = largest_objects(Dataset(frame))
    assert (found.path, found.what) == ("dataset.items['name']", "a column of 20,000 strs")


def test_the_samples_of_an_image_folder_are_found(tmp_path):
    """Of torchvision, as it keeps them."""
    datasets = pytest.importorskip("torchvision.datasets")
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "0.png").touch()
    folder = datasets.ImageFolder(tmp_path)
    folder.samples = folder.imgs = [(f"{tmp_path}/cat/{at}.png", 0) for at in range(COUNT)]
    found = largest_objects(folder)
    assert found.path in ("dataset.samples", "dataset.imgs")
    assert found.what == "a list of 20,000 tuples"


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.zeros(COUNT)),
        Dataset(np.zeros(COUNT)),
        Dataset(forebay.PackedSequence(dicts())),
        Dataset(dicts(100)),
        Dataset(range(COUNT)),
    ],
)
def test_what_workers_share_is_not_named(dataset):
    """Numbers in one block, packed objects, and few objects."""
    assert largest_objects(dataset) is None


def test_sizes_are_about_right():
    """As measured for `PackedSequence`: 864 MB of three million dicts become 171."""
    items = dicts()
    found = largest_objects(Dataset(items))
    assert found.packed_bytes == pytest.approx(forebay.PackedSequence(items).nbytes, rel=0.05)
    assert 200 * COUNT < found.nbytes < 400 * COUNT


def test_a_dataset_that_cannot_be_looked_at_is_let_be():
    """Properties that raise, cycles, and what cannot be pickled."""

    class Odd:
        def __getattr__(self, name):
            raise LookupError(name)

    odd = Odd()
    odd.__dict__["itself"] = odd
    odd.__dict__["functions"] = [lambda: None for _ in range(COUNT)]
    found = largest_objects(odd)
    assert found is None or found.packed_bytes is None


@pytest.mark.slow
def test_the_verdict_names_the_list_that_workers_copy(monkeypatch, tmp_path):
    """And statistics say how much: measured by the workers, as they read it."""
    monkeypatch.setattr(machine, "MEMORY_EVERY_S", 0.0)
    monkeypatch.setattr(machine, "MEMORY_SHARE", 1.0)
    dataset = Dataset(dicts(600_000))
    options = {"num_workers": 1, "shuffle": True, "seed": 0, "collate_fn": len}
    with forebay.DataLoader(dataset, 2000, **options) as loader:

        def is_known():
            for _ in loader:
                pass
            return loader.statistics().worker_bytes > 64 << 20

        until(is_known)
        verdict = str(loader.diagnose())
        assert "dataset.items is a list of 600,000 dicts" in verdict
        assert "forebay.PackedSequence(dataset.items) takes 3" in verdict
        assert loader.diagnose().evidence["worker_bytes"] > 64 << 20
        assert "of the workers' own" in str(loader.statistics())
        assert "list of 600,000 dicts" in loader.report(tmp_path / "report.html").read_text()
