"""Whether batches of a Hugging Face dataset are made of its columns, and what is said if not.

The library need not be installed: a class stands in for its dataset.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from same import assert_same
from torch.utils.data import default_collate

from forebay import DataLoader
from forebay.columns.slicing import slicing


class Rows:
    """What a loader reads of a dataset of the library `datasets`, with the format "torch"."""

    def __init__(self, **columns):
        self.data = SimpleNamespace(table=pa.table(columns))
        self.format = {"type": "torch", "columns": list(columns), "output_all_columns": False}

    def __len__(self):
        return self.data.table.num_rows

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        rows = self.data.table.take(indices).to_pylist()
        return [{name: self._tensor(value) for name, value in row.items()} for row in rows]

    def _tensor(self, value):
        if isinstance(value, timedelta):
            value = value.total_seconds()
        return torch.tensor(float("nan") if value is None else value)


@pytest.fixture
def hugging_face(monkeypatch):
    """Return a class that is taken for the dataset of the library, which need not be there."""
    module = SimpleNamespace(Dataset=Rows)
    monkeypatch.setitem(sys.modules, "datasets.arrow_dataset", module)
    return Rows


def test_plain_columns_of_hugging_face_are_taken_without_a_word(hugging_face):
    """Whole batches are made, and there is nothing to warn of."""
    dataset = hugging_face(number=list(range(8)), share=[0.5] * 8)
    assert slicing(dataset, default_collate) is not None
    (batch, *_) = DataLoader(dataset, batch_size=4)
    assert_same(batch, {"number": torch.arange(4), "share": torch.full((4,), 0.5)})


@pytest.mark.parametrize(
    ("column", "why"),
    [
        ([timedelta(seconds=each) for each in range(8)], "has the type duration"),
        ([0.0, None] * 4, "column 'x' has nulls"),
    ],
    ids=["type", "nulls"],
)
def test_slow_batches_of_hugging_face_are_said_once(hugging_face, column, why):
    """A column that cannot be read as it is costs speed, which the user would not see otherwise."""
    loader = DataLoader(hugging_face(x=column), batch_size=8)
    with pytest.warns(RuntimeWarning, match=rf"{why}.*\n.*samples are read one by one") as seen:
        batches = [*loader, *loader]
    assert len(seen) == 1
    assert_same(*(each["x"].nan_to_num(-1.0) for each in batches))


def test_samples_that_cannot_be_collated_are_no_matter_of_speed(hugging_face, recwarn):
    """The loader raises what torch's would, and says nothing of columns before."""
    dataset = hugging_face(x=[0.0, 1.0], y=[None, 0.0])
    dataset._tensor = lambda value: value
    assert slicing(dataset, default_collate) is None
    with pytest.raises(Exception, match=r"in list of batch|found"):
        list(DataLoader(dataset, batch_size=2))
    assert not recwarn.list
