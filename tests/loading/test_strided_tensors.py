"""Tensors of any stride: with one element, torch calls each contiguous, and returns it as it is."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import Dataset

import forebay
from forebay import DataLoader
from forebay.base.batch_digests import differing, digested
from forebay.base.batches import tensor_bytes
from forebay.loading.batch_digest import stream_digest
from forebay.loading.changes import dataset_content

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WIDE = torch.arange(40, dtype=torch.float32).reshape(1, 40)
# Each with a tensor of the same numbers without gaps.
TENSORS = {
    "a column of one row": WIDE[:, 3],
    "every tenth of ten": WIDE[0, 5:15:10],
    "a row of one": WIDE[:, 7:8],
    "no dimension": WIDE[0, 9],
    "a column": WIDE.reshape(8, 5)[:, 2],
    "transposed": WIDE.reshape(8, 5).T,
    "expanded": WIDE[0, 4].expand(3, 2),
    "none": WIDE[:, 3:3],
    "a conjugate": torch.complex(WIDE, WIDE + 1)[:, 3].conj(),
    "negative": torch.complex(WIDE, WIDE + 1)[:, 3].conj().imag,
    "bools": (WIDE > 2)[:, 3],
    "half": WIDE.to(torch.bfloat16)[:, 3],
}


def plain(tensor):
    """Return the same numbers without gaps."""
    return torch.tensor(tensor.tolist(), dtype=tensor.dtype).reshape(tensor.shape)


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_tensor_has_the_bytes_of_its_numbers(tensor):
    """Whatever is between them: two that are equal have one digest, and others have another."""
    same = plain(tensor)
    assert tensor_bytes(tensor).tobytes() == tensor_bytes(same).tobytes()
    assert tensor_bytes(tensor).nbytes == tensor.numel() * tensor.itemsize
    assert list(differing(digested([tensor]), digested([same]))) == []
    assert stream_digest([tensor]) == stream_digest([same])
    if tensor.numel():
        other = ~same if same.dtype is torch.bool else same + 100
        assert list(differing(digested([tensor]), digested([other]))) == ["[0]"]
        assert stream_digest([tensor]) != stream_digest([other])


class Held(Dataset):
    """Samples of strided tensors, and one that it keeps."""

    def __init__(self):
        self.kept = WIDE.clone()[:, 3]

    def __len__(self):
        return 40

    def __getitem__(self, index):
        row = (WIDE + index)[:, index]
        return {"row": row, "scalar": row[0], "noise": torch.rand(1, 7)[:, 3], "kept": self.kept}


def test_a_change_of_a_strided_tensor_is_seen():
    """In place, too."""
    dataset = Held()
    before = dataset_content(dataset)
    assert dataset_content(dataset) == before
    dataset.kept.numpy()[0] = 8  # torch does not count it
    assert dataset_content(dataset) != before


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"num_workers": 2, "buffer": "1MB"}, {"num_workers": 0}], ids=repr
)
@pytest.mark.parametrize("collate_fn", [None, list])
def test_samples_of_strided_tensors_are_compared(options, collate_fn):
    """The audit makes them again and finds nothing wrong, nor does check()."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "This DataLoader will create|buffer= has no effect")
        with DataLoader(Held(), 4, seed=0, collate_fn=collate_fn, **options) as loader:
            found = list(loader)
            statistics = loader.statistics()
            assert loader.check()
    rows = [each["row"] for batch in found for each in batch] if collate_fn else []
    rows = rows or torch.cat([batch["row"] for batch in found])
    assert [each.item() for each in rows] == list(range(0, 80, 2))
    assert statistics.audited >= 5
    assert statistics.differences == ()


def test_strided_tensors_are_stored_and_known_again(tmp_path):
    """In a cache; and a function that refers to one is the same function as long as it is."""
    found = forebay.cache(Held(), tmp_path / "cache", num_workers=0, progress=False)
    assert [found[index]["row"].item() for index in range(3)] == [0, 2, 4]
    rate = WIDE[:, 3]

    def scaled(row):
        return {"value": float(row["number"] * rate)}

    rows = [{"number": 1}, {"number": 2}]

    for each in (0, 1):
        run = forebay.preprocess(scaled, rows, tmp_path / "rows", num_workers=0, progress=False)
        assert run.resumed == 2 * each
