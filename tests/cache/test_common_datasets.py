"""Datasets as people have them are cached, and read back equal."""

from __future__ import annotations

import importlib
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common_datasets import DATASETS, Common, Span, Token
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


@pytest.mark.full  # as in test_cache_kills.py
@pytest.mark.slow
@pytest.mark.parametrize("name", ["coco", "hugging_face"])
def test_a_killed_run_is_continued(name, tmp_path):
    """The files are those of an undisturbed run, byte for byte."""
    script = Path(__file__).with_name("common_datasets.py")
    command = [sys.executable, script, name, str(tmp_path / "torn")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    dataset, options = Common(name), {"num_workers": 0, "progress": False}
    with pytest.raises(forebay.InputError):
        forebay.open_cache(tmp_path / "torn")
    forebay.cache(dataset, tmp_path / "torn", **options)
    forebay.cache(dataset, tmp_path / "whole", **options)
    shards = sorted((tmp_path / "whole").glob("shard-*"))
    assert len(shards) > 100
    for path in shards:
        assert (tmp_path / "torn" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_a_process_without_the_classes_reads_substitutes(trainers, tmp_path):
    """They have the same names and fields, and are pickled; nothing is imported."""
    data, program = tmp_path / "data", tmp_path / "reads.py"
    forebay.cache(Common("text_spans", COUNT), data, num_workers=0, progress=False)
    program.write_text(
        "import forebay, pickle, sys\n"
        f"sample = pickle.loads(pickle.dumps(forebay.open_cache({str(data)!r})[2]))\n"
        "print(sample['spans'][1], sample['words'], sample['words'][0].tag)\n"
        "assert 'common_datasets' not in sys.modules\n"
    )
    done = trainers.run(program, cwd=tmp_path)
    assert done.code == 0, done.err
    words = [Token("Ada", "NAME"), Token("runs")]
    assert done.out == f"{Span(1, 4, 'PER')} {words} NAME\n"


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
