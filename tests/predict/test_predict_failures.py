"""A sample that fails costs its own row and no other; memory that runs out costs none."""

from __future__ import annotations

import logging
import os

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from models import Numbers, total

import forebay
from forebay.errors import MAX_TEXT
from forebay.runs import processing

# On Python 3.12 and newer, a fork beside threads is warned of.
pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def predicted(model, data, output, **options):
    """Predict quietly, and return the report and the samples that have a row."""
    options = {"num_workers": 0, "batch_size": 8, "part_size": 30, "progress": False} | options
    report = forebay.predict(model, data, output, **options)
    return report, pq.read_table(output)["index"].to_pylist()


def without(count, *bad):
    return [index for index in range(count) if index not in bad]


def picky(batch):
    """Fail on 17 and on 40."""
    if ((batch[:, 0] == 17) | (batch[:, 0] == 40)).any():
        raise ValueError("I do not like it")
    return batch.sum(1)


def test_a_failing_batch_costs_one_sample(tmp_path):
    """The sample is found by halving, left out and recorded, also for the next run."""
    report, rows = predicted(picky, Numbers(60), tmp_path)
    assert rows == without(60, 17, 40)
    assert (report.done, report.failed) == (58, 2)
    assert [(one.index, one.error, one.message) for one in report.failures] == [
        (17, "ValueError", "I do not like it"),
        (40, "ValueError", "I do not like it"),
    ]
    assert "in picky" in report.failures[0].traceback
    again, rows = predicted(picky, Numbers(60), tmp_path)
    assert again.failures == report.failures
    assert (again.resumed, rows) == (60, without(60, 17, 40))
    assert "sample 17: ValueError: I do not like it" in repr(again)


def test_samples_that_fail_are_the_limit_if_most_time_goes_into_their_batches(tmp_path):
    """The verdict says so, and not that the model is; without failures it does not."""
    report, _ = predicted(total, Numbers(60), tmp_path / "well", batch_size=2)
    assert "Samples that fail" not in str(report.diagnosis)

    def fails_on_tens(batch):
        if (batch[:, 0] % 10 == 7).any():
            raise ValueError("bad")
        return batch.sum(1)

    report, _ = predicted(fails_on_tens, Numbers(600), tmp_path / "bad", batch_size=20)
    assert report.failed == 60
    assert str(report.diagnosis).startswith("Samples that fail are the limit: 100% of the model's")
    assert (report.diagnosis.cause, report.diagnosis.advice) == ("consumer", {})


PAIRS = [(torch.ones(4), k) for k in range(20)]


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (PAIRS, r"list of 2: a tensor of .*(.|\n)*choose it: collate_fn=lambda samples: torch\.st"),
        (["text"] * 20, r"called with a list of 1: a str(.|\n)*Strings stay a list of strings"),
        ([{"x": x} for x, _ in PAIRS], r"a dict with 'x': 'x': a tensor(.|\n)*is not unpacked"),
        ([np.array(["a", None])] * 20, r"every sample is an array of shape \(2,\), object"),
    ],
    ids=["pairs", "strings", "dicts", "objects"],
)
def test_a_model_that_takes_another_batch_is_told_what_a_batch_is(tmp_path, samples, words):
    """And what to change; what is advised for (x, y) works."""
    model = torch.nn.Linear(4, 2)
    with pytest.raises(forebay.FailuresError, match=words):
        predicted(model, samples, tmp_path)
    if samples is PAIRS:
        first = {"collate_fn": lambda samples: torch.stack([x for x, *_ in samples])}
        assert predicted(model, samples, tmp_path / "first", **first)[0].done == 20


def test_a_part_without_a_row_has_no_file(tmp_path):
    """The folder is still one dataset."""
    report, rows = predicted(total, Numbers(15, range(5, 10)), tmp_path, part_size=5)
    assert rows == without(15, *range(5, 10))
    assert len(list(tmp_path.glob("part-*"))) == 2
    assert predicted(total, Numbers(15, range(5, 10)), tmp_path, part_size=5)[0].resumed == 15
    assert report.failed == 5


def test_a_batch_that_cannot_be_cut_is_loaded_again(tmp_path):
    """A collate function may make anything; the sample is found all the same."""

    class Anything:
        def __init__(self, rows):
            self.rows = torch.stack(rows)

    _, rows = predicted(lambda batch: picky(batch.rows), Numbers(60), tmp_path, collate_fn=Anything)
    assert rows == without(60, 17, 40)


