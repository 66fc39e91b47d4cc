"""An input may be a folder: a series of images, the frames of a clip, a store of chunks."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import forebay
from forebay.errors import InputError


def run(work, inputs, output, **options):
    options = {"num_workers": 0, "progress": False, **options}
    return forebay.preprocess(work, inputs, output, **options)


@pytest.fixture
def patients(tmp_path, monkeypatch):
    """Three folders of files, also hidden ones and below others, and a file beside them."""
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        for name in (f"{number}.dcm", ".header", "more/b.dcm"):
            path = tmp_path / "pat" / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{number} {name}")
    (tmp_path / "pat" / "notes.txt").write_text("notes")
    return tmp_path / "pat"


def to_volume(folder, out):
    """Make one file of a folder."""
    folder = Path(folder)
    assert folder.is_dir()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    (out / f"{folder.name}.nii").write_text("|".join(path.read_text() for path in files))
    return {"files": len(files)}


def in_a_list(folder):
    return [f"pat/{number}" for number in range(3)]


def by_a_glob(folder):
    return "pat/*/"


def in_a_manifest(folder):
    rows = [json.dumps({"path": str(folder / str(number)), "label": number}) for number in range(3)]
    (folder.parent / "m.jsonl").write_text("\n".join(rows))
    return folder.parent / "m.jsonl"


def in_rows(folder):
    return [{"path": f"pat/{number}"} for number in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("listed", [in_a_list, by_a_glob, in_a_manifest, in_rows])
def test_a_changed_folder_is_processed_again_alone(tmp_path, patients, listed):
    """For a file that is added, changed, hidden, below it, or removed; otherwise nothing is."""

    def work(given, out):
        listed = given["path"] if isinstance(given, dict) else given
        return to_volume(patients / os.path.basename(listed), out)

    report = run(work, listed(patients), tmp_path / "out")
    assert (report.done, report.failures) == (3, ())
    assert report.metadata.column("files").to_pylist() == [3, 3, 3]
    assert report.metadata.column("destination").to_pylist() == ["0.nii", "1.nii", "2.nii"]
    assert run(work, listed(patients), tmp_path / "out").resumed == 3
    (patients / "1" / "more" / "deep").mkdir()
    changes = {"new.dcm": "new", "more/deep/c.dcm": "c", ".header": "other", "1.dcm": None}
    for name, text in changes.items():
        path = patients / "1" / name
        path.unlink() if text is None else path.write_text(text)
        report = run(work, listed(patients), tmp_path / "out")
        assert (report.done, report.resumed) == (3, 2)
    assert report.metadata.column("files").to_pylist() == [3, 4, 3]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_folders_are_known_by_their_paths(tmp_path, patients, workers):
    """As written in a list, without the slash that a glob ends with; files beside them are none."""
    report = run(to_volume, "pat/*/", tmp_path / "glob", num_workers=workers)
    assert report.metadata.column("source").to_pylist() == ["pat/0", "pat/1", "pat/2"]
    report = run(to_volume, ["pat/2/", "pat/0"], tmp_path / "list", num_workers=workers)
    assert report.metadata.column("source").to_pylist() == ["pat/2/", "pat/0"]
    assert report.metadata.column("destination").to_pylist() == ["2.nii", "0.nii"]


def test_one_folder_stands_for_its_files(tmp_path, patients):
    """As before; in a list it is an input."""
    assert run(lambda path: {"is": path.is_dir()}, "pat", tmp_path / "files").done == 7 - 3 + 3
    assert run(lambda path: {"is": path.is_dir()}, [Path("pat")], tmp_path / "one").done == 1


def test_samples_may_be_folders(tmp_path, patients):
    """A Dataset whose samples are named by folders is processed again where one changes."""

    class Clips:
        names = ("pat/0", "pat/1")

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return {"frames": len(os.listdir(self.names[index]))}

        def source_of(self, index):
            return self.names[index]

    assert run(Clips(), None, tmp_path / "out").done == 2
    (patients / "1" / "new").write_text("new")
    report = run(Clips(), None, tmp_path / "out")
    assert (report.resumed, report.metadata.column("frames").to_pylist()) == (1, [3, 4])


def test_a_folder_with_the_output_in_it_is_refused(tmp_path, patients):
    """Its outputs would change the input; a glob leaves the output folder out."""
    with pytest.raises(InputError, match="'pat/1' holds the output folder"):
        run(to_volume, ["pat/0", "pat/1"], patients / "1" / "out")
    shutil.rmtree(patients / "1" / "out")
    run(to_volume, ["pat/0"], tmp_path / "all" / "of")
    with pytest.raises(InputError, match="'all/of' lies in the output folder"):
        run(to_volume, ["all/of"], tmp_path / "all")
    run(to_volume, "pat/*/", patients / "out")
    assert run(to_volume, "pat/*/", patients / "out").resumed == 3


def test_a_folder_at_a_url_is_refused_in_words(memory, tmp_path):
    """Alone, beside files that are processed."""
    memory.pipe("/pat/0/a", b"1")
    memory.pipe("/pat/b", b"2")
    report = run(lambda path: {"n": 1}, ["memory://pat/0", "memory://pat/b"], tmp_path / "out")
    assert report.done == 1
    assert "at a URL an input is a file, and this is a folder" in report.failures[0].message


def test_links_in_a_folder_are_followed_once(tmp_path, patients):
    """One that leads back, or nowhere, does not matter."""
    (patients / "0" / "loop").symlink_to(patients / "0")
    (patients / "0" / "broken").symlink_to(patients / "nowhere")
    (patients / "0" / "linked").symlink_to(patients / "1" / "1.dcm")
    (tmp_path / "link").symlink_to(patients / "0")
    inputs = ["pat/0", "link"]
    assert run(lambda path: {"n": 1}, inputs, tmp_path / "out").done == 2
    assert run(lambda path: {"n": 1}, inputs, tmp_path / "out").resumed == 2
    (patients / "1" / "1.dcm").write_text("changed")
    assert run(lambda path: {"n": 1}, inputs, tmp_path / "out").resumed == 0


def test_an_output_in_the_folder_that_is_its_input_does_not_change_it(tmp_path, patients):
    """It is done once; a file of somebody else redoes it, whenever that was added."""

    def write_beside(folder):
        (folder / "result.json").write_text("{}")
        return folder / "result.json", {"files": len([*folder.iterdir()])}

    assert run(write_beside, "pat/*/", tmp_path / "out").done == 3
    assert run(write_beside, "pat/*/", tmp_path / "out").resumed == 3
    (patients / "1" / "more" / "c.dcm").write_text("new")
    report = run(write_beside, "pat/*/", tmp_path / "out")
    assert (report.done, report.resumed) == (3, 2)
    assert run(write_beside, "pat/*/", tmp_path / "out").resumed == 3
