"""Samples of forebay's readers are known by their shard, file or table, in every entry point."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

import forebay
from forebay.base.origins import content_digests

FOLDER = Path("files")


def rows(name, count=6, more=0):
    """Return rows of one file."""
    return [{"id": f"{name}{k}", "n": float(ord(name) * 100 + k + more)} for k in range(count)]


def write(form, name, found):
    """Write rows as a file, with a time that no file had."""
    path = FOLDER / f"{name}.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(found), path)
    else:
        pa.feather.write_feather(pa.Table.from_pylist(found), path, compression="uncompressed")
    write.ns += 1_000_000_000
    os.utime(path, ns=(write.ns, write.ns))


write.ns = 1_700_000_000_000_000_000


def shards(form):
    return forebay.open_shards(f"files/*.{form}", progress=False)


def columns(form):
    return forebay.from_table(f"files/*.{form}", columns=["id", "n"])


def frame(form):
    tables = [pd.read_parquet(path) for path in sorted(FOLDER.glob(f"*.{form}"))]
    return forebay.from_table(pd.concat(tables, ignore_index=True), columns=["id", "n"])


def odd_ones(form):
    whole = shards(form)
    return Subset(whole, range(1, len(whole), 2))


def backwards(form):
    whole = shards(form)
    return Subset(whole, np.arange(len(whole))[::-1])


def as_columns(row):
    """Return a row as `columns` has it: a column of a cache has one type."""
    return row | {"n": torch.tensor(row["n"], dtype=torch.float64)}


def shards_as_columns(form):
    return forebay.open_shards(f"files/*.{form}", transform=as_columns, progress=False)


def joined(form):
    alone = forebay.from_table([{"id": "x", "n": 1.0}], as_columns)
    return ConcatDataset([shards_as_columns(form), columns(form), alone])


def mixed(form):
    return forebay.mix({"one": (shards_as_columns(form), 1.0), "other": (columns(form), 2.0)})


class Wrapped(Dataset):
    """A dataset of the user's that changes what a reader returns."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        row = self.inner[index]
        return {"id": row["id"], "n": float(row["n"]) + 0.5}


def plain(row):
    return {"id": row["id"], "n": float(row["n"])}


def preprocessed(dataset, out="out", **options):
    table = forebay.preprocess(
        dataset, output=out, save=lambda row, out: plain(row), num_workers=0, **options
    ).metadata
    return [plain(row) for row in table.to_pylist()]


def cached(dataset, out="out", **options):
    return [*map(plain, forebay.cache(dataset, out, num_workers=0, **options))]


def model(batch):
    """Return the samples as they are."""
    return {"id": list(batch["id"]), "n": batch["n"].to(torch.float64)}


def predicted(dataset, out="out", **options):
    options = {"part_size": 4, "batch_size": 3} | options
    forebay.predict(model, dataset, out, num_workers=0, **options)
    return pq.read_table(out).select(["id", "n"]).to_pylist()


VERBS = [preprocessed, cached, predicted]
READERS = [
    (shards, "jsonl"),
    (shards, "parquet"),
    (columns, "parquet"),
    (columns, "arrow"),
    (frame, "parquet"),
    (odd_ones, "jsonl"),
    (backwards, "jsonl"),
    (joined, "parquet"),
    (mixed, "parquet"),
]


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    FOLDER.mkdir()


def changes(form):
    """Yield what happens to the files, once each has happened."""
    for name in "bcd":
        write(form, name, rows(name))
    yield "begun"
    write(form, "c", rows("c", more=50))
    yield "c was written again, with as many rows and bytes"
    write(form, "a", rows("a", 4))
    yield "a was added before all others"
    write(form, "b", rows("b")[:4])
    write(form, "d", rows("d") + rows("b")[4:])
    yield "two samples of b moved to d"
    (FOLDER / f"c.{form}").unlink()
    yield "c was removed"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("verb", "reader", "form"),
    [(verb, *reader) for reader in READERS for verb in VERBS],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_results_are_those_of_the_samples_that_there_are(verb, reader, form):
    """After each change of the files, in their order; and the same call then makes nothing."""
    for change in changes(form):
        dataset = reader(form)
        want = [plain(dataset[at]) for at in range(len(dataset))]
        assert verb(dataset, progress=False) == want, change
        before = {each: each.stat().st_mtime_ns for each in Path("out").iterdir() if each.is_file()}
        assert verb(reader(form), progress=False) == want
        after = {each: each.stat().st_mtime_ns for each in Path("out").iterdir() if each.is_file()}
        assert after == before


