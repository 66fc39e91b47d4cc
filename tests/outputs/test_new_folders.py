"""What is left in the staging folder of an input is published, a new folder in one step."""

from __future__ import annotations

import os
import stat
from copy import copy
from pathlib import Path

import pytest

from forebay.base.files import rename_new
from forebay.base.output_names import STAGING
from forebay.errors import OutputError
from forebay.ledger.records import FileChange, FileFields
from forebay.outputs import publishing
from forebay.outputs.bucket import BucketFolder
from forebay.outputs.folder import OutputFolder
from forebay.outputs.output import Output
from forebay.outputs.staging import Staging


@pytest.fixture
def place(tmp_path: Path) -> OutputFolder:
    """An output folder."""
    return OutputFolder(tmp_path / "out")


@pytest.fixture
def staging(place: OutputFolder) -> Staging:
    """A worker's end of it."""
    staging = place.staging()
    staging.open(0)
    return staging


@pytest.fixture
def renames(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that are given while files are published."""
    given: list[str] = []

    def rename(old: str, new: str) -> None:
        rename_new(old, new)
        given.append(os.path.basename(new))

    monkeypatch.setattr(publishing, "rename_new", rename)
    return given


def write(staging: Staging, *names: str) -> Output:
    """Write files as a function does, each with its name in it."""
    out = staging.begin("")
    for name in names:
        out.file(name).write_text(name)
    return out


def commit(staging: Staging, out: Output) -> tuple[FileFields, ...]:
    """Return the files of an input, as a worker does."""
    return staging.commit(out, out.collect("the function"))


def publish(place: OutputFolder, staging: Staging, *outputs: Output) -> list[str]:
    """Publish what inputs wrote; return the names that could not be given."""
    files = [file for out in outputs for file in commit(staging, out)]
    changes = [FileChange(name, staged) for name, _, staged in files]
    return [one.name for part in place.perform(changes) for one in part]


def visible(place: OutputFolder) -> list[str]:
    """Return the published files, each of which holds its name."""
    found = [name for name, _ in place.files()]
    assert all((place.path / name).read_text() == name for name in found)
    return found


def left_in_staging(place: OutputFolder) -> list[str]:
    """Return what staging folders hold, and those that belong to one input."""
    workers = sorted((place.path / STAGING).iterdir())
    return [str(each.relative_to(workers[0])) for each in workers[0].rglob("*")] + [
        each.name for each in workers[1:]
    ]


@pytest.mark.slow
def test_a_new_folder_takes_one_rename(place, staging, renames):
    """However many files it holds; the folders above it are made."""
    (place.path / "day").mkdir()
    names = [f"day/rec/{number}" for number in range(1000)]
    assert publish(place, staging, write(staging, *names)) == []
    assert visible(place) == sorted(names)
    assert renames == ["rec"]
    assert left_in_staging(place) == []


def test_each_folder_of_an_input_takes_one(place, staging, renames):
    """With all that is below it, however deep; files beside folders are renamed by themselves."""
    names = ["wav/rec/0", "text/rec/0", "text/index", "wav/rec/1", "text/rec/1", "log"]
    assert publish(place, staging, write(staging, *names)) == []
    assert visible(place) == sorted(names)
    assert renames == ["wav", "text", "log"]
    deep = "/".join("d" * 50) + "/0"
    assert publish(place, staging, write(staging, deep, "text/new/a/0", "text/new/b/0")) == []
    assert renames[3:] == ["d", "new"]
    assert left_in_staging(place) == []


def test_inputs_may_share_a_folder(place, staging, renames):
    """The first one that is published makes it, whoever staged files for it before."""
    outputs = [write(staging, f"speaker/{number}a", f"speaker/{number}b") for number in range(3)]
    assert publish(place, staging, *outputs) == []
    outputs = [write(staging, f"speaker/{number}a") for number in (3, 4)]
    assert publish(place, staging, *outputs) == []
    names = ["0a", "0b", "1a", "1b", "2a", "2b", "3a", "4a"]
    assert visible(place) == [f"speaker/{name}" for name in names]
    assert renames == ["speaker", "1a", "1b", "2a", "2b", "3a", "4a"]
    assert left_in_staging(place) == ["speaker"]  # for further files of that folder


def test_what_comes_later_is_not_published(place, staging):
    """As from a process that outlives the function: only what was there at its end is an output."""
    out = write(staging, "rec/0", "rec/1")
    files = commit(staging, out)
    (place.path / files[0][2]).with_name("late").write_text("late")
    list(place.perform([FileChange(name, staged) for name, _, staged in files]))
    assert visible(place) == ["rec/0", "rec/1"]


@pytest.mark.parametrize("names", [("Rec", "rec"), ("Rec/0", "rec/0")], ids=["shared", "own"])
def test_two_names_that_are_one_file_are_refused(place, staging, names):
    """As "Rec" and "rec" are where case is ignored; hard links to a file are two, though."""
    out = staging.begin("")
    first, second = map(out.file, names)
    first.write_text("of both")
    second.hardlink_to(first)
    assert publish(place, staging, out) == []
    assert (place.path / names[0]).samefile(place.path / names[1])
    out = staging.begin("")
    out.file(names[0]).write_text("of both")
    out._paths[names[1]] = out._paths[names[0]]  # as on such a file system
    with pytest.raises(OutputError, match="same file as another output"):
        commit(staging, out)


@pytest.mark.parametrize("kind", ["a file in the folder", "an empty folder", "a link", "a file"])
def test_what_is_in_the_way_stays(place, staging, tmp_path, kind):
    """Only a folder takes more files; a link or a file of that name costs the input."""
    out = write(staging, "rec/0", "rec/1")
    rec, outside = place.path / "rec", tmp_path / "outside"
    outside.mkdir()
    match kind:
        case "a file in the folder":
            rec.mkdir()
            (rec / "0").write_text("of somebody else")
        case "an empty folder":
            rec.mkdir()
        case "a link":
            rec.symlink_to(outside)
        case _:
            rec.write_text("rec")
    refused = publish(place, staging, out)
    assert list(outside.iterdir()) == []
    if kind == "an empty folder":
        assert refused == []
        assert left_in_staging(place) == []
    elif kind == "a file in the folder":
        assert refused == ["rec/0"]
        assert (rec / "0").read_text() == "of somebody else"
        assert (rec / "1").read_text() == "rec/1"
    else:
        assert refused == ["rec/0", "rec/1"]
        assert rec.is_symlink() if kind == "a link" else rec.read_text() == "rec"


def test_outputs_lie_to_each_other_as_their_names_do(staging):
    """A playlist may name its parts relative to itself, whichever it asks for first."""
    for names in (["list", "parts/0", "parts/1"], ["parts/0", "list", "parts/1"]):
        out = staging.begin("")
        paths = {name: out.file(name) for name in names}
        assert os.path.relpath(paths["parts/1"], paths["list"].parent) == "parts/1"
        assert os.path.relpath(paths["parts/0"], paths["parts/1"].parent) == "0"


def test_what_failed_leaves_no_folder(place, staging):
    """Its files are gone, and another attempt begins anew."""
    write(staging, "rec/0", "rec/1").discard()
    assert left_in_staging(place) == []
    assert publish(place, staging, write(staging, "rec/0")) == []
    assert visible(place) == ["rec/0"]


def test_what_was_refused_leaves_no_folder(place, staging):
    """The staged files of an input that lost a name are removed, and its own folders with them."""
    (place.path / "a").mkdir()
    (place.path / "a" / "rec").write_text("in the way")
    files = commit(staging, write(staging, "a/rec/0", "b/1"))
    for change in (FileChange, lambda _, staged: FileChange(staged)):
        list(place.perform([change(name, staged) for name, _, staged in files]))
    assert left_in_staging(place) == []


def test_files_that_others_are_about_to_write_keep_their_folder(place, staging):
    """A staging folder that inputs share stays when one of them fails."""
    publish(place, staging, write(staging, "speaker/0"))
    files = commit(staging, write(staging, "speaker/1"))
    other = staging.begin("").file("speaker/2")
    list(place.perform([FileChange(staged) for _, _, staged in files]))
    other.write_text("speaker/2")


def test_a_folder_is_in_the_group_of_the_one_that_it_is_in(place, staging, renames):
    """With the setgid bit, new folders inherit it, also those that were staged elsewhere."""
    (place.path / "team").mkdir()
    (place.path / "team").chmod(0o2775)
    assert publish(place, staging, write(staging, "team/rec/0", "team/rec/1", "rec/0")) == []
    assert (place.path / "team" / "rec").stat().st_mode & stat.S_ISGID
    assert not (place.path / "rec").stat().st_mode & stat.S_ISGID
    assert renames == ["0", "1", "rec"]


def test_performing_again_changes_nothing(place, staging):
    """As after a kill between the renames and the ledger's note of them."""
    files = commit(staging, write(staging, "rec/0", "rec/1"))
    changes = [FileChange(name, staged) for name, _, staged in files]
    for _ in range(2):
        assert [one for part in place.perform(changes) for one in part] == []
        assert visible(place) == ["rec/0", "rec/1"]


@pytest.mark.parametrize("names", [["t"], ["t/x"], ["t/x/y"], ["u", "t/x"]])
def test_no_file_gets_the_path_of_one_that_may_be_published_again(place, staging, names):
    """A kill before the ledger forgets a rename: the next run finds what was staged meanwhile."""
    files = commit(staging, write(staging, "t"))
    changes = [FileChange(name, staged) for name, _, staged in files]
    assert list(place.perform(changes)) == [[]]
    write(staging, *names)
    assert list(place.perform(changes)) == [[]]
    assert visible(place) == ["t"]


@pytest.mark.parametrize("linked", ["rec", "own"])
def test_no_link_in_a_staging_folder_is_followed(place, staging, tmp_path, linked):
    """Not even if it leads to a folder with the very names that are expected."""
    out = write(staging, "rec/0")
    files = commit(staging, out)
    folder = out.file("rec/0").parent if linked == "rec" else out.file("rec/0").parents[1]
    outside = tmp_path / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)
    changes = [FileChange(name, staged) for name, _, staged in files]
    refused = [one.name for part in place.perform(changes) for one in part]
    assert refused == ["rec/0"]
    assert not (place.path / "rec").is_symlink()
    assert [path.name for path in outside.rglob("0")] == ["0"]


