"""What preprocess promises when nothing goes wrong: files, table, report, resume."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from driving import calls, make_inputs, published, staged
from works import copy, draw, fail_odd, fail_once, nothing, row_alone, split

import forebay
from forebay.errors import ChangedError, InputError, LedgerError, OptionError
from forebay.outputs.places import snapshot_of
from forebay.runs.preprocess import retry

# Runs that start new interpreters have tests of their own.
pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


@pytest.fixture
def inputs(tmp_path):
    return make_inputs(tmp_path / "in", 6, lines=2)


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


def run(work, inputs, output, **options):
    return forebay.preprocess(work, inputs, output, progress=False, **{"num_workers": 0, **options})


def returns(value, source, out):
    return value


def writes(names, value, source, out):
    for name in names:
        out.file(f"{source.stem}{name}").write_text(name)
    return value


def yields_strings(source, out):
    path = out.file(source.stem)
    path.write_text("x")
    yield {"destination": str(path), "all": [str(path)], "by": {"name": path}}


def twice_as_long(source, out):
    return {"length": 2 * source.stat().st_size}


# ---- what a function may return -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "rows"),
    [
        (None, []),
        ({}, []),
        ({"a": 1}, [{"a": 1}]),
        ([{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 2}]),
        (({"a": n} for n in range(2)), [{"a": 0}, {"a": 1}]),
        ([], []),
        (7, [{"metadata": 7}]),
        (["x", "y"], [{"metadata": ["x", "y"]}]),
        ({"a": {"b": [1, None]}}, [{"a": {"b": [1, None]}}]),
        (np.float32(0.5), [{"metadata": 0.5}]),
        (np.array(3), [{"metadata": 3}]),
        (np.eye(2), [{"metadata": [[1.0, 0.0], [0.0, 1.0]]}]),
        ((np.ones(2), 7), [{"metadata_0": [1.0, 1.0], "metadata_1": 7}]),
        ([np.ones((1, 2)), np.ones(1)], [{"metadata_0": [[1.0, 1.0]], "metadata_1": [1.0]}]),
        ((np.float32(0.5), 7), [{"metadata": [0.5, 7.0]}]),
    ],
)
def test_any_form_of_metadata_becomes_rows(inputs, output, value, rows):
    """A dict, an iterable of dicts, or any value: one row each, `source` in front."""
    first = str(inputs / "0000.txt")
    table = run(partial(returns, value), [first], output).metadata
    expected = [{"source": first, "destination": None, **row} for row in rows]
    assert table.to_pylist() == expected


def test_an_input_that_made_nothing_has_no_row(inputs, output):
    """The next step gets what it can open; the report says how many inputs that leaves out."""
    report = run(keep_even, inputs, output)
    assert (report.done, report.without_rows, report.metadata.num_rows) == (6, 3, 3)
    assert "metadata.parquet, without 3 that made no file and no metadata" in str(report)
    assert forebay.from_table(output)[0]["destination"].endswith("0000.txt")
    assert run(keep_even, inputs, output).without_rows == 3


def keep_even(source, out):
    if int(source.stem) % 2 == 0:
        out.file(source.name).write_text("kept")


class Images:
    """Samples as training has them: an image and its label."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.full((3, 90, 90), index / 255, np.float32), index


def image(source, out):
    """Return an image, and not a file of it."""
    return {"image": np.full((3, 90, 90), 0.5)}


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_large_arrays_as_metadata_are_columns_of_lists_and_are_told_once(
    tmp_path, capsys, num_workers
):
    """With the size of all of them, and with `save=`, which writes them to files."""
    report = forebay.preprocess(Images(), output=tmp_path, num_workers=num_workers)
    said = capsys.readouterr().err
    assert said.count("with an array of numbers; for all 3 that may be ") == 1
    assert "pass save=, a function(sample, out) that writes what Images.__getitem__ returns" in said
    assert f"{tmp_path}: {report.notes[0]}" in said
    image, label = report.metadata.drop_columns(["source", "destination"]).schema.types
    assert str(image).count("list<") == 3
    assert "double" in str(image)
    assert str(label) == "int64"


