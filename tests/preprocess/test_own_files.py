"""What forebay may write, replace and remove in an output folder, and what it may not."""

from __future__ import annotations

import errno
import os
from functools import partial

import pytest
from click.testing import CliRunner
from driving import make_inputs, published
from works import copy

import forebay
from forebay.base import files
from forebay.base.output_names import TABLE_FORMATS
from forebay.cli import cli
from forebay.errors import OutputError
from forebay.ledger.ledger import Ledger
from forebay.outputs import publishing
from forebay.outputs.folder import OutputFolder
from forebay.runs import metadata_table as write


def run(work, inputs, output, **options):
    return forebay.preprocess(work, inputs, output, progress=False, **{"num_workers": 0, **options})


def verify(output):
    result = CliRunner().invoke(cli, ["verify", str(output)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def three(tmp_path):
    """Three good inputs."""
    return make_inputs(tmp_path / "in", 3)


def claim(names, source, out):
    for name in names.get(source.stem, [source.stem]):
        out.file(name).write_text(source.stem)


# ---- the table ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", TABLE_FORMATS)
@pytest.mark.parametrize("redo", [None, "*"])
def test_a_table_that_no_run_wrote_is_refused_before_any_work(three, output, form, redo):
    """Whatever else is in the folder, the user's own table stays."""
    output.mkdir()
    table = output / f"metadata.{form}"
    table.write_text("the user's own")
    with pytest.raises(OutputError, match="no run recorded in this output folder wrote it"):
        run(copy, three, output, metadata=form, redo=redo)
    assert table.read_text() == "the user's own"
    assert published(output) == {}
    assert not (three.parent / "calls").exists()
    other = "csv" if form != "csv" else "jsonl"
    assert run(copy, three, output, metadata=other).done == 3
    assert table.read_text() == "the user's own"
    assert f"orphan   metadata.{form}" in verify(output)[1]


def test_a_table_of_another_format_is_not_the_runs_either(three, output):
    """That one table is the ledger's says nothing of another one, also after a restart."""
    run(copy, three, output)
    (output / "metadata.csv").write_text("the user's own")
    for options in ({}, {"redo": "*"}):
        with pytest.raises(OutputError, match=r"metadata\.csv' exists"):
            run(copy, three, output, metadata="csv", **options)
    assert run(copy, three, output, redo="*").done == 3
    assert (output / "metadata.csv").read_text() == "the user's own"


def test_a_table_that_was_put_there_meanwhile_is_left_alone(three, output):
    """The inputs are done, and the table is written as soon as that one is moved away."""

    def put(source, out):
        (output / "metadata.parquet").write_text("the user's own")
        return {"put": 1}

    for _ in range(2):
        with pytest.raises(OutputError, match=r"metadata\.parquet' exists"):
            run(put, three, output)
        assert (output / "metadata.parquet").read_text() == "the user's own"
    (output / "metadata.parquet").unlink()
    report = run(put, three, output)
    assert (report.resumed, report.metadata.num_rows) == (3, 3)


def test_a_table_whose_flush_failed_is_replaced_by_the_next_run(three, output, monkeypatch):
    """The disk fails once the table has its name: it is the run's own nevertheless."""
    flush = OutputFolder.flush

    def fail_behind_the_table(folder):
        flush(folder)
        if (output / "metadata.parquet").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "flush", fail_behind_the_table)
        with pytest.raises(OutputError, match="make the same call again"):
            run(copy, three, output)
    report = run(copy, three, output)
    assert (report.resumed, report.metadata.num_rows) == (3, 3)


def test_a_table_that_could_not_be_written_is_not_claimed(three, output, monkeypatch):
    """A table that the user puts there after the error is the user's own."""

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(write, "write_metadata", fail)
        with pytest.raises(OutputError, match="make the same call again"):
            run(copy, three, output)
    (output / "metadata.parquet").write_text("the user's own")
    with pytest.raises(OutputError, match="no run recorded in this output folder wrote it"):
        run(copy, three, output)
    assert (output / "metadata.parquet").read_text() == "the user's own"


def test_a_table_is_told_from_a_users_in_a_bucket_too(memory, three, machine):
    """Also on another machine, which has the ledger from the bucket."""
    run(copy, three, "memory://bucket/out")
    memory.pipe_file("/bucket/out/metadata.csv", b"the user's own")
    with pytest.raises(OutputError, match="no run recorded"):
        run(copy, three, "memory://bucket/out", metadata="csv")
    machine("there")
    (three / "more.txt").write_text("more")
    assert run(copy, three, "memory://bucket/out").metadata.num_rows == 4
    with pytest.raises(OutputError, match="no run recorded"):
        run(copy, three, "memory://bucket/out", metadata="csv", redo="*")
    assert memory.cat("/bucket/out/metadata.csv") == b"the user's own"


# ---- files that were there, or came meanwhile ---------------------------------------------------


@pytest.mark.parametrize("way", ["renameat2", "link", "look"])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_comes_into_the_folder_during_a_run_is_never_overwritten(
    three, output, kind, way, monkeypatch
):
    """Neither in a folder that was empty at first, nor where the system lacks the call for it."""
    without(way, monkeypatch)
    other = three.parent / "other"
    other.write_text("the user's own")

    def put(source, out):
        place = output / "0001.txt"
        if source.stem == "0000":
            if kind == "folder":
                place.mkdir()
            elif kind == "link":
                place.symlink_to(other)
            else:
                place.write_text("the user's own")
        out.file(f"{source.stem}.own").write_text("x")
        return copy(source, out)

    report = run(put, three, output)
    (failure,) = report.failures
    assert (report.done, failure.source) == (2, str(three / "0001.txt"))
    assert "exists already" in failure.message
    place = output / "0001.txt"
    assert place.is_dir() if kind == "folder" else place.read_text() == "the user's own"
    assert "0001.own" not in published(output)  # an input is published whole or not at all
    assert {"0000.own", "0000.txt", "0002.own", "0002.txt"} <= set(published(output))


def without(way, monkeypatch):
    """Take away what a file system may lack."""

    def unsupported(*_, **__):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    ways = {
        "renameat2": files._WAYS,
        "link": (unsupported, files._by_link),
        "look": (),
    }
    monkeypatch.setattr(files, "_WAYS", ways[way])


@pytest.mark.parametrize("way", ["renameat2", "link", "look"])
def test_a_rename_to_a_free_name(tmp_path, way, monkeypatch):
    """It moves the file, or says that the name is taken or the file is not there."""
    without(way, monkeypatch)
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    with pytest.raises(FileNotFoundError):
        files.rename_new(old, new)
    (tmp_path / "old").write_text("1")
    files.rename_new(old, new)
    with pytest.raises(FileNotFoundError):  # though the other is there: it is done
        files.rename_new(old, new)
    assert (tmp_path / "new").read_text() == "1"
    (tmp_path / "old").write_text("2")
    with pytest.raises(FileExistsError):
        files.rename_new(old, new)
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["1", "2"]


def test_a_rename_that_a_kill_left_half_done_is_finished(tmp_path, monkeypatch):
    """By link and unlink, both names may be there: they are one file."""
    without("link", monkeypatch)
    (tmp_path / "old").write_text("1")
    os.link(tmp_path / "old", tmp_path / "new")
    files.rename_new(str(tmp_path / "old"), str(tmp_path / "new"))
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_name_passes_from_a_gone_input_and_its_file_is_replaced(tmp_path, three, output):
    """What the ledger knows is replaced; a kill in between changes nothing."""
    run(copy, three, output)
    renamed = three.rename(tmp_path / "renamed")
    (renamed / "0001.txt").write_text("new")
    assert run(copy, renamed, output).done == 3
    assert (output / "0001.txt").read_text() == "new"


# ---- clashes ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "workers"),
    [(["bad/b", "bad"], 0), (["bad", "bad/b"], 1), (["x/y/z", "x/y"], 0)],
)
def test_an_input_that_needs_a_file_and_a_folder_of_one_name_fails_alone(
    three, output, names, workers
):
    """In either order, at every call; and a corrected function is as good as ever."""
    for _ in range(2):
        report = run(partial(claim, {"0001": names}), three, output, num_workers=workers)
        assert (report.done, report.failed) == (2, 1)
        assert "clashes with" in report.failures[0].message
        assert published(output) == {"0000": b"0000", "0002": b"0002"}
        assert verify(output)[0] == 0
    report = run(partial(claim, {}), three, output, redo="*")
    assert (report.done, report.failed) == (3, 0)


