"""Batches of Hugging Face datasets by column are those that torch makes of their samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import default_collate

from forebay import DataLoader
from forebay.columns.slicing import slicing

# A module of tests/loading may have the name of the library.
pytest.importorskip("datasets.arrow_dataset")
import datasets

pytestmark = pytest.mark.full
ROWS = 40


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Numbers, strings and lists, mapped from a file."""
    columns = {
        "number": list(range(ROWS)),
        "share": np.linspace(0, 1, ROWS, dtype=np.float32),
        "word": [f"w{number}" for number in range(ROWS)],
        "pair": [[number, -number] for number in range(ROWS)],
    }
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # no thread of tqdm's
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "rows")
    return datasets.load_from_disk(tmp_path / "rows")


@pytest.mark.parametrize("form", ["torch", "numpy"])
@pytest.mark.parametrize("select", ["all", "some", "shuffled"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_torch(rows, form, select, workers):
    """In each format, and of whatever rows the dataset selects."""
    dataset = rows.with_format(form)
    if select == "some":
        dataset = dataset.select([3, 1, 39, 3])
    elif select == "shuffled":
        dataset = dataset.shuffle(seed=1)
    assert slicing(dataset, default_collate) is not None
    with DataLoader(dataset, batch_size=3, num_workers=workers) as loader:
        for batch, expected in zip(loader, TorchDataLoader(dataset, batch_size=3), strict=True):
            assert list(batch) == list(expected)
            assert batch["word"] == expected["word"]
            for name in ("number", "share", "pair"):
                assert batch[name].dtype == expected[name].dtype
                assert torch.equal(batch[name], expected[name])


def test_arrow_format_keeps_the_types_of_the_table(rows):
    """Whose samples torch cannot collate."""
    batch = next(iter(DataLoader(rows.with_format("arrow"), batch_size=4)))
    assert batch["pair"].tolist() == [[0, 0], [1, -1], [2, -2], [3, -3]]
    assert batch["word"] == ["w0", "w1", "w2", "w3"]


def test_a_transform_is_called(rows):
    """A sample is then more than its columns, so it is asked for."""
    changed = rows.with_transform(lambda batch: {"double": [2 * n for n in batch["number"]]})
    assert slicing(changed, default_collate) is None
    batches = list(DataLoader(changed, batch_size=4))
    assert batches[1]["double"].tolist() == [8, 10, 12, 14]
