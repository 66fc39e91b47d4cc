"""Tracebacks show the user's frames; forebay's own only where they explain something."""

from __future__ import annotations

import inspect
import pickle
import re
import traceback
from importlib import import_module

import pytest
import torch

import forebay
from forebay.errors import InputError, OptionError, cut_own_frames, short_tracebacks
from forebay.failures import Failure
from forebay.loading import kinds


def functions(error):
    """Return the names of the functions in a traceback, outermost first."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


class Samples:
    """Eight samples, of which the fifth raises."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("broken")
        return float(index)


def work(source, out):
    raise KeyError("mine")


@pytest.fixture
def inputs(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text("a")
    return tmp_path / "in"


def test_a_bad_argument_shows_the_call_alone(tmp_path, inputs):
    """One frame of forebay's, whatever the entry point had called to find out."""
    calls = {
        "preprocess": lambda: forebay.preprocess(work, inputs, tmp_path / "out", num_workers=-1),
        "predict": lambda: forebay.predict(list, Samples(), tmp_path / "out", batch_size=-1),
        "cache": lambda: forebay.cache(3, tmp_path / "out"),
        "open_cache": lambda: forebay.open_cache(tmp_path / "out"),
        "inputs": lambda: forebay.preprocess(work, tmp_path / "no", tmp_path / "out"),
    }
    for call in calls.values():
        with pytest.raises((OptionError, InputError)) as caught:
            call()
        assert functions(caught.value)[-2:] == ["<lambda>", "call"]
        cause = caught.value.__cause__
        assert cause is None or functions(cause) == []


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_exception_of_the_users_function_shows_the_users_frames(num_workers, tmp_path, inputs):
    """In this process as frames, from a worker as a note."""
    with pytest.raises(KeyError) as caught:
        forebay.preprocess(work, inputs, tmp_path / "out", num_workers=num_workers, max_failures=0)
    if num_workers:
        assert functions(caught.value)[-1] == "call"
        (note, _) = caught.value.__notes__
        assert "in work" in note
        assert "preprocess_job" not in note
    else:
        assert functions(caught.value)[-2:] == ["call", "work"]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_sample_that_raises_shows_the_datasets_frames(num_workers):
    """As torch words it, without what lies between the loop and the dataset."""
    with forebay.DataLoader(Samples(), batch_size=4, num_workers=num_workers) as loader:
        with pytest.raises(ValueError, match="broken") as caught:
            list(loader)
    if num_workers:
        assert functions(caught.value)[-1] == "__next__"
        assert "in __getitem__" in str(caught.value)
        assert "fetch.py" not in str(caught.value)
    else:
        assert functions(caught.value)[-2:] == ["__next__", "__getitem__"]


def test_a_recorded_failure_has_the_users_frames(tmp_path, inputs):
    """What the report and `forebay failures --traceback` show."""
    report = forebay.preprocess(work, inputs, tmp_path / "out", num_workers=0, progress=False)
    (failure,) = report.failures
    assert "in work" in failure.traceback
    assert "src/forebay" not in failure.traceback


def test_the_users_frames_stay_wherever_they_are(tmp_path, inputs):
    """Also between frames of forebay: a function that calls forebay wrongly."""

    def calls_forebay(source, out):
        forebay.cache(3, tmp_path / "cache")

    with pytest.raises(OptionError) as caught:
        forebay.preprocess(calls_forebay, inputs, tmp_path / "out", num_workers=0, max_failures=0)
    assert functions(caught.value)[-2:] == ["call", "calls_forebay"]


def test_an_unexpected_exception_keeps_every_frame(monkeypatch, tmp_path, inputs):
    """It would be a bug of forebay's, and its frames are what a report of it needs."""

    def broken(*_):
        raise TypeError("a bug")

    module = import_module("forebay.runs.preprocess")  # the attribute of that name is the function
    monkeypatch.setattr(module, "call_of", broken)
    with pytest.raises(TypeError) as caught:
        forebay.preprocess(work, inputs, tmp_path / "out")
    assert functions(caught.value)[-4:] == ["call", "preprocess", "listing_for", "broken"]


def test_an_unexpected_exception_in_a_worker_keeps_every_frame():
    """Likewise: its innermost frame is forebay's."""
    with pytest.raises(AttributeError) as caught:
        kinds.check_arguments(None)
    before = functions(caught.value)
    cut_own_frames(caught.value)
    assert functions(caught.value) == before
    assert "in check" in Failure.of(caught.value).traceback


def test_causes_that_go_round_end():
    """An exception may be the cause of its own cause."""

    @short_tracebacks
    def entry():
        first, second = OptionError("first"), ValueError("second")
        first.__cause__, second.__cause__ = second, first
        raise first

    with pytest.raises(OptionError) as caught:
        entry()
    assert functions(caught.value)[-1] == "entry", "a frame of this module is a user's"


def test_an_entry_point_is_still_the_function_that_it_was():
    """Its name, its signature and its pickle."""
    assert forebay.preprocess.__name__ == "preprocess"
    assert "num_workers" in inspect.signature(forebay.preprocess).parameters
    assert pickle.loads(pickle.dumps(forebay.cache)) is forebay.cache


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_cannot_be_stacked_shows_torchs_frames_alone(num_workers):
    """The note names the sample and its field, and what to do."""

    class Rows(Samples):
        def __getitem__(self, index):
            return {"box": torch.ones(2 if index == 6 else 1), "label": None if index == 1 else 1}

    with forebay.DataLoader(Rows(), batch_size=4, num_workers=num_workers) as loader:
        batches = iter(loader)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - torch's, of any type
            next(batches)
        assert "field label is None" in shown(caught.value)
        assert "It is sample 1 of the dataset." in shown(caught.value)
        with pytest.raises(RuntimeError, match="stack expects each tensor") as caught:
            next(batches)
    assert "src/forebay/collating" not in shown(caught.value)
    assert "src/forebay/memory" not in shown(caught.value)
    assert "field box is a tensor of shape (2,)" in shown(caught.value)
    assert "It is sample 6 of the dataset." in shown(caught.value)
    assert "box=pad()" in shown(caught.value)


def shown(error):
    """Return an error as Python prints it."""
    return "".join(traceback.format_exception(error))


ENTRIES = {
    forebay.DataLoader: ("buffr", "buffer"),
    forebay.preprocess: ("num_worker", "num_workers"),
    forebay.cache: ("num_worker", "num_workers"),
    forebay.predict: ("bach_size", "batch_size"),
    forebay.from_folder: ("patern", "pattern"),
    forebay.from_table: ("colums", "columns"),
    forebay.open_cache: ("windo", "window"),
}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_a_misspelt_argument_of_an_entry_point_is_named_with_the_right_one(entry):
    """In the words of Python 3.13."""
    wrong, right = ENTRIES[entry]
    words = f"unexpected keyword argument '{wrong}'. Did you mean '{right}'"
    with pytest.raises(TypeError, match=re.escape(words)):
        entry([1], **{wrong: 1})