@pytest.mark.parametrize("obstacle", ["folder", "file", "link"])
def test_a_pending_rename_that_cannot_be_done_costs_its_input(three, output, obstacle):
    """A kill left it; meanwhile something stands there. Every command works, and tells."""
    run(copy, three, output)
    with Ledger.open(output / ".forebay") as ledger:  # as it was before 0001.txt was published
        staged = output / ".forebay" / "staging" / "w"
        staged.mkdir(parents=True)
        (output / "0001.txt").rename(staged / "0001.txt")
        with ledger.transaction() as db:
            db.execute("INSERT INTO file_changes VALUES('0001.txt', '.forebay/staging/w/0001.txt')")
    if obstacle == "folder":
        (output / "0001.txt").mkdir()
    elif obstacle == "link":
        (output / "0001.txt").symlink_to("nowhere")
    else:
        (output / "0001.txt").write_text("the user's own")
    code, said = verify(output)
    assert (code, "missing  0001.txt" in said) == (3, True)
    report = run(copy, three, output)
    assert (report.done, report.failed) == (2, 1)
    assert "exists already" in report.failures[0].message
    (output / "0001.txt").rename(three.parent / "moved")
    assert (run(copy, three, output).done, verify(output)[0]) == (3, 0)


def test_a_rename_that_the_system_forbids_costs_its_input(three, output, monkeypatch):
    """A folder that may not be written to, and others that may."""
    real = publishing.rename_new

    def forbid(old, new):
        if new.endswith("0001.txt"):
            raise PermissionError(errno.EACCES, "Permission denied", new)
        real(old, new)

    monkeypatch.setattr(publishing, "rename_new", forbid)
    report = run(copy, three, output)
    assert (report.done, report.failed) == (2, 1)
    assert report.failures[0].message.startswith("'0001.txt' cannot be published: Permission den")
    monkeypatch.undo()
    assert run(copy, three, output).done == 3


