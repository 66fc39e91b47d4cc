"""Datasets as people have them are cached, and read back equal."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest
import torch
from common_datasets import DATASETS, Common
from PIL import Image
from same import assert_same

import forebay

COUNT = 40
# `forebay.cache` is the function.
CACHE = importlib.import_module("forebay.runs.cache")


def plain(value):
    """Return a value in which images are their parts, and keys stand in one order."""
    if isinstance(value, Image.Image):
        return [value.mode, value.size, value.tobytes(), value.getpalette()]
    if type(value) is dict:
        return {key: plain(value[key]) for key in sorted(value, key=repr)}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


@pytest.mark.slow
@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_comes_back_as_it_was(name, tmp_path):
    """Value for value, with types and classes; in another process, with a transform, pickled."""
    dataset = Common(name, COUNT)
    cached = forebay.cache(dataset, tmp_path, num_workers=0, progress=False)
    opened = forebay.open_cache(tmp_path, transform=lambda sample: sample)
    copied = pickle.loads(pickle.dumps(forebay.open_cache(tmp_path)))
    for index in range(COUNT):
        for found in (cached, opened, copied):
            assert_same(plain(dataset[index]), plain(found[index]))
    assert cached.table().num_rows == COUNT


READERS = """
import pathlib, sys
import pandas, polars, pyarrow
for path in pathlib.Path(sys.argv[1]).glob("*/shard-*.arrow"):
    with pyarrow.OSFile(str(path)) as file:
        table = pyarrow.ipc.open_file(file).read_all()
    table.validate(full=True)
    assert len(pandas.read_feather(path)) == len(polars.read_ipc(path)) == len(table), path
"""


@pytest.mark.slow
def test_other_programs_read_the_files(tmp_path, monkeypatch):
    """They are plain Arrow: pyarrow, pandas and polars open each of them."""
    monkeypatch.setattr(CACHE, "LEAST_SHARDS", 4)
    for name in DATASETS:
        forebay.cache(Common(name, COUNT), tmp_path / name, num_workers=0, progress=False)
    command = [sys.executable, "-c", READERS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_a_transform_changes_stays_in_its_copy(tmp_path):
    """Also a tensor that lies within a list of dicts."""
    make = [[{"boxes": torch.ones(at, 4)} for at in range(index % 3)] for index in range(9)]

    def zero(sample):
        for each in sample:
            each["boxes"].zero_()
        return sample

    cached = forebay.cache(make, tmp_path, transform=zero, num_workers=0, progress=False)
    assert cached[2][1]["boxes"].sum() == 0
    cached.transform = None
    assert cached[2][1]["boxes"].sum() == 4
