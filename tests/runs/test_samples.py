"""What the samples of a Dataset are made of, and how an output folder numbers them."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import data

import forebay
from forebay.ledger.records import Input
from forebay.runs.differences import difference
from forebay.runs.fingerprint import Fingerprint
from forebay.runs.samples import describe_bases, number_bases, sample_listing, samples_of


class Items(data.Dataset):
    """Samples that say which Dataset they are of, and their index there."""

    def __init__(self, name, length):
        self.name, self.length = name, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not -self.length <= index < self.length:
            raise IndexError(index)
        return self.name, index % self.length


class Named(Items):
    """The same with names, some of them several times."""

    def source_of(self, index):
        return f"{self.name} {index // 2}"


FORMS = [list, np.array, torch.tensor, lambda indices: np.array(indices, np.uint8)]


@st.composite
def trees(draw, leaves, depth=3):
    """A Dataset of nested wrappers over some of the leaves, which may be there several times."""
    kind = draw(st.sampled_from(["leaf", "subset", "range", "concat", "mix"])) if depth else "leaf"
    if kind == "leaf":
        return draw(st.sampled_from(leaves))
    inner = trees(leaves, depth - 1)
    if kind in ("concat", "mix"):
        parts = draw(st.lists(inner, min_size=1, max_size=3))
        if kind == "concat" or not all(map(len, parts)):
            return data.ConcatDataset(parts)
        return forebay.mix({str(at): (part, 1.0) for at, part in enumerate(parts)})
    part = draw(inner)
    n = len(part)
    if kind == "range" and n:
        bounds = st.integers(0, n - 1)
        return data.Subset(
            part, range(draw(bounds), draw(bounds), draw(st.sampled_from([1, 2, -1])))
        )
    indices = draw(st.lists(st.integers(0, n - 1), max_size=2 * n)) if n else []
    form = draw(st.sampled_from(FORMS))
    if form in (list, np.array):
        indices = [at - n * draw(st.booleans()) for at in indices]
    return data.Subset(part, form(indices))


def described(dataset, *, fixed=False):
    samples = samples_of(dataset)
    return Fingerprint(
        "x", None, (), (), describe_bases(samples.bases, samples.lengths, fixed=fixed)
    )


def numbered(known, dataset, *, accepts=False):
    """Return the Datasets that a ledger has now, and the samples with their numbers there."""
    found = described(dataset)
    bases, numbers = number_bases(known, found.bases, accepts=accepts)
    bases = Fingerprint.from_json(replace(found, bases=bases).to_json()).bases
    extents = [bases[number].extents for number in numbers]
    return bases, replace(samples_of(dataset), numbers=numbers, extents=extents)


def made_of(dataset):
    """Return for each sample its base and the index there, as `samples_of` has them."""
    found = samples_of(dataset)
    pairs = [(base, at) for base in found.bases for at in range(len(base))]
    assert found.lengths == tuple(map(len, found.bases))
    return [pairs[place] for place in np.asarray(found.places, int).tolist()]


LEAVES = [Items("a", 5), Items("b", 3), Named("c", 6), Items("d", 0)]


@given(trees(LEAVES))
def test_wrappers_are_looked_through(dataset):
    """Whatever selects, joins and reorders, the sample is that of its base, at its index there."""
    expected = [dataset[index] for index in range(len(dataset))]
    assert [base[at] for base, at in made_of(dataset)] == expected
    assert all(type(base) in (Items, Named) for base in samples_of(dataset).bases)


@given(st.lists(trees(LEAVES), min_size=1, max_size=4))
def test_a_sample_is_known_by_one_key_in_all_calls(datasets):
    """And two samples never by the same, unless one is there again."""
    known, keys = (), {}
    for dataset in filter(len, datasets):
        known, samples = numbered(known, dataset)
        listed = list(sample_listing(samples))
        found = [each.source if each.row is None else each.row for each in listed]
        assert len(set(found)) == len(found)
        for key, sample in zip(found, (dataset[at] for at in range(len(dataset))), strict=True):
            assert keys.setdefault(re.sub("#[0-9]+", "", key), sample) == sample
    assert len({*keys.values()}) == len(keys)


def test_a_name_that_is_not_asked_for_may_be_missing():
    """One that raises is an error only where its sample is selected."""
    whole = Items("x", 3)
    whole.source_of = ["a", None, "a"].__getitem__
    listed = list(sample_listing(samples_of(data.Subset(whole, [2, 0]))))
    assert listed == [Input("a", "0 2 a", "?"), Input("a", "0 1 a", "?")]
    with pytest.raises(forebay.InputError, match=r"source_of\(1\): got NoneType"):
        list(sample_listing(samples_of(data.Subset(whole, [1]))))


class Odd(data.Subset):
    """A Subset that makes its samples itself."""

    def __getitem__(self, index):
        return -index

    def __getitems__(self, indices):
        return [-index for index in indices]


NO_INDICES = {
    "a __getitem__ of its own": lambda whole: Odd(whole, [1]),
    "beyond the end": lambda whole: data.Subset(whole, [9]),
    "before the start": lambda whole: data.Subset(whole, [-10]),
    "keys": lambda whole: data.Subset({"a": 1}, ["a"]),
    "floats": lambda whole: data.Subset(whole, np.array([1.0])),
    "a mask": lambda whole: data.Subset(whole, [True, False]),
    "rows of indices": lambda whole: data.Subset(whole, np.zeros((2, 2), int)),
    "no length": lambda whole: data.Subset(SimpleNamespace(), [0]),
    "another length by now": lambda whole: shrunk(),
}


def shrunk():
    dataset = data.ConcatDataset([part := Items("x", 4)])
    part.length = 3
    return dataset


@pytest.mark.parametrize("make", NO_INDICES.values(), ids=NO_INDICES)
def test_what_cannot_be_looked_through_is_a_base_itself(make):
    """Its samples are known by their index in it."""
    dataset = make(Items("x", 9))
    found = samples_of(dataset)
    assert found.bases == (dataset,)
    assert found.places == range(len(dataset))


def test_datasets_that_are_added_or_left_out_are_no_change():
    """One that is exchanged for another is."""
    a, b, c, d = Items("a", 2), Items("b", 2), Items("c", 2), Named("a", 2)
    few, many = described(a), described(data.ConcatDataset([d, a, b]))
    assert difference(few, many) == difference(many, few) == ""
    other = described(data.ConcatDataset([a, c]))
    assert difference(few, described(c)) == 'parameter name: "a" -> "c"'
    assert difference(many, other) != ""
    assert difference(described(data.ConcatDataset([a, b])), other) == 'parameter name: "b" -> "c"'
    assert difference(few, described(d)) == "changed: test_samples.py:Named"


def test_another_length_is_a_change_where_it_is_to_be():
    """For a cache and for predictions, whose ranges are known by their places."""
    dataset = Items("a", 2)
    assert difference(described(dataset), described(Items("a", 2))) == ""
    was = described(dataset, fixed=True)
    dataset.__class__ = type("Items", (Items,), {"__len__": lambda self: 3})
    assert "parameter len(): 2 -> 3" in difference(was, described(dataset, fixed=True))


@pytest.mark.parametrize("extents", [[[-1, 2]], [[0, -1]], [[0, 1 << 62]], [["a", 1]], [[0]], 7])
def test_a_damaged_description_of_a_dataset_is_an_error(extents):
    """Whoever wrote it."""
    text = described(Items("a", 2)).to_json()
    forged = json.loads(text)
    forged["bases"][0][3] = extents
    with pytest.raises(forebay.LedgerError, match="description of the work is damaged"):
        Fingerprint.from_json(json.dumps(forged))
    forged = json.loads(text) | {"codes": []}
    with pytest.raises(forebay.LedgerError, match="description of the work is damaged"):
        Fingerprint.from_json(json.dumps(forged))


def test_equal_lambdas_of_different_code_are_different_datasets():
    """Their label alone would not tell them apart."""

    def of(transform):
        dataset = Items("x", 2)
        dataset.transform = transform
        return dataset

    one, other = of(lambda x: x + 1), of(lambda x: x * 2)
    first, again = (
        described(data.ConcatDataset([one, other])),
        described(data.ConcatDataset([other, one])),
    )
    assert difference(first, again) == ""
    assert [each.code for each in first.bases] == [each.code for each in again.bases[::-1]]
    assert first.bases[0].code != first.bases[1].code


class Growing(Items):
    """Its length is no attribute: it looks at the disk, say."""

    more = 0

    def __len__(self):
        return self.length + Growing.more


def test_a_dataset_that_grew_has_its_new_samples_behind_all_others(monkeypatch):
    """One that became shorter keeps its numbers."""
    a, b = Growing("a", 4), Items("b", 3)
    known, _ = numbered((), data.ConcatDataset([a, b]))
    monkeypatch.setattr(Growing, "more", 2)
    known, samples = numbered(known, a)
    assert samples.keys().tolist() == [0, 1, 2, 3, 7, 8]
    monkeypatch.setattr(Growing, "more", 5)
    known, samples = numbered(known, data.ConcatDataset([b, a]))
    assert samples.keys().tolist() == [4, 5, 6, 0, 1, 2, 3, 7, 8, 9, 10, 11]
    monkeypatch.setattr(Growing, "more", 0)
    _, samples = numbered(known, data.ConcatDataset([b, a]))
    assert samples.keys().tolist() == [4, 5, 6, 0, 1, 2, 3]


def test_an_accepted_change_is_of_the_dataset_that_it_can_only_be():
    """Of one class, in their order; where there are more or fewer of it, all are new."""
    whole = [Items("a", 4), Named("b", 3)]
    known, _ = numbered((), data.ConcatDataset(whole))

    def numbers(known, *datasets):
        return numbered(known, data.ConcatDataset(datasets), accepts=True)[1].numbers

    assert numbers(known, Named("x", 3), Items("y", 4)) == [1, 0]
    assert numbers(known, Items("x", 5), Items("y", 6), Named("z", 7)) == [2, 3, 1]
    assert numbers(numbered((), whole[0])[0], Named("q", 9)) == [0]


def test_a_million_samples_are_no_objects():
    """Ranges stay ranges, through ranges and joins; anything else is an array."""
    whole = Items("x", 10**12)
    for dataset, expected in [
        (whole, range(10**12)),
        (data.Subset(whole, range(5, 10**11, 3)), range(5, 10**11, 3)),
        (
            data.Subset(data.Subset(whole, range(10**6, 0, -2)), range(3, 9)),
            range(999_994, 999_982, -2),
        ),
        (data.ConcatDataset([whole, Items("y", 10**6)]), range(10**12 + 10**6)),
    ]:
        assert samples_of(dataset).places == expected
    chosen = random.Random(1).sample(range(10**12), 5)
    assert samples_of(data.Subset(whole, chosen)).places.tolist() == chosen
