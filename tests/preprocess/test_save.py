"""One Dataset for preprocessing, training and prediction: `save` writes what a sample becomes."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from driving import WORKS, call, make_inputs
from torch.utils import data
from works import Letters, letters, save_letter

import forebay
from forebay.runs.preprocess import retry

QUIET = {"num_workers": 0, "progress": False}


def size_of(path):
    """Load a file as a tensor of its size."""
    return torch.tensor([float(path.stat().st_size)])


def save(sample, out, suffix=".pt"):
    """Write a sample under the name of its file."""
    path = out.file(Path(out.source).stem + suffix)
    torch.save(sample, path)
    return {"size": int(sample)}


def name(sample, out):
    """Write nothing."""
    return {"name": out.source}


class Named:
    """A Dataset whose samples have the given names."""

    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return index

    def source_of(self, index):
        return self.names[index]


@pytest.fixture
def folder(tmp_path):
    return make_inputs(tmp_path / "in", 3)


def files_in(output):
    return sorted(path.name for path in output.glob("[!.]*"))


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_one_dataset_serves_all_three_jobs(folder, tmp_path, num_workers):
    """Its files are published, and the table names what each was made of."""
    options = {"num_workers": num_workers, "progress": False}
    dataset = forebay.from_folder(folder, size_of)
    report = forebay.preprocess(dataset, output=tmp_path / "out", save=save, **options)
    paths = sorted(map(str, folder.iterdir()))
    assert report.metadata.to_pylist() == [
        {"source": path, "destination": f"{Path(path).stem}.pt", "size": 12} for path in paths
    ]
    for sample in forebay.from_table(tmp_path / "out", lambda row: torch.load(row["destination"])):
        assert sample.tolist() == [12.0]
    with forebay.DataLoader(dataset, batch_size=3, num_workers=num_workers) as loader:
        assert [batch.tolist() for batch in loader] == [[[12.0]] * 3]
    forebay.predict(lambda batch: batch[:, 0], dataset, tmp_path / "p", **options)
    assert pq.read_table(tmp_path / "p")["prediction"].to_pylist() == [12.0] * 3


def test_a_changed_file_costs_its_sample(folder, tmp_path):
    """The same call again does nothing else, and the old output is replaced."""
    output = tmp_path / "out"
    dataset = forebay.from_folder(folder, size_of)
    forebay.preprocess(dataset, output=output, save=save, **QUIET)
    (folder / "0001.txt").write_text("changed")
    report = forebay.preprocess(dataset, output=output, save=save, **QUIET)
    assert (report.done, report.resumed) == (3, 2)
    assert report.metadata["size"].to_pylist() == [12, 7, 12]
    assert torch.load(output / "0001.pt").tolist() == [7.0]


def test_a_changed_save_is_noticed(folder, tmp_path):
    """Its code, its arguments, and that it is there at all."""
    output = tmp_path / "out"
    dataset = forebay.from_folder(folder, size_of)
    forebay.preprocess(dataset, output=output, save=save, **QUIET)
    for other in (functools.partial(save, suffix=".bin"), name, None):
        with pytest.raises(forebay.ChangedError):
            forebay.preprocess(dataset, output=output, save=other, **QUIET)
    report = forebay.preprocess(dataset, output=output, save=save, **QUIET)
    assert report.resumed == 3
    other = functools.partial(save, suffix=".bin")
    with pytest.raises(forebay.ChangedError, match=r"save\.suffix: .* -> \"\.bin\""):
        forebay.preprocess(dataset, output=output, save=other, **QUIET)
    forebay.preprocess(dataset, output=output, save=other, redo="*", **QUIET)
    assert files_in(output) == ["0000.bin", "0001.bin", "0002.bin", "metadata.parquet"]


def test_a_sample_of_another_name_is_another_input(tmp_path):
    """With a version, too, samples that moved are not taken for each other, nor made again."""
    options = {"save": name, "version": "1", **QUIET}
    forebay.preprocess(Named(["a", "b", "c"]), output=tmp_path, **options)
    report = forebay.preprocess(Named(["a", "x", "b", "c"]), output=tmp_path, **options)
    assert (report.done, report.resumed) == (4, 3)
    assert report.metadata.to_pylist() == [
        {"source": each, "destination": None, "name": each} for each in ("a", "x", "b", "c")
    ]


def test_equal_names_are_several_inputs(tmp_path):
    """A Dataset may hold an item twice."""
    ids = forebay.from_ids([7, "x", 7, ("a", 1)], str)
    report = forebay.preprocess(ids, output=tmp_path, save=name, **QUIET)
    assert report.metadata["name"].to_pylist() == ["7", "x", "7", "('a', 1)"]
    assert report.metadata["source"].to_pylist() == ["7", "x", "7", "('a', 1)"]


def test_the_source_of_a_row_is_the_path_that_it_names(folder, tmp_path):
    """The absolute path of a destination; the index if there is no path."""
    forebay.preprocess(
        forebay.from_folder(folder, size_of), output=tmp_path / "1", save=save, **QUIET
    )
    dataset = forebay.from_table(tmp_path / "1")
    assert dataset.source_of(-1) == str(tmp_path / "1" / "0002.pt")
    dataset = forebay.from_table([{"n": 5}, {"n": 6, "path": "p"}, {"file": "f", "path": ""}])
    assert [dataset.source_of(index) for index in (0, 1, 2, -3)] == ["0", "p", "f", "0"]
    with pytest.raises(IndexError):
        dataset.source_of(3)


def test_a_part_of_a_dataset_has_its_names(tmp_path):
    """As does a concatenation; samples without names have their index in all parts together."""
    letters, digits = forebay.from_ids(["a", "b", "c"], str), forebay.from_ids([7, 8, 9], str)
    subset = data.Subset(letters, np.array([2, 0]))
    unnamed = data.Subset(data.StackDataset([1, 2]), [1])
    mixture = forebay.mix({"odd": (digits, 0.5), "subset": (data.Subset(subset, [1, 1]), 0.5)})
    wrapped = {
        data.ConcatDataset([subset, unnamed, digits]): ["c", "a", "4", "7", "8", "9"],
        mixture: ["7", "8", "9", "a", "a"],
        unnamed: [1],
    }
    for place, (dataset, names) in enumerate(wrapped.items()):
        report = forebay.preprocess(dataset, output=tmp_path / str(place), save=name, **QUIET)
        assert report.metadata["source"].to_pylist() == names
        assert report.metadata["name"].to_pylist() == [str(each) for each in names]


@pytest.mark.parametrize("save", [None, name])
def test_a_dataset_without_names_has_its_indices(tmp_path, save):
    """As numbers in the table, and as strings in `out`."""
    dataset = torch.utils.data.StackDataset(x=[10, 20])
    report = forebay.preprocess(dataset, output=tmp_path, save=save, **QUIET)
    assert report.metadata["source"].to_pylist() == [0, 1]
    if save is None:
        assert report.metadata["x"].to_pylist() == [10, 20]
    else:
        assert report.metadata["name"].to_pylist() == ["0", "1"]


def test_failures_are_called_by_name_and_tried_again(tmp_path, monkeypatch):
    """By the same call, and by retry, which needs the same save."""
    monkeypatch.setenv("WORK_REFUSES", "1 2")
    report = forebay.preprocess(letters, output=tmp_path, save=save_letter, **QUIET)
    assert [each.source for each in report.failures] == ["letter b", "letter c"]
    monkeypatch.setenv("WORK_REFUSES", "2")
    report = forebay.preprocess(letters, output=tmp_path, save=save_letter, **QUIET)
    assert (report.done, report.failed) == (2, 1)
    monkeypatch.setenv("WORK_REFUSES", "")
    with pytest.raises(forebay.ChangedError):
        retry(letters, tmp_path, **QUIET)
    report = retry(letters, tmp_path, save=save_letter, **QUIET)
    assert report.failed == 0
    expected = [f"letter/{letter}.txt" for letter in "abc"]
    assert report.metadata["destination"].to_pylist() == expected


@pytest.mark.slow
def test_the_command_line_takes_save(tmp_path):
    """In preprocess and in retry."""
    work, saving = f"{WORKS}:letters", ("--save", f"{WORKS}:save_letter", "--quiet")
    code, _, _ = call("preprocess", work, tmp_path / "out", *saving, WORK_REFUSES="1")
    assert code == 3
    code, out, err = call("retry", tmp_path / "out", work, *saving)
    assert (code, err) == (0, ""), (out, err)
    assert (tmp_path / "out" / "letter" / "b.txt").read_text() == "bb"


BAD_SAVES = {
    "not callable": ("x", "save must be a function(sample, out); got str"),
    "one parameter": (lambda sample: None, "Give it two parameters: the sample and the output"),
}


@pytest.mark.parametrize(("save", "message"), BAD_SAVES.values(), ids=BAD_SAVES)
def test_a_save_that_cannot_be_called_is_an_error_at_once(tmp_path, save, message):
    """Nothing is made."""
    with pytest.raises(forebay.OptionError) as caught:
        forebay.preprocess(Letters(), output=tmp_path / "out", save=save, **QUIET)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_save_is_for_datasets(folder, tmp_path):
    """A function writes its own files."""
    with pytest.raises(forebay.OptionError, match="save= writes the samples of a Dataset"):
        forebay.preprocess(name, folder, tmp_path / "out", save=name, **QUIET)


@pytest.mark.parametrize(
    ("given", "message"),
    [(None, r"source_of\(1\): got NoneType"), ("a\udcff", "its name is not UTF-8")],
)
def test_a_name_that_cannot_be_stored_is_an_error(tmp_path, given, message):
    """Before any sample is loaded."""
    with pytest.raises(forebay.InputError, match=message):
        forebay.preprocess(Named(["a", given]), output=tmp_path, **QUIET)
