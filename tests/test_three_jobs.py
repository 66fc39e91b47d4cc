"""The tutorial through all three jobs, run as a script: what it leaves is what it says."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pyarrow.dataset
import pytest
import torch
from pyarrow import parquet

from documents import disagreements, program
from forebay.runs.source_code import load_work

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "tutorial" / "three-jobs.md"
UNSEEN = ("cards-5", "novel-5")


@pytest.fixture(scope="module")
def made(trainers, tmp_path_factory):
    """A folder in which the tutorial was run once, and what it printed."""
    folder = tmp_path_factory.mktemp("three-jobs")
    shutil.copytree(ROOT / "examples", folder / "examples")
    code = program(TUTORIAL.read_text(encoding="utf-8"), announced=True)
    (folder / "three_jobs.py").write_text(code)
    done = trainers.run(folder / "three_jobs.py", cwd=folder)
    assert done.code == 0, done
    return folder, done.out


@pytest.mark.slow
def test_each_block_prints_what_stands_below_it(made):
    """The outputs in the tutorial are those of its code."""
    _, printed = made
    assert list(disagreements(TUTORIAL.read_text(encoding="utf-8"), printed)) == []


@pytest.mark.slow
def test_each_piece_is_a_sample_and_a_prediction(made):
    """Table, cache and predictions have the same rows, in the same order."""
    folder, _ = made
    table = parquet.read_table(folder / "pieces" / "metadata.parquet")
    cached = pyarrow.dataset.dataset(folder / "features", format="arrow")
    predictions = parquet.read_table(folder / "predictions")
    assert table.num_rows == len(list((folder / "pieces").glob("*.flac"))) > 100
    assert cached.count_rows() == table.num_rows
    assert predictions["index"].to_pylist() == list(range(table.num_rows))
    for column in ("source", "destination", "label"):
        assert predictions[column].to_pylist() == table[column].to_pylist()
    for cards, novel in zip(predictions["cards"], predictions["novel"], strict=True):
        assert cards.as_py() + novel.as_py() == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_the_classifier_learns_and_knows_unseen_recordings(made):
    """The loss falls, and the verdict on each recording is its label, on the unseen ones too."""
    _, printed = made
    losses = [float(each) for each in re.findall(r"^epoch \d+: loss (\d+\.\d+)", printed, re.M)]
    assert len(losses) == 8
    assert losses[-1] < 0.5 * losses[0]
    verdicts = re.findall(r"^\S+/(\w+-\d)\.flac: \d\.\d\d, so (\w+)( \(unseen\))?$", printed, re.M)
    assert len(verdicts) == 10
    assert [name for name, _, unseen in verdicts if unseen] == list(UNSEEN)
    assert [verdict for _, verdict, _ in verdicts] == [name[:5] for name, _, _ in verdicts]


@pytest.mark.slow
def test_a_changed_model_is_told(made):
    """The last call shows what changed, and how to go on."""
    _, printed = made
    assert "changed since the earlier run" in printed
    assert "redo='*'" in printed


def test_loudness_is_in_decibels():
    """Full scale is 0, half of it 6 less, and silence is a number."""
    loudness = load_work(f"{ROOT / 'examples' / 'loudness.py'}:loudness")
    sounds = torch.stack([torch.ones(8), torch.full((8,), 0.5), torch.zeros(8)])
    assert loudness(sounds).tolist() == pytest.approx([0, -6.02, -100], abs=0.01)