def test_a_function_is_told_to_write_its_arrays(inputs, output, caplog):
    """In the log, where there is no progress; an embedding and a long text belong in a table."""
    (note,) = run(image, inputs, output, limit=1).notes
    assert "image writes it to out.file(), with numpy.save for example" in note
    assert note in caplog.text
    for fine in ({"vector": [0.123456789012345] * 1536}, {"text": "12, 13" * 20_000}):
        assert run(partial(returns, fine), inputs, output, limit=1, redo="*").notes == ()


def test_a_single_output_is_the_destination_of_every_row(inputs, output):
    """With one output, rows that name no destination get it."""
    table = run(partial(writes, [".a"], [{"n": 1}, {"n": 2}]), inputs, output, limit=1).metadata
    assert table["destination"].to_pylist() == ["0000.a", "0000.a"]


def test_a_function_that_says_nothing_gets_a_row_for_each_output(inputs, output):
    """Outputs alone are metadata enough, in the order they were asked for."""
    table = run(partial(writes, [".b", ".a"], None), inputs, output, limit=1).metadata
    assert table["destination"].to_pylist() == ["0000.b", "0000.a"]


def test_staged_paths_become_final_names_wherever_they_stand(inputs, output):
    """As text, as a Path, in a list or a dict: no private path gets into the table."""
    (row,) = run(yields_strings, inputs, output, limit=1).metadata.to_pylist()
    assert row["destination"] == "0000"
    assert row["all"] == ["0000"]
    assert row["by"] == {"name": "0000"}


def test_not_a_number_stays_a_float(inputs, output):
    """NaN is a float in the table, whether Python's own or nested."""
    report = run(partial(returns, {"a": float("nan")}), inputs, output, limit=1)
    (row,) = report.metadata.to_pylist()
    assert row["a"] != row["a"]


def test_an_input_may_make_nothing(inputs, output):
    """Zero outputs and zero rows is an answer: done, and not worked on again."""
    report = run(partial(returns, []), inputs, output)
    assert (report.done, report.failed, report.metadata.num_rows) == (6, 0, 0)


def test_outputs_may_lie_in_subfolders(inputs, output):
    """Names with folders are published with them."""
    run(split, inputs, output)
    assert len(published(output)) == 12
    assert (output / "0003" / "1.txt").read_text() == "line 1 of 3"


# ---- inputs -------------------------------------------------------------------------------------


class Words:
    """A map-style Dataset, by its two methods alone."""

    def __init__(self, words):
        self.words = words

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return [self.words[index][at : at + 3] for at in range(len(self.words[index]) - 2)]


@pytest.mark.slow
def test_a_dataset_does_its_own_work(output):
    """`dataset[i]` is called for each index; what it returns is its metadata."""
    report = forebay.preprocess(Words(["simple", "abcd"]), output=output, num_workers=2)
    assert report.metadata.to_pylist() == [
        {"source": 0, "destination": None, "metadata": ["sim", "imp", "mpl", "ple"]},
        {"source": 1, "destination": None, "metadata": ["abc", "bcd"]},
    ]


def test_an_iterable_dataset_has_no_inputs(output):
    """Even with a length, as IterableDatasets may have one: no sample has an index."""
    from torch.utils.data import IterableDataset  # not in each worker that imports this file

    class Stream(IterableDataset):
        """torch's base class has a `__getitem__` that raises."""

        def __iter__(self):
            return iter(range(3))

        def __len__(self):
            return 3

    with pytest.raises(OptionError, match="a map-style Dataset; got Stream"):
        forebay.preprocess(Stream(), output=output)
    assert not output.exists()


def test_a_manifests_rows_come_as_dicts_and_stay_columns(tmp_path, output):
    """The function gets the row; the table has its columns first."""
    manifest = tmp_path / "m.csv"
    manifest.write_text("path,label\nb.wav,dog\na.wav,cat\n")
    table = run(lambda row, out: {"upper": row["label"].upper()}, manifest, output).metadata
    assert table.to_pylist() == [
        {"path": "b.wav", "label": "dog", "source": "b.wav", "destination": None, "upper": "DOG"},
        {"path": "a.wav", "label": "cat", "source": "a.wav", "destination": None, "upper": "CAT"},
    ]


