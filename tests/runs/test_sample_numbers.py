"""Samples that have names, in `cache` and `predict`: new, changed, away or gone."""

from __future__ import annotations

import base64
import logging
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset

import forebay
from forebay.cli import cli
from forebay.ledger.identity import NOT_SEEN
from forebay.ledger.records import Input
from forebay.runs.sample_numbers import _PART, _numbered, hashes_of
from forebay.runs.samples import Identified

# On Python 3.12 and newer, a fork beside threads is warned of.
pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


LOADED: list[str] = []


def load(path):
    """Return what a file says as a tensor; one that says "bad" is refused."""
    path = Path(path)
    LOADED.append(path.name)
    text = path.read_text()
    if text == "bad":
        raise ValueError("a bad file")
    return torch.tensor([float(text), 1.0])


def outputs(batch):
    """Return a number and a tensor for each sample."""
    return {"first": batch[:, 0], "whole": batch}


def cached(dataset, output, **options):
    return forebay.cache(dataset, output, **{"num_workers": 0, "progress": False} | options)


def predicted(dataset, output, model=outputs, **options):
    options = {"num_workers": 0, "part_size": 4, "batch_size": 3, "progress": False} | options
    return forebay.predict(model, dataset, output, **options)


VERBS = pytest.mark.parametrize("verb", [cached, predicted])


@pytest.fixture(autouse=True)
def _nothing_loaded():
    LOADED.clear()


@pytest.fixture
def folder(tmp_path):
    """A folder of 12 files: b0 to b9, c0 and c1."""
    source = tmp_path / "source"
    source.mkdir()
    for number, name in enumerate([*(f"b{k}" for k in range(10)), "c0", "c1"]):
        (source / name).write_text(str(number))
    return source


def files(folder):
    """Return the content of the shards or parts."""
    return {each.name: each.read_bytes() for each in Path(folder).iterdir() if each.is_file()}


def done_with(verb, source, out, **options):
    """Do it with the files of a folder; return which of them were loaded."""
    LOADED.clear()
    verb(forebay.from_folder(source, load), out, **options)
    loaded = [*LOADED]
    fresh = out.with_name(f"{out.name} fresh")
    verb(forebay.from_folder(source, load), fresh, redo="*")
    assert files(out) == files(fresh)
    return loaded


def command(*arguments):
    """Return what a command prints."""
    found = CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)
    return found.output


def kept(out):
    """Return how many earlier files are kept for samples that are gone."""
    return len([*(out / ".forebay").glob("earlier/*")])


@pytest.mark.slow
@VERBS
def test_new_changed_and_gone_files_cost_what_has_changed(tmp_path, folder, verb):
    """And the files are those of a run that began with them, byte for byte, in their order."""
    out = tmp_path / "out"
    done_with(verb, folder, out)
    assert done_with(verb, folder, out) == []
    (folder / "a").write_text("100")  # before all others
    assert done_with(verb, folder, out) == ["a"]
    (folder / "b5").write_text("200")
    assert done_with(verb, folder, out) == ["b5"]
    assert kept(out) == 0
    (folder / "b2").unlink()
    assert done_with(verb, folder, out) == []
    assert kept(out) == 1
    (folder / "b3").unlink()
    (folder / "b4").write_text("300")
    (folder / "c9").write_text("400")
    assert done_with(verb, folder, out) == ["b4", "c9"]
    assert done_with(verb, folder, out) == []


@pytest.mark.slow
@VERBS
def test_samples_that_are_gone_for_a_while_are_not_made_again(tmp_path, folder, verb):
    """As of a subfolder that is not mounted: what was made of them stays until it is pruned."""
    out = tmp_path / "out"
    done_with(verb, folder, out)
    away = [each.name for each in folder.iterdir() if each.name in ("b1", "b2", "b8", "c1")]
    (tmp_path / "away").mkdir()
    for name in away:
        (folder / name).rename(tmp_path / "away" / name)
    assert done_with(verb, folder, out) == []
    (folder / "c9").write_text("900")
    assert done_with(verb, folder, out) == ["c9"]
    number = kept(out)
    assert number
    assert command("verify", out).count("orphan   .forebay/earlier/") == number
    (tmp_path / "away" / "b2").write_text("222")
    for name in away:
        (tmp_path / "away" / name).rename(folder / name)
    assert done_with(verb, folder, out) == ["b2"]
    assert kept(out) == 0
    (folder / "c0").unlink()
    (folder / "c1").unlink()
    assert done_with(verb, folder, out) == []
    assert command("prune", out, "--dry-run").startswith("would remove  .forebay/earlier/")
    assert kept(out)
    assert command("prune", out).startswith("removed  .forebay/earlier/")
    assert kept(out) == 0
    assert "0 missing, 0 altered, 0 orphans" in command("verify", out)
    (folder / "c0").write_text("10")
    assert done_with(verb, folder, out) == ["c0"]