def test_a_ledger_cannot_give_a_staged_file_another_name(place, staging):
    """A folder is only published as a whole if each file in it gets the name that it has there."""
    write(staging, "rec/0")
    (staged,) = (str(path.relative_to(place.path)) for path in (place.path / STAGING).rglob("0"))
    refused = [one for part in place.perform([FileChange("other/1", staged)]) for one in part]
    assert refused == []
    assert [name for name, _ in place.files()] == ["other/1"]


def test_threads_that_fill_a_bucket_share_no_folder(tmp_path, monkeypatch):
    """Each worker thread has a shallow copy of the job's end of the bucket."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    uploads = BucketFolder("memory://new-folders/out").staging()
    workers = [copy(uploads) for _ in range(3)]
    for number, worker in enumerate(workers):
        worker.open(number)
    folders = [worker.begin("").file("a").parent.name for worker in workers]
    assert [name.partition("-")[2] for name in folders] == ["0-1", "1-1", "2-1"]


def test_an_input_of_a_bucket_has_a_folder_only_if_it_writes_a_file(tmp_path, monkeypatch):
    """So a full local disk is met in the function, where the run is stopped and no input blamed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    uploads = BucketFolder("memory://new-folders/out").staging()
    uploads.open(0)
    out = uploads.begin("")
    assert commit(uploads, out) == ()
    assert [path.name.count("-") for path in tmp_path.glob("**/staging/*")] == [1]


def test_without_a_home_the_folder_of_a_bucket_has_to_be_named(monkeypatch):
    """A container's user may have no name, and then Python knows no home."""

    def unknown(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(OutputError, match="Set XDG_STATE_HOME"):
        BucketFolder("memory://new-folders/out")
