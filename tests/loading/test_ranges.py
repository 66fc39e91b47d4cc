"""Loaders of ranges of samples, which `predict` iterates."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

from forebay import DataLoader
from forebay.loading.iterators import BatchIterator
from forebay.loading.messages import BatchError
from forebay.loading.progress import LoaderProgress
from forebay.loading.selections import RangeSampler


class Drawing(Dataset):
    """Twenty samples of an index and a random number."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index, torch.rand(()).item()


class Plain(Dataset):
    """Twenty samples that are their index."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index


def loader_of(ranges, batch_size, dataset=None, **arguments):
    """Return a loader of ranges of samples; a batch is a list."""
    dataset, sampler = dataset or Drawing(), RangeSampler(ranges, batch_size)
    arguments = {"seed": 0, "collate_fn": list, **arguments}
    return DataLoader(dataset, batch_sampler=sampler, **arguments)


def test_a_batch_is_of_one_range():
    """The last of a range may be smaller; ranges come in the order in which they are given."""
    with loader_of([range(12, 17), [3, 9], range(0)], 3, Plain()) as loader:
        assert list(loader) == [[12, 13, 14], [15, 16], [3, 9]]
        assert len(loader) == 3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_random_numbers_of_a_sample_depend_on_its_index_alone(num_workers):
    """They are the same in other ranges, and in batches of another size."""
    with loader_of([range(20)], 7) as loader:
        expected = dict(sample for batch in loader for sample in batch)
    with loader_of([range(11, 15), [2, 8]], 2, num_workers=num_workers) as loader:
        found = dict(sample for batch in loader for sample in batch)
    assert found == {index: expected[index] for index in (11, 12, 13, 14, 2, 8)}


def test_results_have_the_batches_that_failed_too():
    """Each result comes with its request, and the batches after a failed one are made."""

    def collate(samples):
        if 2 in samples:
            raise ValueError("two")
        return samples

    loader = loader_of([range(6)], 2, Plain(), collate_fn=collate)
    progress = LoaderProgress()
    found = list(BatchIterator(loader, loader._kind(), progress).results())
    progress.close()
    assert [request.index for request, _ in found] == [[0, 1], [2, 3], [4, 5]]
    assert [isinstance(result, BatchError) for _, result in found] == [False, True, False]