# ---- the same bytes -----------------------------------------------------------------------------

WAYS = [(0, "process"), (1, "process"), (2, "process"), (1, "thread"), (2, "thread")]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
def test_the_table_is_the_same_bytes_however_many_workers(tmp_path, form):
    """Workers and backend leave no trace in outputs or table, in any format."""
    inputs = make_inputs(tmp_path / "in", 60, lines=3)
    tables, files = set(), []
    for number, (workers, backend) in enumerate(WAYS):
        output = tmp_path / f"out{number}"
        report = run(split, inputs, output, num_workers=workers, backend=backend, metadata=form)
        assert report.metadata_path == output / f"metadata.{form}"
        tables.add(report.metadata_path.read_bytes())
        files.append(published(output))
        assert not staged(output)
    assert len(tables) == 1
    assert all(each == files[0] for each in files)
    assert len(files[0]) == 180


@pytest.mark.slow
def test_random_numbers_depend_on_the_input_alone(tmp_path):
    """Equal for any way to work, also from a library that the function imports itself."""
    inputs = make_inputs(tmp_path / "in", 12)
    tables = [
        run(draw, inputs, tmp_path / f"out{at}", num_workers=workers, backend=backend).metadata
        for at, (workers, backend) in enumerate(WAYS)
    ]
    assert all(table.equals(tables[0]) for table in tables)
    assert len(set(tables[0]["python"].to_pylist())) == 12
    assert len(set(tables[0]["numpy"].to_pylist())) == 12


@pytest.mark.parametrize(("workers", "backend"), [(0, "process"), (2, "thread")])
def test_the_callers_generators_are_left_alone(inputs, output, workers, backend):
    """Working in this process does not touch this process's random numbers."""
    random.seed(1)
    expected = random.Random(1).random()
    run(draw, inputs, output, num_workers=workers, backend=backend)
    assert random.random() == expected


# ---- the working directory ----------------------------------------------------------------------


def leave_the_directory(source, out):
    """Change to a folder that is removed at once, for one of the inputs."""
    size = source.stat().st_size
    if source.name == "0001.txt":
        gone = source.absolute().parent / "gone"
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()
    return {"size": size}


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "backend"), [(0, "process"), (1, "process"), (1, "thread")])
def test_a_change_of_the_working_directory_ends_with_its_input(
    tmp_path, monkeypatch, workers, backend
):
    """Later inputs with relative paths are found, and the caller is where it was."""
    make_inputs(tmp_path / "in", 4)
    monkeypatch.chdir(tmp_path)
    report = run(leave_the_directory, "in", "out", num_workers=workers, backend=backend)
    assert (report.done, report.failed) == (4, 0)
    assert report.metadata["source"].to_pylist() == [f"in/{n:04d}.txt" for n in range(4)]
    assert Path.cwd() == tmp_path


# ---- impossible settings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("timeout", value) for value in (0, -1, True, "1", math.inf, math.nan)),
        pytest.param("timeout", 10**400, id="timeout-beyond floats"),
        *(("max_failures", value) for value in (-1, 1.0, 1.5, True, "1", math.inf, math.nan)),
    ],
)
def test_a_number_that_is_no_such_number_starts_nothing(inputs, output, setting, value):
    """Infinities and NaN included; the message says what there may be."""
    with pytest.raises(OptionError, match=rf"^{setting}=.* is not valid; it must be a "):
        run(copy, inputs, output, num_workers=1, **{setting: value})
    assert not output.exists()


@pytest.mark.parametrize("timeout", [3e6, 1e300])
def test_a_timeout_may_be_longer_than_the_system_waits(inputs, output, timeout):
    """Months, which no single wait of the system's can last."""
    assert run(copy, inputs, output, num_workers=1, timeout=timeout).done == 6


# ---- the report ---------------------------------------------------------------------------------