def test_staged_files_that_vanish_cost_their_inputs(three, output):
    """Files below `.forebay` are removed: the run continues, and the same call makes them again."""

    def lose(source, out):
        path = out.file(source.name)
        path.write_text("x")
        if source.stem == "0002":
            (path.parent / "0001.txt").unlink()

    report = run(lose, three, output)
    assert (report.done, report.failed) == (2, 1)
    assert "vanished between being staged" in report.failures[0].message
    report = run(partial(claim, {}), three, output, redo="*")
    assert (report.done, report.failed) == (3, 0)


def test_folders_that_a_restart_leaves_empty_go_too(three, output):
    """So that a new function may write a file of that name; a user's own files keep theirs."""
    nested = {"0000": ["f0/x"], "0001": ["f1/a/b/x"], "0002": ["f2/x"]}
    run(partial(claim, nested), three, output)
    (output / "f2" / "notes").write_text("mine")
    flat = {"0000": ["f0"], "0001": ["f1"], "0002": ["f2"]}
    report = run(partial(claim, flat), three, output, redo="*")
    assert (report.done, report.failed) == (2, 1)
    assert "exists already as a folder\n" in report.failures[0].message
    assert published(output) == {"f0": b"0000", "f1": b"0001", "f2/notes": b"mine"}


# ---- reserved names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["metadata.parquet/x", "metadata.csv/a/b", "./metadata.jsonl/x", "Metadata.CSV", ".FOREBAY/x"],
)
def test_names_that_would_be_in_forebays_way_are_refused(three, output, name):
    """When they are asked for; the table is written."""
    report = run(partial(claim, {"0001": [name]}), three, output)
    assert "reserved for forebay" in report.failures[0].message
    assert report.metadata.num_rows == 2


def test_any_other_name_is_the_users(three, output):
    """Also one like those of files on their way."""
    names = {"0000": [".metadata.parquet.tmp"], "0001": [".hidden"], "0002": ["x.forebay/y"]}
    assert run(partial(claim, names), three, output).done == 3
    assert set(published(output)) | {".metadata.parquet.tmp"} == {
        ".hidden",
        "x.forebay/y",
        ".metadata.parquet.tmp",
    }
    assert (output / ".metadata.parquet.tmp").read_text() == "0000"
    assert verify(output)[0] == 0


# ---- a disk that is full while files get their names --------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("place", ["rename_new", "makedirs", "unlink", "flush"])
def test_a_disk_that_fails_while_pending_renames_are_done_loses_nothing(
    three, output, number, place, monkeypatch
):
    """The same error at every door, with the same promise, until the disk is well again."""
    work = partial(claim, {"0001": ["deep/0001"]})
    run(work, three, output)
    with Ledger.open(output / ".forebay") as ledger, ledger.transaction() as db:
        (output / ".forebay" / "staging").mkdir()
        (output / "deep" / "0001").rename(output / ".forebay" / "staging" / "x")
        db.execute(
            "INSERT INTO file_changes VALUES('gone', NULL), ('deep/0001', '.forebay/staging/x')"
        )

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    where = {"rename_new": publishing, "flush": OutputFolder}.get(place, os)
    with monkeypatch.context() as patch:
        patch.setattr(where, place, fail)
        for call in (lambda: run(work, three, output), lambda: verify(output)):
            with pytest.raises(OutputError, match="cannot be moved into place") as caught:
                call()
            assert "Nothing is lost" in str(caught.value)
            assert "make the same call again" in str(caught.value)
    report = run(work, three, output)
    assert (report.done, report.resumed) == (3, 3)
    assert verify(output)[0] == 0


def test_a_disk_that_fails_during_a_commit_loses_nothing(three, output, monkeypatch):
    """What is recorded and not yet published is published by the next call."""
    real, calls = publishing.rename_new, []

    def fail_at_the_second(old, new):
        calls.append(new)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "rename_new", fail_at_the_second)
        with pytest.raises(OutputError, match="cannot be moved into place"):
            run(copy, three, output)
    assert len(published(output)) == 1
    report = run(copy, three, output)
    assert (report.done, report.resumed, len(published(output))) == (3, 3, 3)
