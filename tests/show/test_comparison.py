"""`forebay.compare` and `forebay compare`: what differs between two reports, whoever wrote them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from self_contained import HOSTILE, check_self_contained

import forebay
from forebay.show.html import embedded, write_report

TOTALS = {"rate": 40.0, "wait_share": 0.5, "wait_p50_s": 0.01, "wait_p99_s": 0.1, "taken": 1000}


def written(path, kind="loader", totals=TOTALS, **changed):
    """Write a file with a summary; return its path."""
    summary = {
        "format": 1,
        "kind": kind,
        "title": "DataLoader(Images)",
        "verdict": "",
        "totals": totals,
        "settings": {"num_workers": "2", "seed": "0"},
        "environment": {"torch": "2.6"},
        **changed,
    }
    page = {"title": "x", "subtitle": "", "sections": []}
    write_report(page, path)
    path.write_text(path.read_text().replace(embedded(page), embedded(summary)))
    return path


def test_what_differs_is_said(tmp_path) -> None:
    """Rates with their change, waits, settings; what is equal is left out."""
    one = written(tmp_path / "a.html", verdict="2 workers are too few.")
    faster = TOTALS | {"rate": 60.0, "wait_share": 0.1}
    two = written(
        tmp_path / "b.html", totals=faster, settings={"num_workers": "4", "seed": "0", "new": "1"}
    )
    found = forebay.compare(one, two)
    assert found.figures == (
        ("batches/s", "40", "60", "+50%"),
        ("share of the run spent waiting", "50%", "10%", ""),
    )
    assert found.settings == (("num_workers", "2", "4", ""), ("new", "", "1", ""))
    assert found.environment == ()
    assert found.verdicts == ("2 workers are too few.", "")
    text = str(found)
    assert "batches/s                       40 → 60 (+50%)" in text
    assert "new          none → 1" in text
    assert "environment: no difference" in text
    assert "verdict of the first: 2 workers are too few." in text
    saved = check_self_contained(found.save(tmp_path / "c.html").read_text())
    assert {"+50%", "num_workers", "No difference."} <= set(saved.text)


def test_a_small_change_is_none(tmp_path) -> None:
    """Rates vary from run to run."""
    one = written(tmp_path / "a.html")
    two = written(tmp_path / "b.html", totals=TOTALS | {"rate": 40.4})
    assert forebay.compare(one, two).figures == ()


@pytest.mark.parametrize("other", ["preprocess", "comparison"])
def test_unequal_kinds_are_refused(tmp_path, other) -> None:
    """With both files and what they are."""
    one, two = written(tmp_path / "a.html"), written(tmp_path / "b.html", kind=other)
    with pytest.raises(forebay.OptionError, match=r"'.*a\.html' is the report of a loader"):
        forebay.compare(one, two)


HOSTILE_VALUES = [
    None,
    [],
    HOSTILE,
    {"rate": HOSTILE, "taken": [1], "wait_share": 10**400, "wait_p50_s": True},
    {"rate": float("1e300"), "taken": -1, "wait_share": None},
    {HOSTILE: HOSTILE, "x": {"y": 1}, "z": "\x1b[2J\u202e\n" * 1000},
    {str(number): str(number) for number in range(10_000)},
]


@pytest.mark.slow
@pytest.mark.parametrize("value", HOSTILE_VALUES, ids=range(len(HOSTILE_VALUES)))
@pytest.mark.parametrize("name", ["totals", "settings", "environment", "title", "verdict"])
def test_hostile_values_are_data(tmp_path, name, value) -> None:
    """Any JSON in any place gives a comparison that is safe to print and to open."""
    one = written(tmp_path / "a.html")
    two = written(tmp_path / "b.html", **{name: value})
    for pair in ((one, two), (two, one), (two, two)):
        found = forebay.compare(*pair)
        assert all(each.isprintable() for each in str(found).split("\n"))
        assert len(str(found)) < 100_000
        check_self_contained(found.save(tmp_path / "c.html").read_text())


@pytest.mark.slow
def test_the_command_prints_and_saves_the_same_comparison(tmp_path) -> None:
    """As `forebay.compare` does; a file that is not a report is an error."""
    one = written(tmp_path / "a.html")
    two = written(tmp_path / "b.html", totals=TOTALS | {"rate": 60.0})
    command = [sys.executable, "-m", "forebay", "compare", one, two]
    done = subprocess.run(
        [*command, "--save", tmp_path / "c.html"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{forebay.compare(one, two)}\n"
    assert (tmp_path / "c.html").is_file()
    narrow = {**os.environ, "PYTHONIOENCODING": "latin-1"}  # it has no arrow
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=narrow)
    assert "\\u2192" in done.stdout
    for path in (tmp_path / "gone.html", tmp_path):
        done = subprocess.run([*command[:-1], path], capture_output=True, text=True)
        assert done.returncode == 2
        assert f"Could not open file '{path}'" in done.stderr
        assert "Traceback" not in done.stderr
    one.write_text(json.dumps({"format": 1}))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "cannot be used as a report" in done.stderr
    assert "Traceback" not in done.stderr
