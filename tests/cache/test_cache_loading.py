"""A cache in a DataLoader, torch's and forebay's: the same batches as of the dataset itself."""

from __future__ import annotations

import pickle

import pytest
from cached import Pictures, shift_at_random
from same import assert_same
from torch.utils.data import Subset

import forebay


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of 300 pictures, three to a shard."""
    folder = tmp_path_factory.mktemp("loading") / "cache"
    return forebay.cache(Pictures(300), folder, num_workers=0, progress=False).directory


def test_it_travels_as_the_names_of_its_files(folder):
    """Whatever of it is mapped."""
    cached = forebay.open_cache(folder, transform=shift_at_random)
    list(cached)
    sent = pickle.dumps(cached)
    assert len(sent) < 5000
    there = pickle.loads(sent)
    there.transform = None
    assert_same(there[5], Pictures()[5])


def epochs(folder, num_workers, **options):
    """Return two epochs of batches, changed at random."""
    cached = forebay.open_cache(folder, transform=shift_at_random)
    loader = forebay.DataLoader(
        Subset(cached, range(64)),
        batch_size=16,
        shuffle=True,
        seed=3,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        **options,
    )
    with loader:
        return [[*loader], [*loader]]


@pytest.mark.slow
def test_a_transform_is_random_in_each_epoch_and_the_same_for_any_workers(folder):
    """It may change a sample in place: it is given one of its own each time."""
    here = epochs(folder, 0)
    assert_same(here, epochs(folder, 2, buffer="100MB"))
    first, second = (
        {
            int(label): image
            for batch in epoch
            for image, label in zip(batch["image"], batch["label"], strict=True)
        }
        for epoch in here
    )
    assert first.keys() == second.keys() == set(range(64))
    assert not all(first[at].equal(second[at]) for at in first)
    shifts = {int(first[at][0, 0, 0]) - at for at in first}
    assert len(shifts) > 10 and min(shifts) >= 0 and max(shifts) < 100


def test_a_transform_is_called_for_each_sample_of_a_batch(folder):
    """In the order asked for, with copies of its own."""
    seen = []

    def note(sample):
        seen.append(sample["label"])
        sample["image"].zero_()
        return sample["label"]

    cached = forebay.open_cache(folder, transform=note)
    assert cached.__getitems__([200, 3, 3, 100]) == [200, 3, 3, 100] == seen
    cached.transform = None
    assert cached[200]["image"].eq(200).all()