@pytest.mark.parametrize("verb", VERBS)
def test_only_samples_of_changed_files_are_made_again(verb, monkeypatch):
    """Those of the others stay, also at other places."""
    made = []

    def noted(row):
        made.append(row["id"])
        return row

    def dataset():
        return forebay.open_shards("files/*.jsonl", progress=False, transform=noted)

    for name in "bcd":
        write("jsonl", name, rows(name))
    verb(dataset(), progress=False)
    made.clear()
    write("jsonl", "a", rows("a", 2))
    write("jsonl", "c", rows("c", more=7))
    verb(dataset(), progress=False)
    wanted = {each["id"] for each in rows("a", 2) + rows("c")}
    # `cache` looks at three samples to find their structure, and reads what it returns.
    assert {*made} == wanted if verb is not cached else wanted <= {*made}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("reader", [shards, columns, frame])
def test_a_reader_within_a_users_dataset_that_changed_is_an_error(verb, reader):
    """What the user's class makes of it is not known sample by sample, so nothing is mixed."""
    for name in "bc":
        write("parquet", name, rows(name))
    first = verb(Wrapped(reader("parquet")), progress=False)
    assert verb(Wrapped(reader("parquet")), progress=False) == first
    write("parquet", "c", rows("c", more=50))
    with pytest.raises(forebay.ChangedError, match="inner"):
        verb(Wrapped(reader("parquet")), progress=False)


@pytest.mark.parametrize("verb", VERBS)
def test_a_transform_of_shards_that_changed_is_an_error(verb):
    """As any code of the user's; other arguments of the reader change no sample."""
    write("jsonl", "b", rows("b"))
    whole = shards("jsonl")
    first = verb(whole, progress=False)
    again = forebay.open_shards("files", progress=False, window="1MB")
    assert verb(again, progress=False) == first
    again.transform = plain
    with pytest.raises(forebay.ChangedError, match="transform"):
        verb(again, progress=False)


@pytest.mark.parametrize("verb", [preprocessed, predicted])
def test_the_column_source_names_shard_and_number(verb):
    """So a row of a table leads to its sample."""
    for name in "bc":
        write("jsonl", name, rows(name, 2))
    verb(Subset(shards("jsonl"), [3, 0]), progress=False)
    file = Path("out/metadata.parquet") if verb is preprocessed else Path("out")
    assert pq.read_table(file)["source"].to_pylist() == ["c.jsonl#1", "b.jsonl#0"]


def test_predictions_of_a_cache_that_grew_are_made_again():
    """A cache is known by the checksums of its blocks."""
    for names in ("b", "bc", "bcd"):
        write("jsonl", names[-1], rows(names[-1]))
        made = forebay.cache(shards("jsonl"), "cached", num_workers=0, progress=False)
        assert predicted(made, progress=False) == [*map(plain, made)]


@pytest.mark.parametrize("reader", [shards, odd_ones, backwards, joined, mixed])
def test_states_of_loaders_have_the_same_identity(reader):
    """Whatever wraps the shards: others are refused, copies are warned of, added ones are fine."""
    for name in "bcd":
        write("parquet", name, rows(name))
    dataset = reader("parquet")
    loader = forebay.DataLoader(dataset, batch_size=2, seed=0)
    next(iter(loader))
    state = loader.state_dict()
    assert state["made_with"]["content"] == content_digests(dataset)
    write("parquet", "c", rows("c"))  # another time, and as it was
    loader = forebay.DataLoader(reader("parquet"), batch_size=2, seed=0)
    with pytest.warns(RuntimeWarning, match="were written anew, or copied"):
        loader.load_state_dict(state)
    write("parquet", "c", rows("c")[:5])
    write("parquet", "d", rows("d") + rows("c")[5:])
    loader = forebay.DataLoader(reader("parquet"), batch_size=2, seed=0)
    with pytest.raises(forebay.OptionError, match="are not those of the loader"):
        loader.load_state_dict(state)