class Named(Numbers):
    """Samples with a label, for models that change their batch."""

    def __getitem__(self, index):
        return {"x": super().__getitem__(index), "label": index}


def doubles(batch):
    return batch["x"].mul_(2), batch["label"]


def doubles_arrays(batch):
    numbers = batch["x"]
    numbers *= 2
    return torch.from_numpy(numbers), batch["label"]


def takes_out(batch):
    return batch["x"] * 2, batch.pop("label")


def arrays(samples):
    numbers = np.stack([one["x"].numpy() for one in samples])
    return {"x": numbers, "label": [one["label"] for one in samples]}


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError])
@pytest.mark.parametrize(
    ("change", "collate_fn"),
    [(doubles, None), (takes_out, None), (doubles_arrays, arrays)],
    ids=["in place", "container", "arrays in place"],
)
@pytest.mark.parametrize("inference", [False, True])
def test_a_batch_that_the_model_changed_is_loaded_again(
    tmp_path, change, collate_fn, error, inference
):
    """Its halves hold other values than the samples, or lack a field."""

    def model(batch):
        doubled, _ = change(batch)
        if (doubled == 2 * 17).any():
            raise error("no")
        return doubled.clone()

    with torch.inference_mode(inference):
        _, rows = predicted(model, Named(24), tmp_path, collate_fn=collate_fn)
    assert rows == without(24, 17)
    found = pq.read_table(tmp_path)["prediction"].to_pylist()
    assert found == [[2.0 * index] * 4 for index in rows]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failure_to_collate_names_no_loader(tmp_path, workers):
    """A caller of predict has none, so nothing says how to make its batch again."""

    def picky(samples):
        if any(sample[0] == 5 for sample in samples):
            raise ValueError("five")
        return torch.stack(samples)

    report, _ = predicted(torch.abs, Numbers(8), tmp_path, collate_fn=picky, num_workers=workers)
    (failure,) = report.failures
    assert failure.index == 5 and "five" in failure.traceback
    assert "loader." not in failure.traceback and "epoch" not in failure.traceback


def test_a_batch_that_contains_itself_is_predicted(tmp_path):
    """What a collate function makes is the model's; a sample that fails is found all the same."""

    def looped(samples):
        batch = {"x": torch.stack(samples)}
        batch["again"] = batch
        return batch

    def model(batch):
        if (batch["x"][:, 0] == 5).any():
            raise ValueError("five")
        return batch["x"]

    report, rows = predicted(model, Numbers(8), tmp_path, collate_fn=looped)
    assert (report.failed, rows) == (1, without(8, 5))


def test_samples_that_do_not_fit_one_batch_are_predicted_apart(tmp_path):
    """A collate function that fails is tried on halves, and no sample is lost."""

    class Ragged(Numbers):
        def __getitem__(self, index):
            return torch.ones(2 if index == 5 else 3)

    report, rows = predicted(lambda batch: batch[:, 0], Ragged(20), tmp_path)
    assert (report.failed, rows) == (0, list(range(20)))


def test_memory_that_runs_out_halves_the_batch_for_the_rest(tmp_path, caplog):
    """The size that fits is found once, and logged; no sample is lost."""
    sizes = []

    def model(batch):
        sizes.append(len(batch))
        if len(batch) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return batch.sum(1)

    with caplog.at_level(logging.INFO, "forebay"):
        report, rows = predicted(model, Numbers(40), tmp_path, part_size=40)
    assert (report.failed, rows) == (0, list(range(40)))
    found = [text for text in caplog.messages if "memory ran out" in text]
    assert found[-1].endswith("with a batch of 4 samples: from now on they have at most 2")
    assert sizes[:4] == [8, 4, 2, 2]
    assert set(sizes[2:]) == {2}


def test_a_sample_too_large_for_the_memory_is_its_own_failure(tmp_path):
    """At one sample there is nothing left to halve."""

    def model(batch):
        if (batch == 5).any():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch.sum(1)

    report, rows = predicted(model, Numbers(20), tmp_path)
    assert rows == without(20, 5)
    assert [(one.index, one.error) for one in report.failures] == [(5, "OutOfMemoryError")]


def test_a_model_that_always_fails_ends_the_run_early(tmp_path):
    """It is not the samples: the error is shown, and nothing is kept."""

    def model(_):
        raise TypeError("missing 1 required positional argument")

    with pytest.raises(forebay.FailuresError, match=r"first 20 samples all failed alike") as caught:
        predicted(model, Numbers(100), tmp_path)
    assert "missing 1 required positional argument" in str(caught.value)
    assert not list(tmp_path.glob("part-*"))


