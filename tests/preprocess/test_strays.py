"""Files that are written into the output folder directly, and a Dataset that writes its files."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from driving import make_inputs, published
from torch.utils.data import Dataset

import forebay
from forebay.outputs import folder as folder_module


class Direct:
    """A function that writes one file with `out` and two without."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, source, out):
        out.file(f"{source.stem}.out").write_text("x")
        (self.folder / "direct" / source.name).write_text("x")
        (self.folder / "log.txt").write_text("x")


class Letters(Dataset):
    """Writes a file for each letter of a word, where `preprocess` puts it."""

    words = ("ab", "cde")

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        out = forebay.get_output()
        if out is not None:
            for letter in self.words[index]:
                out.file(f"{index}/{letter}.txt").write_text(letter)
        return {"letters": len(self.words[index]), "is_none": out is None}


def run(work, inputs, output, **options):
    options = {"num_workers": 0, "progress": False, **options}
    return forebay.preprocess(work, inputs, output, **options)


def test_files_written_into_the_output_folder_are_named_with_the_line_to_change(tmp_path):
    """In the report, as text and HTML; those that were there before are not meant."""
    output, inputs = tmp_path / "out", make_inputs(tmp_path / "in", 3)
    (output / "direct").mkdir(parents=True)
    (output / "before.txt").write_text("x")
    report = run(Direct(output), inputs, output)
    first = sorted(each.name for each in inputs.iterdir())[0]
    assert report.notes == (
        f"4 files were written to {output} without out.file(), such as 'direct/{first}'\n"
        "  A kill leaves such a file incomplete, nothing removes it when its input changes, and "
        "`forebay verify` counts it as an orphan.\n"
        f"  In Direct, write to out.file('direct/{first}') instead of "
        f"'{output}/direct/{first}', and remove what is there.",
    )
    assert f"\nnote      {report.notes[0]}" in repr(report)
    page = report.save(tmp_path / "report.html").read_text()
    assert "without out.file()" in page
    assert pickle.loads(pickle.dumps(report)).notes == report.notes
    assert run(Direct(output), inputs, output).notes == (), "nothing was processed"


def test_only_some_files_of_a_large_folder_are_looked_at(tmp_path, monkeypatch):
    """A run takes no longer because there are millions."""
    monkeypatch.setattr(folder_module, "MOST_LOOKED_AT", 3)
    output, inputs = tmp_path / "out", make_inputs(tmp_path / "in", 5)

    def work(source, out):
        (output / source.name).write_text("x")

    (note,) = run(work, inputs, output).notes
    assert note.startswith(("2 files were written", "3 files were written"))  # the table is a file


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"num_workers": 2, "backend": "thread"}]
)
def test_a_dataset_writes_the_files_of_its_samples(tmp_path, options):
    """Each appears with its sample, and is known to the ledger."""
    output = tmp_path / "out"
    report = run(Letters(), None, output, **options)
    assert (report.done, report.notes) == (2, ())
    assert {name: (output / name).read_text() for name in published(output)} == {
        f"{index}/{letter}.txt": letter
        for index, letters in enumerate(Letters.words)
        for letter in letters
    }
    assert report.metadata.column("is_none").to_pylist() == [False, False]


def test_elsewhere_a_dataset_has_no_output(tmp_path):
    """Neither in a loader, nor in a cache, whose files are shards."""
    assert forebay.get_output() is None
    assert Letters()[0]["is_none"]
    (batch,) = forebay.DataLoader(Letters(), batch_size=2, num_workers=1)
    assert batch["is_none"].tolist() == [True, True]
    cached = forebay.cache(Letters(), tmp_path / "cache", num_workers=0, progress=False)
    assert [sample["is_none"] for sample in cached] == [True, True]


def test_the_note_of_a_dataset_names_the_function_to_call(tmp_path):
    """Its `__getitem__` is not called with `out`."""

    class Writes(Letters):
        def __getitem__(self, index):
            Path(tmp_path, "out", "x.txt").write_text("x")

    (note,) = run(Writes(), None, tmp_path / "out").notes
    where = "test_the_note_of_a_dataset_names_the_function_to_call.<locals>.Writes.__getitem__"
    assert f"In {where}, write to forebay.get_output().file('x.txt')" in note
