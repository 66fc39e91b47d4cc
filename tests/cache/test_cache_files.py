"""The files: plain Arrow for whoever opens them, mapped by whoever reads them."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest
import torch
from cached import Made, Pictures
from same import assert_same

import forebay
from forebay.base.file_stores import Folder
from forebay.caching import arrow_shards
from forebay.caching.arrow_shards import Shards
from forebay.caching.index import Index


def make(dataset, folder, **options):
    """Make or open a cache in this process."""
    return forebay.cache(dataset, folder, num_workers=0, progress=False, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of pictures, in 40 shards."""
    return make(Pictures(), tmp_path_factory.mktemp("files") / "cache").directory


def test_pyarrow_opens_a_file_alone(folder):
    """A tensor is a fixed-shape tensor; a label is a number; a name is a text."""
    with pa.memory_map(str(folder / "shard-00007.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
        assert table.schema.names == ["image", "label", "name", "at.x", "at.y"]
        assert table["image"].type == pa.fixed_shape_tensor(pa.uint8(), (3, 4, 4))
        images = table["image"].chunk(0).to_numpy_ndarray()
        assert images.shape == (1, 3, 4, 4) and (images == 7).all()
        assert table.drop_columns("image").to_pylist() == [
            {"label": 7, "name": "picture 7", "at.x": 7, "at.y": 0.5}
        ]


def test_the_folder_is_a_dataset_to_pyarrow(folder):
    """Nothing in it but shards; what is forebay's own is hidden."""
    assert {path.suffix for path in folder.iterdir() if path.name != ".forebay"} == {".arrow"}
    table = pyarrow.dataset.dataset(folder, format="arrow").to_table(columns=["label"])
    assert table["label"].to_pylist() == list(range(40))


def test_the_table_has_all_rows_over_the_maps(folder):
    """No column is copied."""
    before = pa.total_allocated_bytes()
    table = forebay.open_cache(folder).table()
    assert table["label"].to_pylist() == list(range(40))
    assert table["image"].type == pa.fixed_shape_tensor(pa.uint8(), (3, 4, 4))
    assert pa.total_allocated_bytes() == before
    assert table.to_pandas()["name"][5] == "picture 5"


def test_shards_that_differ_make_one_table(tmp_path):
    """Where what was looked at first did not show that shapes vary, or that some are missing."""

    def odd(index):
        few = 100 < index < 103
        return {
            "shape": np.ones((2, 3 if few else 1), complex),
            "number": torch.ones(2) if few else torch.ones(1),
            "text": "\udc80" if few else "plain",
            "sometimes": index if few else None,
            "tensor": torch.ones(index % 3) if few else None,
        }

    dataset = Made(odd, 200)
    cached = make(dataset, tmp_path)
    for index in (0, 100, 101, 102, 103, 199):
        assert_same(dataset[index], cached[index])
    table = cached.table()
    table.validate(full=True)
    rows = table.to_pylist()
    assert rows[0]["shape"] == {"data": [1, 0, 1, 0], "shape": [2, 1]}
    assert rows[101]["shape"] == {"data": [1, 0] * 6, "shape": [2, 3]}
    assert rows[0]["number"] == {"data": [1], "shape": [1]}
    assert [rows[at]["sometimes"] for at in (0, 101)] == [None, 101]
    assert [rows[at]["text"] for at in (0, 101)] == [b"plain", b"\xed\xb2\x80"]
    assert rows[0]["tensor"] is None and rows[101]["tensor"] == {"data": [1, 1], "shape": [2]}


def mapped(word, folder):
    """Return how many kB of the mapped shards are so, by the kernel's word."""
    found = 0
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = f"{folder}/shard" in line
        elif ours and line.startswith(f"{word}:"):
            found += int(line.split()[1])
    return found


def test_tensors_are_views_of_the_file(tmp_path):
    """Reading copies nothing; writing copies a page, and never reaches the file."""
    cached = make(Made(lambda i: torch.full((1 << 20,), i, dtype=torch.uint8), 3), tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.glob("*.arrow")}
    sample = cached[1]
    assert sample.sum() == 1 << 20
    assert mapped("Rss", tmp_path) >= 1024 and mapped("Private_Dirty", tmp_path) == 0
    sample[5000:5010] = 7
    assert 0 < mapped("Private_Dirty", tmp_path) <= 8
    assert cached[1][5005] == 7  # as the class says
    assert forebay.open_cache(tmp_path)[1][5005] == 1
    assert files == {path: path.read_bytes() for path in tmp_path.glob("*.arrow")}


def test_a_tensor_brings_no_more_than_itself(tmp_path):
    """Pickled, or sent by a worker without collating, it does not take its shard along."""
    cached = make(Made(lambda i: (torch.ones(10), torch.ones(i)), 1000), tmp_path)
    fixed, various = cached[5]
    assert fixed.untyped_storage().nbytes() == 40 and various.untyped_storage().nbytes() == 20


def test_a_tensor_outlives_its_dataset(tmp_path):
    """The map stays for as long as anything views it."""
    sample = make(Pictures(), tmp_path)[3]["image"]
    assert sample.eq(3).all() and mapped("Rss", tmp_path) > 0
    del sample
    assert mapped("Rss", tmp_path) == 0


def test_maps_take_no_descriptors(folder):
    """However many shards are open at once, and however few files may be."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    cached = forebay.open_cache(folder)
    few = max(map(int, os.listdir("/proc/self/fd"))) + 4
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
    try:
        samples = list(cached)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert [int(sample["image"][0, 0, 0]) for sample in samples] == list(range(40))


def test_maps_are_bounded(folder, monkeypatch):
    """The oldest makes room; samples of it stay whole."""
    monkeypatch.setattr(arrow_shards, "MOST_MAPS", 3)
    shards = Shards(folder, Index.read(Folder(folder)).plan)
    kept = [shards[at].sample(0)["image"] for at in (0, 1, 2, 3, 4, 0, 5)]
    assert [int(one[0, 0, 0]) for one in kept] == [0, 1, 2, 3, 4, 0, 5]
    assert len(shards._open) == 3