def test_the_report_says_what_happened(inputs, output):
    """Counts, failures, table and a summary to read."""
    report = run(fail_odd, inputs, output, retries=0)
    assert (report.done, report.failed, report.resumed) == (3, 3, 0)
    assert report.elapsed_s > 0
    assert isinstance(report.metadata, pyarrow.Table)
    assert report.metadata_path == output / "metadata.parquet"
    assert [Path(failure.source).name for failure in report.failures] == [
        "0001.txt",
        "0003.txt",
        "0005.txt",
    ]
    text = repr(report)
    assert text.startswith("3 done, 3 failed in ")
    assert f"{inputs / '0003.txt'}: ValueError: number 3 is odd" in text
    assert str(output) in text


# ---- resume -------------------------------------------------------------------------------------


def test_the_same_call_again_does_nothing(inputs, output, tmp_path):
    """What is done stays done, and the table stays the same file."""
    first = run(copy, inputs, output)
    before = first.metadata_path.stat()
    again = run(copy, inputs, output)
    assert (again.done, again.resumed) == (6, 6)
    assert len(calls(tmp_path)) == 6
    assert again.metadata_path.stat() == before


def test_failed_inputs_are_tried_again(inputs, output, tmp_path):
    """A second call tries the failures, and only them."""
    first = run(fail_once, inputs, output, retries=0)
    second = run(fail_once, inputs, output, retries=0)
    assert (first.failed, second.failed, second.done) == (6, 0, 6)
    assert second.metadata["tries"].to_pylist() == [2] * 6
    assert len(calls(tmp_path)) == 12


def test_a_changed_input_is_redone_and_its_stale_outputs_go(inputs, output):
    """One line fewer: one output fewer, and one row."""
    run(split, inputs, output)
    (inputs / "0002.txt").write_text("another line\n")
    report = run(split, inputs, output)
    assert (report.done, report.resumed) == (6, 5)
    assert (output / "0002" / "0.txt").read_text() == "another line"
    assert not (output / "0002" / "1.txt").exists()
    assert report.metadata.num_rows == 11


def test_new_inputs_join_and_removed_ones_leave_the_table(inputs, output, tmp_path):
    """The table lists what is listed now, in its order; only the new one is worked on."""
    run(copy, inputs, output)
    (inputs / "0001.txt").unlink()
    (inputs / "0000a.txt").write_text("new\n")
    report = run(copy, inputs, output)
    assert report.metadata["destination"].to_pylist() == [
        "0000.txt",
        "0000a.txt",
        *(f"{number:04d}.txt" for number in range(2, 6)),
    ]
    assert calls(tmp_path)[6:] == ["0000a.txt"]


def test_outputs_that_were_removed_are_made_again(inputs, output, tmp_path):
    """As make does; one listing of the folder finds them, also of folders that are gone."""
    before = run(split, inputs, output)
    table, files = before.metadata_path.read_bytes(), published(output)
    shutil.rmtree(output / "0001")
    (output / "0003" / "1.txt").unlink()
    report = run(split, inputs, output)
    assert (report.done, report.resumed, report.failed) == (6, 4, 0)
    assert (report.metadata_path.read_bytes(), published(output)) == (table, files)
    (said,) = report.notes
    assert said == (
        "2 of 6 done inputs are done again: outputs are no longer in the folder, such as "
        "'0001/0.txt'."
    )
    assert run(split, inputs, output).resumed == 6


def test_a_file_that_takes_a_removed_outputs_name_is_not_touched(inputs, output):
    """What was removed once is not removed again by the next call."""
    run(split, inputs, output)
    (inputs / "0002.txt").write_text("another line\n")
    run(split, inputs, output)
    (output / "0002" / "1.txt").write_text("the user's own")
    run(split, inputs, output)
    assert (output / "0002" / "1.txt").read_text() == "the user's own"


def test_a_limit_tries_the_first_inputs_and_the_full_call_goes_on(inputs, output, tmp_path):
    """The trial's inputs are not done twice."""
    trial = run(copy, inputs, output, num_workers=None, limit=2)
    assert (trial.done, trial.metadata.num_rows) == (2, 2)
    report = run(copy, inputs, output)
    assert (report.done, report.resumed) == (6, 2)
    assert len(calls(tmp_path)) == 6


def test_without_resume_everything_is_done_anew(inputs, output, tmp_path):
    """The earlier outputs go first, those with other names too."""
    run(split, inputs, output)
    report = run(copy, inputs, output, redo="*")
    assert (report.done, report.resumed) == (6, 0)
    assert sorted(published(output)) == [f"{number:04d}.txt" for number in range(6)]