# ---- odd exceptions -----------------------------------------------------------------------------


class MuteError(Exception):
    """An exception that cannot be shown."""

    def __str__(self):
        raise LookupError("no message")


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_exception_without_a_message_costs_its_sample(tmp_path, num_workers):
    """From the dataset and from the model."""

    class Mute(Numbers):
        def __getitem__(self, index):
            if index == 5:
                raise MuteError
            return super().__getitem__(index)

    def model(batch):
        if (batch[:, 0] == 17).any():
            raise MuteError
        return batch.sum(1)

    report, rows = predicted(model, Mute(60), tmp_path, num_workers=num_workers)
    assert rows == without(60, 5, 17)
    assert [(one.index, one.error) for one in report.failures] == [
        (5, "MuteError"),
        (17, "MuteError"),
    ]
    assert "MuteError: <its __str__ raised LookupError>" in repr(report)


def test_of_long_messages_the_ends_are_kept(tmp_path):
    """They are in the record of their part, which may have thousands."""

    class Wordy(Numbers):
        def __getitem__(self, index):
            if index == 19:
                return super().__getitem__(index)
            raise ValueError(f"{index} " + "x" * 10**6 + " end")

    report, _ = predicted(total, Wordy(20), tmp_path, batch_size=20)
    assert report.failed == 19
    for index, failure in enumerate(report.failures):
        assert failure.message.startswith(f"{index} ") and failure.message.endswith(" end")
        assert len(failure.message) + len(failure.traceback) < 3 * MAX_TEXT


# ---- a cause that is not the samples ------------------------------------------------------------


def test_small_parts_do_not_hide_that_all_samples_fail(tmp_path):
    """The failures of one part after the other count; once it is mended, all are predicted."""
    broken = [True]
    tried = []

    def model(batch):
        tried.extend(batch[:, 0].int().tolist())
        if broken:
            raise TypeError("missing 1 required positional argument")
        return batch.sum(1)

    options = {"part_size": 3, "batch_size": 3, "version": "1"}
    with pytest.raises(forebay.FailuresError, match=r"first 20 samples all failed alike"):
        predicted(model, Numbers(90), tmp_path, **options)
    assert max(tried) < 30
    broken.clear()
    report, rows = predicted(model, Numbers(90), tmp_path, **options)
    assert (report.done, report.failed, rows) == (90, 0, without(90))


class Useless:
    """A model that is made in each worker, and fails for every sample until it is mended."""

    def __call__(self, batch):
        if not os.path.exists(os.environ["MENDED"]):
            raise TypeError("missing 1 required positional argument")
        return batch.sum(1)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_workers_with_models_of_their_own_stop_as_well(tmp_path, num_workers, monkeypatch):
    """Nothing is recorded as failed that was not the samples' fault."""
    monkeypatch.setenv("MENDED", str(tmp_path / "mended"))
    options = {"part_size": 3, "batch_size": 3, "num_workers": num_workers}
    with pytest.raises(forebay.FailuresError, match=r"first 20 samples all failed alike"):
        predicted(Useless, Numbers(300), tmp_path / "out", **options)
    (tmp_path / "mended").touch()
    report, rows = predicted(Useless, Numbers(300), tmp_path / "out", **options)
    assert (report.done, report.failed, rows) == (300, 0, without(300))


@pytest.mark.slow
def test_a_part_may_take_the_timeout_of_each_of_its_batches(tmp_path, monkeypatch):
    """Of a part as large as those of the run that is continued, whatever the size in the call."""
    monkeypatch.setenv("MENDED", str(tmp_path / "mended"))
    real, given = processing.Limits, []
    monkeypatch.setattr(processing, "Limits", lambda **each: given.append(each) or real(**each))
    options = {"batch_size": 3, "num_workers": 1, "timeout": 50}
    with pytest.raises(forebay.FailuresError, match=r"first 20 samples all failed alike"):
        predicted(Useless, Numbers(60), tmp_path / "out", part_size=30, **options)
    (tmp_path / "mended").touch()
    report, _ = predicted(Useless, Numbers(60), tmp_path / "out", part_size=3, **options)
    assert report.done == 60
    assert [each["timeout_s"] for each in given] == [500, 500]


def test_parts_with_predictions_are_kept_when_a_run_stops(tmp_path):
    """Some samples fail, which is recorded; the first ones that fail are no reason to stop."""
    bad = range(5, 60)
    report, rows = predicted(total, Numbers(90, bad), tmp_path, part_size=5, batch_size=5)
    assert rows == without(90, *bad)
    assert report.failed == 55
    assert predicted(total, Numbers(90, bad), tmp_path, part_size=5, batch_size=5)[0].resumed == 90


