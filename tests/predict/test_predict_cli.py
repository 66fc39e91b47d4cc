"""`forebay predict` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from driving import call

from forebay.cli import cli
from forebay.errors import ChangedError, OptionError
from forebay.outputs.places import snapshot_of
from forebay.runs.preprocess import retry

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
    """A table's rows go through --load; the model may be a class. A URL is a table, too."""
    table = tmp_path / "rows.csv"
    table.write_text("start_s\n1\n2\n")
    for data, output in ((table, tmp_path / "out"), (table.as_uri(), tmp_path / "from-url")):
        done = predict("Half", data, output, "--load", f"{MODELS}:sample_of")
        assert done.return_value == 0, done.exception
        assert pq.read_table(output)["prediction"].to_pylist() == [2.0, 4.0]


def test_files_and_their_function(tmp_path):
    """A folder, or a glob, of files that --load makes samples of; a typing error is named."""
    (tmp_path / "in").mkdir()
    for k in range(3):
        (tmp_path / "in" / f"{k}.txt").write_text(str(k))
    for data, output in (("in", "out"), ("in/*.txt", "globbed")):
        load = "--load", f"{MODELS}:sample_of_file"
        done = predict("half", tmp_path / data, tmp_path / output, *load)
        assert done.return_value == 0, done.exception
        assert pq.read_table(tmp_path / output)["prediction"].to_pylist() == [0.0, 2.0, 4.0]
    done = predict("half", tmp_path / "inn", tmp_path / "out2")
    assert "no such file or folder" in str(done.exception)


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
    """--redo '*' removes what there was."""
    predict("half", f"{MODELS}:numbers", tmp_path)
    assert isinstance(predict("total", f"{MODELS}:numbers", tmp_path).exception, ChangedError)
    done = predict("total", f"{MODELS}:numbers", tmp_path, "--redo", "*")
    assert done.return_value == 0
    assert pq.read_table(tmp_path)["prediction"].to_pylist() == [4.0 * k for k in range(50)]


def test_failed_samples_are_listed_and_retried(tmp_path):
    """`failures` and `status` count samples; `retry` is given what `predict` was."""
    table = tmp_path / "rows.csv"
    table.write_text("start_s\n1\nx\n3\n")
    output, load = tmp_path / "out", f"{MODELS}:sample_of"
    assert predict("half", table, output, "--load", load).return_value == 3
    listed = run("failures", output)
    assert listed.stdout.startswith("sample 1: ValueError: could not convert string to float")
    assert listed.stderr == "1 sample failed\n"
    assert run("status", output).stdout.startswith("2 of 3 samples done, 1 failed, 0 to do\n")
    assert json.loads(run("failures", output, "--json").stdout)["source"] == 1
    refused = run("retry", output).exception
    assert isinstance(refused, OptionError)
    assert f"forebay retry {output} MODEL DATA" in str(refused)
    again = run(
        "retry", output, f"{MODELS}:half", table, "--load", load, "--num-workers", 0, "--quiet"
    )
    assert again.return_value == 3
    assert "2 predicted, 1 failed" in again.output
    with pytest.raises(OptionError, match="was made by predict, and retry only applies to pre"):
        retry(lambda source, out: None, output)


def test_the_settings_of_a_run_hold_for_its_retry(tmp_path):
    """Those of the call before, unless others are given; --load is shown, too."""
    table = tmp_path / "rows.csv"
    table.write_text("start_s\n1\nx\n3\n")
    load = f"{MODELS}:sample_of"
    predict("half", table, tmp_path / "out", "--load", load, "--batch-size", 2)
    shown = str(run("retry", tmp_path / "out").exception).splitlines()[-1]
    assert " MODEL DATA --num-workers 0 --batch-size 2 --load " in shown
    for more, size in (((), 2), (("--batch-size", 3), 3)):
        run("retry", tmp_path / "out", f"{MODELS}:half", table, "--load", load, *more)
        settings = json.loads(snapshot_of(tmp_path / "out").meta["settings"])
        assert (settings["batch_size"], settings["num_workers"]) == (size, 0)


def test_an_option_of_another_command_is_refused_by_retry(tmp_path):
    """Rather than ignored."""
    predict("half", f"{MODELS}:some_bad", tmp_path)
    names = (f"{MODELS}:half", f"{MODELS}:some_bad")
    refused = run("retry", tmp_path, *names, "--retries", 2)
    assert "--retries does not apply to predict" in str(refused.exception)


def test_a_folder_in_place_of_the_model_is_named(tmp_path):
    """With the order of the arguments; nothing is loaded."""
    code, _, err = call("predict", tmp_path, f"{MODELS}:half", tmp_path / "out")
    assert code == 2
    assert "Usage: " in err and "FILE.py:MODEL DATA OUTPUT" in err
    assert f"{str(tmp_path)!r} is a folder; a file or module and a name in it" in err


def test_a_table_without_a_function_names_the_option(tmp_path):
    """As one writes it in a shell, too."""
    (tmp_path / "rows.csv").write_text("start_s\n1\n")
    refused = predict("half", tmp_path / "rows.csv", tmp_path / "out").exception
    assert isinstance(refused, OptionError)
    assert "--load FILE.py:FUNCTION" in str(refused)
