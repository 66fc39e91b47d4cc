"""An output folder of one entry point, named in a call of another: nothing in it is removed."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from driving import published

import forebay
from forebay.cli import cli


class Numbers:
    """Sample k is k."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor(float(index))


def same(batch):
    return batch


def copy(source: Path, out):
    """Copy this file."""
    out.file(source.name).write_text("copied")


CALLS = {
    "preprocess": lambda folder, **options: forebay.preprocess(copy, __file__, folder, **options),
    # Their ranges of samples are equal: six of one sample each.
    "cache": lambda folder, **options: forebay.cache(Numbers(), folder, **options),
    "predict": lambda folder, **options: forebay.predict(
        same, Numbers(), folder, part_size=1, **options
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("version", [None, "1", "2"])
@pytest.mark.parametrize(("first", "again"), [*permutations(CALLS, 2)])
def test_the_outputs_of_another_entry_point_are_kept(tmp_path, first, again, version):
    """Whatever the version says: only redo="*" removes them."""
    options = {"num_workers": 0, "progress": False}
    CALLS[first](tmp_path, version="1", **options)
    before = published(tmp_path)
    assert before
    with pytest.raises(forebay.OptionError, match=f"outputs of '{first}', and .* '{again}'"):
        CALLS[again](tmp_path, version=version, **options)
    assert published(tmp_path) == before
    CALLS[again](tmp_path, version=version, redo="*", **options)
    assert not before.keys() & published(tmp_path).keys()
    assert (tmp_path / "metadata.parquet").exists() == (again == "preprocess")
    status = CliRunner().invoke(cli, ["status", str(tmp_path)])
    assert ("sample" in status.output) == (again != "preprocess"), status.output