# ---- tables that are damaged --------------------------------------------------------------------


def sample_of(row):
    return torch.full((4,), float(row["x"]))


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("t.csv", b"x,y\n1,2\n3\n", r"t\.csv, line 3: 1 field where the header has 2"),
        ("t.csv", b"x,y\n1,2\n3,\xff\n", r"t\.csv, line 3: byte .* is not UTF-8"),
        ("t.jsonl", b'{"x": 1}\n{"x"', r"t\.jsonl, line 2: not JSON"),
        ("t.parquet", b"PAR1" + bytes(100), r"t\.parquet.* cannot read it"),
    ],
    ids=["fields", "bytes", "JSON", "parquet"],
)
def test_a_torn_table_is_named_with_its_line(tmp_path, name, body, words):
    """Before anything starts."""
    (tmp_path / name).write_bytes(body)
    with pytest.raises(forebay.InputError, match=words):
        predicted(total, tmp_path / name, tmp_path / "out", load=sample_of)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "body"),
    [("t.csv", "x\n1\n\n2\n\n"), ("t.jsonl", '{"x": 1}\n\n{"x": 2}\n')],
    ids=["CSV", "JSONL"],
)
def test_blank_lines_are_no_samples(tmp_path, name, body):
    """As in a manifest."""
    (tmp_path / name).write_text(body)
    report, rows = predicted(total, tmp_path / name, tmp_path / "out", load=sample_of)
    assert (report.done, rows) == (2, [0, 1])


class Mended(Numbers):
    """Some samples fail until the environment, also that of workers, says otherwise."""

    def __getitem__(self, index):
        if str(index) in os.environ.get("STILL_BAD", "7 31 32").split():
            raise ValueError(f"no sample {index}")
        return super().__getitem__(index)


def test_a_retry_that_goes_wrong_loses_no_prediction(tmp_path, monkeypatch):
    """A part stays until its new file takes its place."""
    predicted(total, Mended(60), tmp_path, part_size=10)

    def broken(self, index):
        raise KeyboardInterrupt

    monkeypatch.setattr(Mended, "__getitem__", broken)
    with pytest.raises(KeyboardInterrupt):
        predicted(total, Mended(60), tmp_path, part_size=10, redo="failed", accept_changes=True)
    assert pq.read_table(tmp_path)["index"].to_pylist() == without(60, 7, 31, 32)


@pytest.mark.parametrize("verb", ["predict", "cache"])
def test_redo_names_no_samples(tmp_path, verb):
    """All are made again, or of predictions those that failed."""
    call = {
        "predict": lambda **options: predicted(total, Mended(60), tmp_path, **options),
        "cache": lambda **options: forebay.cache(Mended(60), tmp_path, num_workers=0, **options),
    }[verb]
    allowed = {"predict": r"'\*' or 'failed' or None", "cache": r"'\*' or None"}[verb]
    with pytest.raises(forebay.OptionError, match=f"redo='7' .* {allowed}"):
        call(redo="7")
    assert not [*tmp_path.iterdir()]


def test_a_part_that_fails_is_called_by_its_samples(tmp_path):
    """In words, and with one statement about what is kept."""

    class Failing:
        def __call__(self, batch):
            raise TypeError("missing 1 required positional argument")

    with pytest.raises(forebay.FailuresError) as caught:
        predicted(Failing, Numbers(60), tmp_path)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert "the input was samples 0 to 29, number 1" in text
    assert '"first"' not in text and "Nothing was kept" not in text


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_factory", [False, True])
def test_tuples_for_a_model_of_one_argument_are_said_once(tmp_path, workers, is_factory):
    """However few samples there are: a TensorDataset's batches are lists."""
    data = torch.utils.data.TensorDataset(torch.ones(10, 4), torch.ones(10))
    model = torch.nn.Linear(4, 2)
    given = (lambda: model) if is_factory else model
    words = r"the first 3 samples all failed alike, with TypeError.*not list(.|\n)*collate_fn="
    with pytest.raises(forebay.FailuresError, match=words):
        forebay.predict(given, data, tmp_path, num_workers=workers, progress=False)
    taken = lambda batch: model(batch[0])  # noqa: E731
    report = forebay.predict(taken, data, tmp_path, num_workers=0, redo="*", progress=False)
    assert (report.done, report.failed) == (10, 0)
