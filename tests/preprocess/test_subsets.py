"""A Subset first, then all: every sample once, whatever selects, joins and reorders."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
from driving import published, table
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import data

import forebay
from forebay.runs.preprocess import retry
from watched import Watched

QUIET = {"num_workers": 0, "progress": False}
CRASHES = Path(__file__).with_name("crash_points.py")


class Items(Watched):
    """Samples of several rows each."""

    def sample(self, index):
        return [{"name": self.name, "index": index, "k": k} for k in range(1 + index % 3)]


class Named(Items):
    """The same, with a name for every two samples."""

    def source_of(self, index):
        return f"{self.name}-{index // 2}"


@pytest.fixture(autouse=True)
def _nothing_loaded():
    Items.loaded.clear()
    Items.refused = set()
    yield
    Items.refused = set()


def rows_of(report):
    """Return the rows of a table but for their source."""
    return report.metadata.drop_columns(["source", "destination"]).to_pylist()


def expected_rows(dataset):
    """Return the rows of all samples of a Dataset, in order, without counting them as loaded."""
    before = len(Items.loaded)
    found = [row for at in range(len(dataset)) for row in dataset[at]]
    del Items.loaded[before:]
    return found


def run(dataset, output, **options):
    return forebay.preprocess(dataset, output=output, **QUIET | options)


def test_a_subset_first_and_then_all_continues(tmp_path):
    """The samples of the Subset are done, and no other: they are not the first of all."""
    items = Items("a", 40)
    report = run(data.Subset(items, [30, 31]), tmp_path)
    assert report.metadata["source"].to_pylist() == [30, 31, 31]
    report = run(items, tmp_path)
    assert (report.done, report.resumed) == (40, 2)
    assert sorted(Items.loaded) == [("a", at) for at in range(40)]
    assert rows_of(report) == expected_rows(items)
    run(items, tmp_path / "once")
    assert table(tmp_path) == table(tmp_path / "once")


def test_accepted_changes_keep_what_is_done_of_the_right_samples(tmp_path):
    """Although the Dataset changed."""
    run(data.Subset(Items("a", 40), [30, 31]), tmp_path)
    changed = Items("b", 40)
    with pytest.raises(forebay.ChangedError, match='parameter name: "a" -> "b"'):
        run(changed, tmp_path)
    rows = rows_of(run(changed, tmp_path, accept_changes=True))
    assert [row["index"] for row in rows] == [row["index"] for row in expected_rows(changed)]
    assert {row["index"] for row in rows if row["name"] == "a"} == {30, 31}


def test_names_and_numbers_in_one_table_are_strings(tmp_path):
    """Although the numbers were alone at first, and are again at last."""
    items, named = Items("a", 3), Named("b", 2)
    for dataset, sources in [
        (items, [0, 1, 2]),
        (data.ConcatDataset([items, named]), ["0", "1", "2", "b-0", "b-0"]),
        (items, [0, 1, 2]),
    ]:
        report = run(dataset, tmp_path)
        assert [*dict.fromkeys(report.metadata["source"].to_pylist())] == [*dict.fromkeys(sources)]
        assert rows_of(report) == expected_rows(dataset)
    assert len(Items.loaded) == 5


def test_the_table_is_that_of_a_run_that_did_all_at_once(tmp_path):
    """Byte for byte, with several Datasets and several names."""
    both = data.ConcatDataset([Items("a", 9), Named("b", 6), Items("c", 4)])
    run(both, tmp_path / "once")
    for part in (data.Subset(both, [17, 10, 3]), data.Subset(both, range(2, 19, 2))):
        run(part, tmp_path / "parts")
    run(both, tmp_path / "parts")
    assert table(tmp_path / "parts") == table(tmp_path / "once")


def draw_tree(draw, leaves, depth):
    kind = draw(st.sampled_from(["leaf", "subset", "concat"])) if depth else "leaf"
    if kind == "leaf":
        return draw(st.sampled_from(leaves))
    if kind == "concat":
        return data.ConcatDataset(
            [draw_tree(draw, leaves, depth - 1) for _ in range(draw(st.integers(1, 3)))]
        )
    inner = draw_tree(draw, leaves, depth - 1)
    indices = draw(st.lists(st.integers(-len(inner), len(inner) - 1), min_size=1, max_size=9))
    return data.Subset(inner, draw(st.sampled_from([list, np.array]))(indices))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_each_sample_is_processed_once_by_any_calls(given_data):
    """And each table has the rows of its samples, as often as the call has them, in its order."""
    leaves = [Items("a", 5), Named("b", 4), Items("c", 3)]
    Items.loaded.clear()
    most: dict[tuple[str, int], int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given_data.draw(st.integers(1, 4))):
            dataset = draw_tree(given_data.draw, leaves, 3)
            if not number:  # later, one instead of another would be a change
                dataset = data.Subset(data.ConcatDataset([*leaves, dataset]), [3, 7, -1])
            expected = expected_rows(dataset)
            assert rows_of(run(dataset, folder)) == expected
            firsts = [(row["name"], row["index"]) for row in expected if row["k"] == 0]
            for each in firsts:
                most[each] = max(most.get(each, 0), firsts.count(each))
    assert {each: Items.loaded.count(each) for each in Items.loaded} == most


def test_failed_samples_are_tried_again_wherever_they_are_now(tmp_path):
    """By retry with the whole Dataset, or another part that has them; nothing else is tried."""
    items = Named("a", 20)
    Items.refused = {7, 12, 15}
    assert run(data.Subset(items, [15, 3, 7, 12]), tmp_path).failed == 3
    Items.refused = {12}
    Items.loaded.clear()
    with pytest.raises(forebay.OptionError, match=r"1 of the failed samples are not in this"):
        retry(data.Subset(items, [7, 12]), tmp_path, **QUIET)
    assert Items.loaded == []
    assert retry(items, tmp_path, **QUIET).failed == 1
    assert set(Items.loaded) == {("a", 7), ("a", 12), ("a", 15)}
    Items.refused = set()
    report = retry(data.Subset(items, [1, 12]), tmp_path, **QUIET)
    assert rows_of(report) == expected_rows(data.Subset(items, [15, 3, 7, 12]))


@pytest.mark.parametrize(("kind", "name"), [(Items, "30"), (Named, "a-15")])
def test_a_sample_is_redone_by_the_name_that_it_has_in_every_call(tmp_path, kind, name):
    """Which is also that of its failure, and its source in the table."""
    items = kind("a", 40)
    Items.refused = {30}
    report = run(data.Subset(items, [31, 30]), tmp_path)
    assert [each.source for each in report.failures] == [name]
    Items.refused = set()
    run(items, tmp_path)
    Items.loaded.clear()
    report = run(data.Subset(items, range(20, 40)), tmp_path, redo=name)
    assert {*Items.loaded} == ({("a", 30), ("a", 31)} if kind is Named else {("a", 30)})
    assert rows_of(report) == expected_rows(data.Subset(items, range(20, 40)))
    sources = report.metadata.filter(pc.equal(report.metadata["index"], 30))["source"]
    assert {*map(str, sources.to_pylist())} == {name}


class Louder(data.Dataset):
    """A wrapper of the user's: nobody knows what its samples are made of."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return self.inner[index]