def test_another_format_is_written_from_the_ledger(inputs, output, tmp_path):
    """Asking for CSV later costs no work; and back again, the table is up to date."""
    run(copy, inputs, output)
    (inputs / "0005.txt").unlink()
    run(copy, inputs, output, metadata="csv")
    assert (output / "metadata.csv").read_text().count("\n") == 6
    with pytest.raises(forebay.InputError, match=r"only the last run's is up to date"):
        forebay.from_table(output)
    assert run(copy, inputs, output).metadata.num_rows == 5
    assert len(calls(tmp_path)) == 6


# ---- a changed function -------------------------------------------------------------------------


def test_a_changed_function_is_an_error_that_names_it(inputs, output):
    """All that changed, the three ways on; and nothing is lost."""
    run(copy, inputs, output)
    with pytest.raises(ChangedError) as caught:
        run(twice_as_long, inputs, output)
    text = str(caught.value)
    assert "twice_as_long changed since the earlier run" in text
    assert "  changed: test_preprocess.py:twice_as_long, works.py:copy, " in text
    assert "redo='*'" in text
    assert "rest: accept_changes=True, or --accept-changes;" in text
    assert len(published(output)) == 6
    assert run(copy, inputs, output).resumed == 6


def test_changed_parameters_are_an_error_that_names_them(inputs, output):
    """A partial's argument counts as the work."""
    run(partial(returns, {"a": 1}), inputs, output)
    with pytest.raises(ChangedError, match="changed since the earlier run") as caught:
        run(partial(returns, {"a": 2}), inputs, output)
    assert '{"a": 2}' in str(caught.value).replace("'", '"')


def test_accepted_changes_keep_what_is_done(inputs, output):
    """The error's own advice; what was accepted needs no word in the next call."""
    run(copy, inputs, output)
    assert run(nothing, inputs, output, accept_changes=True).resumed == 6
    assert run(nothing, inputs, output).resumed == 6
    with pytest.raises(OptionError, match=r"accept_changes=True keeps .* and redo='\*'"):
        run(copy, inputs, output, accept_changes=True, redo="*")


def test_a_version_accepts_changes_while_it_stays_the_same(inputs, output, caplog):
    """Only then: beside none it is an error, and beside another one everything is redone."""
    run(copy, inputs, output)
    with pytest.raises(ChangedError, match=r"no version to compare with version='7'"):
        run(nothing, inputs, output, version="7")
    assert run(copy, inputs, output, version="7").resumed == 6
    assert "what is done was made without a version; it has '7' now" in caplog.text
    assert run(nothing, inputs, output, version="7").resumed == 6
    assert run(copy, inputs, output, version="8", accept_changes=True).resumed == 6
    assert run(nothing, inputs, output, version="8").resumed == 6
    assert run(nothing, inputs, output, version="7").resumed == 0


def test_impossible_settings_are_refused_before_anything_is_made(inputs, output):
    """No folder, no ledger."""
    with pytest.raises(OptionError, match="num_workers=-1"):
        run(copy, inputs, output, num_workers=-1)
    with pytest.raises(OptionError, match="timeout"):
        run(copy, inputs, output, timeout=1.0, num_workers=0)
    assert not output.exists()


def test_a_report_survives_a_working_directory(inputs, tmp_path, monkeypatch):
    """A relative output is meant from where the call was made."""
    monkeypatch.chdir(tmp_path)
    report = run(copy, "in", "out")
    os.chdir(tmp_path.parent)
    assert report.metadata.num_rows == 6
    assert json.loads(json.dumps(report.metadata["source"].to_pylist()))[0] == "in/0000.txt"


def test_retrying_a_run_that_did_not_begin_says_what_to_call(tmp_path):
    """Its inputs were refused, so the ledger is empty."""
    with pytest.raises(InputError, match="listed twice"):
        run(copy_under_its_name, ["a", "a"], tmp_path / "out")
    with pytest.raises(LedgerError, match=r"before its first input(.|\n)*preprocess again"):
        retry(copy_under_its_name, tmp_path / "out", progress=False)


