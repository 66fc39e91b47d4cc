"""out.tar: many small outputs of one input in one tar file, which other readers open as well."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from driving import published, table

import forebay
from forebay.errors import InputError, OutputError


@pytest.fixture
def inputs(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"a{number}\nb{number}\n")
    return folder


LINES = {f"{number}/{at}.txt": f"{'ab'[at]}{number}" for number in range(6) for at in (0, 1)}


def cut(source, out):
    """Write each line of a text to a tar file."""
    lines = enumerate(source.read_text().splitlines())
    with out.tar() as tar:
        return [tar.add(f"{source.stem}/{k}.txt", each.encode()) | {"line": k} for k, each in lines]


def load(row):
    with forebay.open_output(row["destination"], row["offset"], row["size"]) as file:
        return file.read().decode()


def run(work, inputs, output, **options):
    options = {"num_workers": 0, "progress": False, **options}
    return forebay.preprocess(work, inputs, output, **options)


@pytest.mark.slow
def test_members_are_what_was_added_for_every_reader(tmp_path, inputs):
    """For tarfile, for tar itself, by the rows of the table, and in the workers of a loader."""
    report = run(cut, inputs, tmp_path / "out", num_workers=2)
    assert (report.done, [*published(tmp_path / "out")]) == (6, [f"{k}.tar" for k in range(6)])
    found = {}
    for path in sorted((tmp_path / "out").glob("*.tar")):
        with tarfile.open(path) as tar:
            found |= {each.name: tar.extractfile(each).read().decode() for each in tar}
    assert found == LINES
    listed = subprocess.run(
        ["tar", "tf", tmp_path / "out" / "0.tar"], capture_output=True, text=True, check=True
    )
    assert (listed.stdout.split(), listed.stderr) == (["0/0.txt", "0/1.txt"], "")
    rows = report.metadata.to_pylist()
    assert [(row["destination"], row["member"], row["line"]) for row in rows] == [
        (f"{name[0]}.tar", name, int(name[2])) for name in LINES
    ]
    dataset = forebay.from_table(tmp_path / "out", load)
    assert list(dataset) == [*LINES.values()]
    loader = forebay.DataLoader(dataset, batch_size=4, num_workers=1)
    assert [text for batch in loader for text in batch] == [*LINES.values()]


@pytest.mark.slow
def test_the_bytes_are_the_same_in_every_run(tmp_path, inputs):
    """No time, no user, nothing of the machine is in them."""
    run(cut, inputs, tmp_path / "one")
    run(cut, inputs, tmp_path / "two", num_workers=2)
    assert published(tmp_path / "one") == published(tmp_path / "two")
    assert table(tmp_path / "one") == table(tmp_path / "two")


def test_a_tar_file_in_a_bucket_is_read_by_its_url(inputs, memory):
    """It is uploaded like any other output."""
    run(cut, inputs, "memory://bucket/out")
    dataset = forebay.from_table("memory://bucket/out", load)
    assert list(dataset) == [*LINES.values()]


def test_a_tar_file_of_an_input_that_fails_is_not_there(tmp_path, inputs):
    """Like any other output of it."""

    def work(source, out):
        with out.tar("all.tar") as tar:
            tar.add("a", b"1")
            raise ValueError(source.name)

    assert run(work, inputs, tmp_path / "out").failed == 6
    assert published(tmp_path / "out") == {}


NAMES = {
    "100 characters": "x" * 100,
    "101 characters": "x" * 101,
    "deep": "/".join("abcdefgh" * 9),
    "not ASCII": "Ärger/naïve ☃.txt",
    "long and not ASCII": "☃" * 300,
    "a line break": "a\nb",
    "with a space in front": " a",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_any_unicode_name_is_a_member(tmp_path, inputs, name):
    """Long ones and others have an extended header; the offset is that of the data."""

    def work(source, out):
        with out.tar("a.tar") as tar:
            tar.add("first", np.arange(600, dtype="uint8"))
            return tar.add(name, memoryview(b"data"))

    run(work, [inputs / "0.txt"], tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "a.tar") as tar:
        assert tar.getnames() == ["first", name]
    assert list(forebay.from_table(tmp_path / "out", load)) == ["data"]


REFUSED = {
    "absolute": ("/etc/x", b"", OutputError, "would leave"),
    "above": ("../x", b"", OutputError, "would leave"),
    "twice": ("./a", b"", OutputError, "has a member of that name"),
    "no Unicode": ("\udcff", b"", OutputError, "UTF-8"),
    "a string": ("b", "text", TypeError, "Encode it first"),
}


@pytest.mark.parametrize(("name", "data", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_no_member_can_be_fails_its_input(tmp_path, name, data, error, words):
    """In words, with the name."""
    raised = []

    def work(row, out):
        with pytest.raises(OutputError, match="no name to use"):
            out.tar()
        with out.tar("a.tar") as tar:
            tar.add("a", b"")
            with pytest.raises(error, match=words) as caught:
                tar.add(name, data)
            raised.append(caught.value)

    run(work, [{"a": 1}], tmp_path / "out")
    assert len(raised) == 1
    with tarfile.open(tmp_path / "out" / "a.tar") as tar:
        assert tar.getnames() == ["a"]


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, 1 << 60), (1 << 60, 1), (0, None)])
def test_a_place_outside_of_the_file_is_an_error(tmp_path, offset, size):
    """A table may say anything; nothing is read, and no memory taken."""
    Path(tmp_path, "a.tar").write_bytes(bytes(1024))
    with pytest.raises(InputError, match="has 1,024 bytes, so there is no member"):
        forebay.open_output(tmp_path / "a.tar", offset, size)