def test_predictions_of_files_that_cannot_be_seen_are_named_in_the_report(tmp_path, folder):
    """As `preprocess` names its inputs."""
    paths = sorted(map(str, folder.iterdir()))
    predicted(forebay.from_ids(paths, load), tmp_path / "out")
    (folder / "b3").unlink()
    report = predicted(forebay.from_ids(paths, load), tmp_path / "out")
    assert (report.done, report.unseen) == (12, (str(folder / "b3"),))
    assert str(folder / "b3") in report.notes[0]


@VERBS
def test_what_has_changed_is_said(tmp_path, folder, verb, caplog):
    """With numbers, before anything of it is made."""
    out = tmp_path / "out"
    verb(forebay.from_folder(folder, load), out)
    (folder / "a").write_text("1")
    (folder / "b1").write_text("200")
    (folder / "b2").unlink()
    (folder / "b3").unlink()
    with caplog.at_level(logging.WARNING, "forebay"):
        verb(forebay.from_folder(folder, load), out)
    assert "of 11 samples 1 is new, 1 is changed, 2 are no longer in the dataset" in caplog.text


@VERBS
def test_other_files_altogether_are_refused(tmp_path, folder, verb):
    """What was made of all the files before is not removed unasked."""
    out = tmp_path / "out"
    verb(forebay.from_folder(folder, load), out)
    before = files(out)
    for each in folder.iterdir():
        each.rename(each.with_name(f"x{each.name}"))
    with pytest.raises(forebay.ChangedError, match=r"12 of the samples in .* are not in this"):
        verb(forebay.from_folder(folder, load), out)
    assert files(out) == before


@pytest.mark.slow
@VERBS
@pytest.mark.usefixtures("machine")
def test_a_bucket_takes_over_what_was_made(memory, folder, verb):
    """As a folder does, with copies within the bucket, which go at the end."""
    verb(forebay.from_folder(folder, load), "memory://bucket/out")
    (folder / "a").write_text("100")
    time_ns = (folder / "b3").stat().st_mtime_ns
    (folder / "b3").unlink()
    LOADED.clear()
    verb(forebay.from_folder(folder, load), "memory://bucket/out")
    assert LOADED == ["a"]
    verb(forebay.from_folder(folder, load), "memory://bucket/fresh")
    names = [each.rpartition("/")[2] for each in memory.find("/bucket/fresh")]
    names = [each for each in names if each.startswith(("part", "shard"))]
    assert len(names) >= 3
    for name in names:
        assert memory.cat(f"/bucket/out/{name}") == memory.cat(f"/bucket/fresh/{name}")
    assert [each for each in memory.find("/bucket/out") if "/earlier/" in each]  # for b3
    (folder / "b3").write_text("3")
    os.utime(folder / "b3", ns=(time_ns, time_ns))
    LOADED.clear()
    verb(forebay.from_folder(folder, load), "memory://bucket/out")
    assert LOADED == []
    assert not [each for each in memory.find("/bucket/out") if "/earlier/" in each]


class Labelled(Dataset):
    """A user's own Dataset, which names its samples, and has lists of files and labels."""

    def __init__(self, paths, labels, scale=1):
        self.paths, self.labels, self.scale = paths, labels, scale

    def __len__(self):
        return len(self.paths)

    def source_of(self, index):
        return self.paths[index]

    def __getitem__(self, index):
        return load(self.paths[index]) * self.scale * self.labels[index]


