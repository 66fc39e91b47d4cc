"""The examples do what they say: the pieces are the recording, and memory does not grow with it."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

import forebay
from forebay.runs.source_code import load_work

ROOT = Path(__file__).parents[1]
RECORDINGS = sorted((ROOT / "examples" / "recordings").glob("*.flac"))
split_audio = load_work(str(ROOT / "examples" / "split_audio.py") + ":split_audio")


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_pieces_are_exact_copies_of_the_recording(recording, tmp_path):
    """Each piece holds the very samples at its start, and together they cover the recording."""
    whole, rate = soundfile.read(recording, dtype="int16")
    covered = 0
    for row in split_audio(recording, tmp_path):
        piece, _ = soundfile.read(row["destination"], dtype="int16")
        start = round(row["start_s"] * rate)
        assert start <= covered, "there is a gap"
        np.testing.assert_array_equal(piece, whole[start : start + len(piece)])
        assert row["duration_s"] == len(piece) / rate <= 2.0
        assert start + len(piece) > covered, "a piece holds nothing new"
        covered = start + len(piece)
    assert covered == len(whole)


@pytest.mark.slow
def test_the_demo_gives_a_row_and_a_file_for_each_piece(tmp_path, monkeypatch):
    """The command of `make demo`, and what it shows."""
    monkeypatch.chdir(ROOT)
    with open("examples/recordings.csv", newline="", encoding="utf-8") as manifest:
        labels = {row["path"]: row["label"] for row in csv.DictReader(manifest)}
    assert sorted(labels) == [str(path.relative_to(ROOT)) for path in RECORDINGS]

    report = forebay.preprocess(
        split_audio, "examples/recordings.csv", output=tmp_path, num_workers=2, progress=False
    )
    rows = report.metadata.to_pylist()
    assert (report.done, report.failed) == (10, 0)
    assert sorted(row["destination"] for row in rows) == sorted(
        path.name for path in tmp_path.glob("*.flac")
    )
    assert all(row["label"] == labels[row["source"]] for row in rows)

    shown = subprocess.run(
        [sys.executable, "examples/show_table.py", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"{len(rows)} .flac files" in shown
    assert f"… and {len(rows) - 8} more rows" in shown
