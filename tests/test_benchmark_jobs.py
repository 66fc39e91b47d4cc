"""The benchmarks of real pipelines and of the kept heap measure what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.call import Call
from benchmarks.jobs import _cells as job_cells
from benchmarks.loading_jobs import _cells
from benchmarks.preprocess import Rows

pytestmark = pytest.mark.full


def test_a_row_compares_with_torch_with_the_best_peer_and_with_one_process():
    """The process alone and forebay itself are no peers."""
    rates = {"alone": 100.0, "torch": 40.0, "forebay": 180.0, "spdl": 90.0}
    assert _cells(rates) == ("100", "40", "180", "90", "-", "-", "4.50", "2.00", "0.90")


def test_a_pipeline_without_its_libraries_has_no_row():
    """Where albumentations is missing, no loader has a rate."""
    assert _cells({}) == ("not installed",)


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["forebay", pytest.param("torch", marks=pytest.mark.thorough)])
def test_a_run_of_a_pipeline_compares_its_batches_and_gives_a_rate(peer: str, tmp_path: Path):
    """The program ends with an error if the first batch is another one."""
    arguments = (peer, "NumPy, products of 500x500", str(tmp_path), "0.1")
    with Call("benchmarks.loading_jobs", *arguments) as call:
        assert json.loads(call.answer(120.0))["rate"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["kept", "returned"])
def test_the_benchmark_of_the_heap_leaves_it_unchanged_in_the_workers(kept: str, tmp_path: Path):
    """The program ends with an error unless the workers' heap is as the argument says."""
    arguments = (kept, "1-30", "4", str(tmp_path / "run"))
    with Call("benchmarks.kept_heap", *arguments, OPENBLAS_NUM_THREADS="1") as call:
        found = json.loads(call.answer(120.0))
    assert found["rate"] > 0
    assert found["faults"] > 0


def test_a_row_is_printed_when_it_is_measured(capsys):
    """A run that is stopped has shown what it found until then."""
    rows = Rows()
    rows.append(("zlib", "", "12"))
    assert capsys.readouterr().out == "measured: zlib, 12\n"
    assert rows == [("zlib", "", "12")]


def test_a_row_of_a_job_prices_what_the_flushes_take():
    """They are what the same call takes less in memory, which is no peer."""
    rates = {"bare": 200.0, "forebay": 100.0, "memory": 125.0, "pool": 120.0}
    cells = job_cells("zlib", 1000, rates)
    assert cells[-4:] == ("0.83", "0.50", "2000 ms", "1.04")
    del rates["memory"]
    assert job_cells("zlib", 1000, rates)[-4:] == ("0.83", "0.50", "-", "-")