@pytest.mark.parametrize("wrap", [Louder, data.StackDataset])
def test_what_a_wrapper_hides_is_a_short_error(tmp_path, wrap):
    """About the user's Dataset: no source of torch is shown."""
    items = Items("a", 40)
    run(wrap(data.Subset(items, [30, 31])), tmp_path)
    with pytest.raises(
        forebay.ChangedError, match="if every sample has the name or index"
    ) as caught:
        run(wrap(items), tmp_path)
    assert len(str(caught.value)) < 1000
    assert "class Subset(" not in str(caught.value)


SCRIPT = """
from pathlib import Path

from torch.utils.data import ConcatDataset, Dataset, Subset


class Numbers(Dataset):
    def __init__(self, name):
        self.name = name

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return f"{self.name} {index}"


def save(sample, out):
    out.file(f"{out.source}.txt").write_text(sample)
    return {"sample": sample}


whole = ConcatDataset([Numbers("a"), Numbers("b")])
part = Subset(whole, [70, 3, 41])
"""


@pytest.fixture(scope="module")
def numbers(trainers, tmp_path_factory):
    """A script with a Dataset and a Subset of it; and what a run over all of it makes."""
    folder = tmp_path_factory.mktemp("whole")
    path = folder / "numbers_of.py"
    path.write_text(SCRIPT)
    done = trainers.run(CRASHES, "never", *arguments(path, "whole", folder / "out"), cwd=folder)
    assert done.code == 0, done.err
    return path, published(folder / "out"), table(folder / "out")


def arguments(path, name, output):
    return [
        "preprocess",
        f"{path}:{name}",
        output,
        "--save",
        f"{path}:save",
        "--num-workers",
        2,
        "--quiet",
    ]
