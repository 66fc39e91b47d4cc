"""`forebay predict` on the command line."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from driving import call

from forebay.cli import cli
from forebay.errors import ChangedError

MODELS = Path(__file__).with_name("models.py")


def run(*arguments):
    return CliRunner().invoke(cli, [str(word) for word in arguments], standalone_mode=False)


def predict(model, data, output, *options):
    return run(
        "predict", f"{MODELS}:{model}", data, output, "--num-workers", 0, "--quiet", *options
    )


def test_a_dataset_by_name(tmp_path):
    """A model and a dataset of one file; the summary is printed."""
    done = predict("half", f"{MODELS}:numbers", tmp_path, "--batch-size", 8)
    assert done.return_value == 0
    assert "50 predicted, 0 failed" in done.output
    assert pq.read_table(tmp_path)["prediction"].to_pylist() == [2.0 * k for k in range(50)]


def test_a_table_and_its_function(tmp_path):
    """A table's rows go through --load; the model may be a class."""
    table = tmp_path / "rows.csv"
    table.write_text("start_s\n1\n2\n")
    done = predict("Half", table, tmp_path / "out", "--load", f"{MODELS}:sample_of")
    assert done.return_value == 0, done.exception
    assert pq.read_table(tmp_path / "out")["prediction"].to_pylist() == [2.0, 4.0]


@pytest.mark.slow
def test_failures_are_exit_code_3(tmp_path):
    """In a process of its own; and the second time too, when nothing is left to do."""
    data = f"{MODELS}:some_bad"
    code, out, err = call(
        "predict", f"{MODELS}:half", data, tmp_path, "--num-workers", 0, "--quiet"
    )
    assert code == 3, err
    assert "sample 7: ValueError: no sample 7" in out
    again = predict("half", data, tmp_path)
    assert again.return_value == 3
    assert "sample 7: ValueError: no sample 7" in again.output


def test_another_model_is_refused_until_it_starts_over(tmp_path):
    """--restart removes what there was."""
    predict("half", f"{MODELS}:numbers", tmp_path)
    assert isinstance(predict("total", f"{MODELS}:numbers", tmp_path).exception, ChangedError)
    done = predict("total", f"{MODELS}:numbers", tmp_path, "--restart")
    assert done.return_value == 0
    assert pq.read_table(tmp_path)["prediction"].to_pylist() == [4.0 * k for k in range(50)]