def test_retrying_with_changed_code_keeps_what_is_done(tmp_path):
    """Once the change is accepted; the fixed code works on the failures alone."""
    (tmp_path / "in").mkdir()
    for name in ("good", "bad"):
        (tmp_path / "in" / name).write_text(name)
    run(fails_if_bad, tmp_path / "in", tmp_path / "out", version="1")
    with pytest.raises(ChangedError, match="accept_changes=True"):
        retry(copy_under_its_name, tmp_path / "out", progress=False)
    done = (tmp_path / "out" / "good").stat()
    report = retry(copy_under_its_name, tmp_path / "out", accept_changes=True, progress=False)
    assert (report.done, report.failed) == (2, 0)
    assert (tmp_path / "out" / "good").stat() == done


def fails_if_bad(source, out):
    if source.name == "bad":
        raise ValueError("bad")
    out.file(source.name).write_text("x")


def copy_under_its_name(source, out):
    out.file(source.name).write_text("x")


def test_numbers_of_numpy_are_numbers(inputs, output):
    """Each entry point takes them for its settings, and records them as what they are."""
    options = {"num_workers": np.int64(1), "timeout": np.float32(50), "retries": np.uint8(0)}
    report = run(row_alone, inputs, output, max_failures=np.float32(0.5), **options)
    assert report.done == 6
    recorded = json.loads(snapshot_of(output).meta["settings"])
    assert recorded == {"num_workers": 1, "timeout": 50.0, "retries": 0, "max_failures": 0.5}
    loader = forebay.DataLoader([1, 2, 3], np.int64(2), seed=np.int64(3), timeout=np.float32(0))
    assert [len(batch) for batch in loader] == [2, 1]
    assert type(loader.seed) is int
    buffer = forebay.Buffer(np.int64(10**6), max_batches=np.int64(3), refill_below=np.int64(2))
    assert type(buffer.refill_below) is int
    assert forebay.AutoWorkers(max=np.int64(3)) == 3
    assert forebay.Ray(num_cpus=np.float32(1), max_workers=np.int64(2)).max_workers == 2
    with pytest.raises(OptionError, match="retries="):
        run(row_alone, inputs, output, retries=np.bool_(True))


@pytest.mark.slow
def test_a_folder_whose_run_is_not_finished_says_so(inputs, output, tmp_path):
    """Instead of that there is no table: whether it runs, how far it is, and what to do."""

    def look(source, out):
        with pytest.raises(InputError) as caught:
            forebay.from_table(output)
        (tmp_path / "said").write_text(str(caught.value))
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        run(look, inputs, output, num_workers=1, max_failures=0)
    said = (tmp_path / "said").read_text()
    assert "holds no metadata table yet: its run writes it at its end\n  The run: " in said
    assert f"forebay status {output}" in said
    with pytest.raises(InputError, match=r"0 of 6 inputs done, and not finished. The same call"):
        forebay.from_table(output)


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_table_that_is_not_of_the_last_run_is_read_with_a_warning(inputs, tmp_path, is_remote):
    """By from_table and as inputs; the run says how far it is. Once it is finished: nothing."""
    output = "memory://stale/out" if is_remote else tmp_path / "out"
    run(row_alone, inputs, output)
    assert len(forebay.from_table(output)) == 6
    with pytest.raises(ZeroDivisionError):
        run(fails, inputs, output, redo="*", max_failures=0)
    words = r"metadata.parquet in .* earlier run: .*\n  The run: 0 of 6 inputs done, and not finis"
    with pytest.warns(UserWarning, match=words) as caught:
        assert len(forebay.from_table(output)) == 6
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=words):
        run(row_alone, output, tmp_path / "next")
    run(row_alone, inputs, output, accept_changes=True)
    assert len(forebay.from_table(output)) == 6
    (inputs / "more.txt").touch()
    run(row_alone, inputs, output, metadata="csv")
    if not is_remote:
        with pytest.warns(UserWarning, match=r"the run since then wrote metadata.csv"):
            forebay.from_table(output / "metadata.parquet")


def fails(source):
    return {"n": 1 / 0}
