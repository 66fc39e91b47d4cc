"""Files are found by one rule: in a folder, by a glob, and at a URL of either."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
from fsspec.archive import AbstractArchiveFileSystem

from forebay.errors import InputError
from forebay.inputs.listing import list_inputs

NAMES = ("a.wav", "._a.wav", ".hidden.wav", "s/b.wav", "s/.c.wav", "__MACOSX/._b.wav", ".g/d.wav")


def sources(inputs: object) -> list[str]:
    return [one.source for one in list_inputs(inputs)]


@pytest.fixture(params=["folder", "file", "memory", "zip", "tar"])
def place(request, tmp_path, monkeypatch):
    """The same files somewhere: what begins and what ends the location of one."""
    monkeypatch.chdir(tmp_path)
    files = dict.fromkeys(NAMES, b"x")
    if request.param == "memory":
        memory = request.getfixturevalue("memory")
        memory.pipe({f"/d/{name}": data for name, data in files.items()})
        return "memory:///d/", ""
    if request.param == "zip":
        with zipfile.ZipFile("d.zip", "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        return "zip://", "::d.zip"
    if request.param == "tar":
        with tarfile.open("d.tar", "w") as tar:
            for name in files:
                member = tarfile.TarInfo(name)
                member.size = 1
                tar.addfile(member, io.BytesIO(b"x"))
        return "tar://", "::d.tar"
    for name, data in files.items():
        path = tmp_path / "d" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return ("d/" if request.param == "folder" else f"file://{tmp_path}/d/"), ""


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("", ["a.wav", "s/b.wav"]),
        ("**/*.wav", ["a.wav", "s/b.wav"]),
        ("*.wav", ["a.wav"]),
        ("*/*", ["s/b.wav"]),
        ("s/*", ["s/b.wav"]),
        (".*", ["._a.wav", ".hidden.wav"]),
        ("s/.*", ["s/.c.wav"]),
        ("[ab].wav", ["a.wav"]),
    ],
)
def test_hidden_files_are_left_out_wherever_they_are(place, pattern, names):
    """A glob lists what its folder does, in a folder, an archive or a bucket."""
    before, after = place
    assert sources(f"{before}{pattern}{after}") == [f"{before}{name}{after}" for name in names]


def test_a_link_that_leads_back_lists_no_file_again(tmp_path, monkeypatch):
    """The system itself gives up only after 40 links."""
    monkeypatch.chdir(tmp_path)
    Path("d/sub").mkdir(parents=True)
    Path("d/sub/a.wav").touch()
    Path("d/sub/loop").symlink_to("..")
    Path("other").mkdir()
    Path("other/b.wav").touch()
    Path("d/there").symlink_to("../other")
    expected = ["d/sub/a.wav", "d/there/b.wav"]
    assert sources("d") == sources("d/**/*.wav") == sources("d/*/*.wav") == expected
    url = f"file://{tmp_path}/"
    assert sources(f"{url}d") == sources(f"{url}d/**/*.wav") == [url + name for name in expected]
    assert sources("d/sub/loop/*/*.wav") == ["d/sub/loop/sub/a.wav", "d/sub/loop/there/b.wav"]


def refuses(monkeypatch, folder):
    """Let the system refuse to list a folder, also for root."""
    scandir = os.scandir

    def denied(path="."):
        if os.path.basename(os.fspath(path).rstrip("/")) == folder:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)


@pytest.mark.parametrize("inputs", ["d", "d/**/*.wav", "d/*/*.wav", "file://{}/d/**/*.wav"])
def test_a_folder_that_cannot_be_read_ends_every_search(tmp_path, monkeypatch, inputs):
    """Its files would be missing from the outputs without a word."""
    monkeypatch.chdir(tmp_path)
    Path("d/closed").mkdir(parents=True)
    Path("d/a.wav").touch()
    refuses(monkeypatch, "closed")
    with pytest.raises(InputError, match=r"closed': it cannot be listed: .*\n.*make it readable"):
        list(list_inputs(inputs.format(tmp_path)))
    assert sources("d/*.wav") == ["d/a.wav"], "nobody asked for what is below"


def test_a_remote_folder_that_cannot_be_read_ends_the_search(tmp_path, monkeypatch):
    """fsspec's own search would leave it out."""
    monkeypatch.chdir(tmp_path)
    with tarfile.open("d.tar", "w") as tar:
        for name in ("a.wav", "closed/b.wav"):
            tar.addfile(tarfile.TarInfo(name))
    listed = AbstractArchiveFileSystem.ls

    def denied(self, path, detail=True, **options):
        if path.rstrip("/") == "closed":
            raise PermissionError(13, "Permission denied", path)
        return listed(self, path, detail, **options)

    monkeypatch.setattr(AbstractArchiveFileSystem, "ls", denied)
    for url in ("tar://::d.tar", "tar://**/*.wav::d.tar"):
        with pytest.raises(InputError, match="Permission denied"):
            list_inputs(url)
    assert sources("tar://*.wav::d.tar") == ["tar://a.wav::d.tar"]


def test_brackets_in_the_name_of_a_folder_are_no_glob(tmp_path, monkeypatch):
    """A folder that exists is the one that is meant, also below it."""
    monkeypatch.chdir(tmp_path)
    for name in ("[DATA]/sub/a.wav", "D/sub/b.wav"):
        Path(name).parent.mkdir(parents=True)
        Path(name).touch()
    for pattern in ("[DATA]/**/*.wav", "[DATA]/sub/*.wav", "[DATA]/*/[ab].wav"):
        assert sources(pattern) == ["[DATA]/sub/a.wav"]
    assert sources("[C-E]/**/*.wav") == ["D/sub/b.wav"]
    with pytest.raises(InputError, match=r"for a bracket write \[\[\]"):
        list_inputs("[x]/*.wav")
