"""`num_workers="auto"` in real runs: more workers where a function waits, and the same outputs."""

from __future__ import annotations

import logging
import time

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from driving import WORKS, make_inputs

import forebay
from forebay import AutoWorkers
from forebay.cli import cli
from forebay.loading import workers
from forebay.runs import tuning
from known_load import know_load

# On Python 3.12 and newer, a fork beside threads is warned of.
pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


INPUTS = 200


def wait_and_copy(source, out):
    """Wait, as for a network, and copy."""
    time.sleep(0.005)
    out.file(source.name).write_bytes(source.read_bytes())
    return {"bytes": source.stat().st_size}


class Remote:
    """Samples that are waited for."""

    def __len__(self):
        return INPUTS

    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.full((2,), float(index))


def total(batch):
    """Be a model that costs nothing."""
    return batch.sum(1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["thread", pytest.param("process", marks=pytest.mark.thorough)])
def test_a_function_that_waits_gets_as_many_workers_as_allowed(
    tmp_path, caplog, monkeypatch, backend
):
    """In one decision, which the report and the log have; the table is that of any number."""
    know_load(monkeypatch, tuning, step_s=None, batch_s=0.05)
    inputs = make_inputs(tmp_path / "in", INPUTS, lines=1)
    usual = {"progress": False, "backend": backend}
    with caplog.at_level(logging.INFO, "forebay"):
        report = forebay.preprocess(
            wait_and_copy, inputs, tmp_path / "out", num_workers=AutoWorkers(max=6), **usual
        )
    assert report.done == INPUTS
    assert "there are 6 workers instead of 2" in report.decisions[0]
    assert f"num_workers=6: {report.decisions[0]}" in caplog.messages
    fixed = forebay.preprocess(wait_and_copy, inputs, tmp_path / "fixed", num_workers=6, **usual)
    assert fixed.decisions == ()
    assert report.metadata.equals(fixed.metadata)


@pytest.mark.slow
def test_predict_gets_as_many_workers_as_its_model_needs(tmp_path, monkeypatch):
    """A model that is faster than what it waits for."""
    know_load(monkeypatch, workers, step_s=0.001, batch_s=0.04)
    report = forebay.predict(
        total,
        Remote(),
        tmp_path,
        batch_size=2,
        part_size=100,
        num_workers=AutoWorkers(max=4),
        progress=False,
    )
    assert any("4 workers instead of" in decision for decision in report.decisions)
    predictions = pq.read_table(tmp_path)["prediction"].to_pylist()
    assert predictions == [2.0 * index for index in range(INPUTS)]


def test_the_command_line_accepts_it(tmp_path):
    """As a word; other words are refused."""
    inputs = make_inputs(tmp_path / "in", 3, lines=1)
    arguments = ["preprocess", f"{WORKS}:copy", str(inputs), str(tmp_path / "out"), "--quiet"]
    found = CliRunner().invoke(cli, [*arguments, "--num-workers", "auto"])
    assert "3 done, 0 failed" in found.output
    found = CliRunner().invoke(cli, [*arguments, "--num-workers", "many"])
    assert "Invalid value for '--num-workers': 'many' is not a valid" in found.output


@pytest.mark.slow
def test_a_cache_with_auto_workers_has_each_sample(tmp_path):
    """Its inputs are shards; each sample is there."""
    cached = forebay.cache(Remote(), tmp_path / "c", num_workers="auto", progress=False)
    assert [int(cached[k][0]) for k in range(INPUTS)] == list(range(INPUTS))