@pytest.mark.slow
@VERBS
def test_lists_of_a_datasets_own_describe_its_samples(tmp_path, folder, verb):
    """A new path, or another label, is that of one sample; another parameter changes all."""
    paths, out = sorted(map(str, folder.iterdir())), tmp_path / "out"
    labels = [1.0] * 12
    verb(Labelled(paths[1:], labels[1:]), out)
    LOADED.clear()
    verb(Labelled(paths, labels), out)
    assert LOADED == ["b0"]
    labels[3] = 5.0
    verb(Labelled(paths, labels), out)
    assert LOADED == ["b0", "b3"]
    with pytest.raises(forebay.ChangedError, match=r"the dataset test_sample_numbers\.py:Labelled"):
        verb(Labelled(paths, labels, scale=2), out)


def test_a_dataset_without_names_is_named_as_what_has_changed(tmp_path):
    """Not the model, which is as it was."""
    predicted(torch.utils.data.TensorDataset(torch.ones(3, 2)), tmp_path, lambda batch: batch[0])
    other = torch.utils.data.TensorDataset(torch.zeros(3, 2))
    with pytest.raises(forebay.ChangedError, match=r"^the dataset TensorDataset changed"):
        predicted(other, tmp_path, lambda batch: batch[0])


def test_predictions_have_the_names_of_their_samples(tmp_path, folder):
    """In the table, and those that failed in the report, with their indices."""
    (folder / "b3").write_text("bad")
    out = tmp_path / "out"
    report = predicted(forebay.from_folder(folder, load), out)
    table = pq.read_table(out)
    assert table.column_names == ["index", "source", "first", "whole"]
    good = [each for each in sorted(map(str, folder.iterdir())) if not each.endswith("b3")]
    assert table["source"].to_pylist() == good
    (failure,) = report.failures
    assert (failure.source, failure.index) == (str(folder / "b3"), 3)
    assert f"{folder / 'b3'}: ValueError: a bad file" in repr(report)
    (folder / "a").write_text("5")  # the sample that failed moves, and is tried again
    report = predicted(forebay.from_folder(folder, load), out)
    assert [(each.source, each.index) for each in report.failures] == [(str(folder / "b3"), 4)]
    assert pq.read_table(out)["index"].to_pylist() == [0, 1, 2, 3, *range(5, 13)]


def test_named_samples_may_be_beside_others(tmp_path, folder):
    """Those without a name are known by their index."""
    dataset = ConcatDataset([forebay.from_folder(folder, load), torch.ones(2, 2)])
    predicted(dataset, tmp_path / "out")
    found = pq.read_table(tmp_path / "out")["source"].to_pylist()
    assert found[11:] == [str(folder / "c1"), "12", "13"]
    LOADED.clear()
    report = predicted(Subset(dataset, [13, 2, 5]), tmp_path / "out")
    assert (report.done, report.resumed, LOADED) == (3, 3, [])


def test_samples_that_cannot_be_cached_may_be_left_out_of_a_folder(tmp_path, folder):
    """The message says so; what is done of the others is taken over."""
    (folder / "b3").write_text("bad")
    with pytest.raises(forebay.FailuresError) as caught:
        cached(forebay.from_folder(folder, load), tmp_path / "out")
    assert f"1 of 12 samples could not be cached: {folder / 'b3'}\n" in str(caught.value)
    assert "Or leave them out of the dataset" in str(caught.value)
    (folder / "b3").unlink()
    assert done_with(cached, folder, tmp_path / "out") == []


NAMES = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["", NOT_SEEN, "1", "2"]))


@given(st.lists(NAMES.filter(len), min_size=1, max_size=6))
def test_a_number_belongs_to_one_name_and_one_state_of_its_file(listings):
    """While the file is as it was, or cannot be seen, the number stays; it is never used again."""
    known, numbers, states = np.empty(0, _PART), {}, {}
    used = {}
    for listing in listings:
        inputs = [Input(name, None, identity) for name, identity in listing.items()]
        identified = Identified.of(inputs)
        found = _numbered(known, hashes_of(identified), identified.at)
        known = np.frombuffer(base64.b64decode(found.record), _PART).copy()
        for (name, identity), number in zip(listing.items(), found.keys.tolist(), strict=True):
            is_seen, before = identity in ("1", "2"), states.get(name)
            is_changed = is_seen and before is not None and before != identity
            assert (numbers.get(name) == number) == (name in numbers and not is_changed)
            assert used.setdefault(number, name) == name
            numbers[name] = number
            states[name] = identity if is_seen else before
