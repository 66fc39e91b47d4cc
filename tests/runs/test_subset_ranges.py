"""A Subset first and then all, for `cache` and `predict`, whose files are of ranges of samples."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils import data

import forebay
from watched import Watched


class Items(Watched):
    """Samples with noise."""

    def sample(self, index):
        return torch.tensor([float(ord(self.name)), float(index), random.random()])


def first_two(batch):
    return batch[:, :2].sum(1)


def cached(dataset, output, **options):
    return forebay.cache(dataset, output, num_workers=0, progress=False, **options)


def predicted(dataset, output, **options):
    return forebay.predict(
        first_two, dataset, output, num_workers=0, part_size=8, progress=False, **options
    )


VERBS = pytest.mark.parametrize("verb", [cached, predicted])


@pytest.fixture(autouse=True)
def _nothing_loaded():
    Items.loaded.clear()
    Items.refused = set()
    yield
    Items.refused = set()


def files(folder):
    """Return the content of the shards or parts."""
    paths = (each for each in Path(folder).iterdir() if each.is_file())
    return {each.name: each.read_bytes() for each in paths}


def assert_as_fresh(verb, dataset, folder):
    """Check that the files are those of a run that began with this dataset, byte for byte."""
    fresh = folder.with_name(f"{folder.name} fresh")
    verb(dataset, fresh, redo="*")
    assert files(folder) == files(fresh)
    Items.loaded.clear()


@pytest.mark.slow
@VERBS
def test_a_subset_first_and_then_all_continues(tmp_path, verb):
    """With the files of all samples, each of the sample that it says; then nothing is loaded."""
    items, out = Items("a", 40), tmp_path / "out"
    verb(data.Subset(items, [30, 31]), out)
    verb(items, out)
    assert_as_fresh(verb, items, out)
    verb(items, out)
    assert Items.loaded == []
    verb(items, out, accept_changes=True)
    assert_as_fresh(verb, items, out)


@pytest.mark.slow
@VERBS
def test_samples_in_another_order_are_made_again_without_asking(tmp_path, verb, caplog):
    """They are all still there; a note says so."""
    items, out = Items("a", 30), tmp_path / "out"
    verb(data.ConcatDataset([items, Items("b", 5)]), out)
    for dataset in (
        data.Subset(
            data.ConcatDataset([items, Items("b", 5)]), np.random.default_rng(0).permutation(35)
        ),
        data.ConcatDataset([Items("b", 5), Items("a", 30)]),
        forebay.mix({"a": (items, 1.0), "b": (Items("b", 5), 1.0)}),
    ):
        caplog.clear()
        verb(dataset, out)
        assert "made again, since other samples have their places now" in caplog.text
        assert_as_fresh(verb, dataset, out)
        verb(dataset, out, version=None)
        assert Items.loaded == []


@VERBS
def test_what_was_made_of_other_samples_is_not_removed_unasked(tmp_path, verb):
    """One split and then the other: the error says how many would be lost, and what accepts it."""
    items, out = Items("a", 30), tmp_path / "out"
    one, other = data.random_split(items, [20, 10])
    verb(one, out)
    before, _ = files(out), Items.loaded.clear()
    with pytest.raises(forebay.ChangedError, match=r"20 of the samples in .* are not in this"):
        verb(other, out)
    assert files(out) == before
    assert Items.loaded == []
    verb(other, out, accept_changes=True)
    assert_as_fresh(verb, other, out)


@pytest.mark.slow
def test_shards_of_very_few_samples_do_not_decide_on_those_of_all(tmp_path):
    """All are made again where very many small files would be left."""
    items, out = Items("a", 1000), tmp_path / "out"
    cached(data.Subset(items, range(100)), out)
    assert len(files(out)) == 100
    cached(items, out)
    assert len(files(out)) == 125
    assert_as_fresh(cached, items, out)
