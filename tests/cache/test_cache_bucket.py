"""Caches in a bucket: made there as in a folder, and copied to local disks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import cached
import pytest
from cached import Asked, Noise, Pictures
from driving import published
from same import assert_same
from served import served

import forebay

URL = "memory://bucket/cache"
PICTURES = [Pictures()[at] for at in range(40)]
SCRIPT = Path(cached.__file__)
OWN = ("blocks.bin", "cache.json")
FILES = [*(f".forebay/{name}" for name in OWN), *(f"shard-{at:05}.arrow" for at in range(40))]
BLOCK = "within its block"

pytestmark = pytest.mark.usefixtures("machine")


def make(dataset, location, **options):
    """Make or open a cache in this process."""
    return forebay.cache(dataset, location, num_workers=0, progress=False, **options)


def files(folder):
    """Return the files of a cache by name, without what forebay needs to make it."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}


def objects(memory):
    found = {name.removeprefix("/bucket/cache/"): memory.cat(name) for name in memory.find("/")}
    return {name: body for name, body in found.items() if name in FILES}


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A finished cache of pictures in a folder."""
    return make(Pictures(), tmp_path_factory.mktemp("local") / "cache").directory


@pytest.fixture
def there(memory, local):
    """The same cache in a bucket, without a ledger; returns the store."""
    for name, body in files(local).items():
        memory.pipe_file(f"/bucket/cache/{name}", body)
    return memory


def flip(memory, name, at):
    """Flip one bit of an object; return what it was."""
    path = f"/bucket/cache/{name}"
    body = memory.cat(path)
    at %= len(body)
    memory.pipe_file(path, body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :])
    return body


# ---- made ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2, "backend": "thread"}])
def test_a_cache_in_a_bucket_has_the_bytes_of_one_in_a_folder(memory, local, options):
    """Every file, the index too; and nothing of it stays on the local disk."""
    found = forebay.cache(Pictures(), f"{URL}/", progress=False, **options)
    assert objects(memory) == files(local) and len(files(local)) == 42
    assert repr(found) == f"<CachedDataset '{URL}': 40 samples in 40 shards, shuffled by 4 GB>"
    assert len(found) == 40 and "bucket/cache" in found._repr_html_()
    assert not list(Path(os.environ["XDG_STATE_HOME"]).rglob("*.arrow"))


def test_a_finished_cache_in_a_bucket_is_recognised_on_any_machine(memory, machine):
    """Without its ledger, and without asking for a sample: the index says what it is of."""
    make(Asked(), URL)
    machine("there")
    memory.rm("/bucket/cache/.forebay/ledger.sqlite")
    memory.rm("/bucket/cache/.forebay/run.json")
    Asked.asked.clear()
    assert len(make(Asked(), URL)) == 40 and Asked.asked == []
    assert not memory.exists("/bucket/cache/.forebay/run.json")


def test_what_changed_or_is_missing_is_noticed_in_a_bucket(memory, local, machine, tmp_path):
    """As in a folder; on another machine, too, with the ledger of the bucket."""
    make(Pictures(), URL)
    with pytest.raises(forebay.ChangedError, match="parameter shift: 0 -> 1"):
        make(Pictures(shift=1), URL)
    machine("there")
    memory.rm("/bucket/cache/shard-00003.arrow")
    memory.rm("/bucket/cache/.forebay/blocks.bin")
    make(Pictures(), URL)
    assert objects(memory) == files(local)
    flip(memory, ".forebay/cache.json", 0)
    with pytest.raises(forebay.InputError, match=r"'memory://.*/cache\.json' is damaged"):
        make(Pictures(), URL)
    make(Pictures(shift=1), URL, redo="*")
    assert objects(memory).keys() == files(local).keys() and objects(memory) != files(local)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_killed_cache_is_continued_in_a_bucket_by_any_machine(
    bucket, machine, trainers, tmp_path, num_workers
):
    """With the same bytes as an undisturbed run; and then it is copied without its ledger."""
    make(Noise(), tmp_path / "whole")
    url = f"s3://{bucket.name}/out"
    code, _, err = trainers.run(SCRIPT, url, num_workers, cwd=tmp_path)
    assert code == -signal.SIGKILL, err
    trainers.await_none_left()
    done = len(bucket.outputs())
    assert "out/.forebay/cache.json" not in bucket.names() and done < 125
    machine("here" if num_workers else "there")
    source = """
        import sys; sys.path.insert(0, sys.argv[2])
        from cached import Noise
        forebay.cache(Noise(), sys.argv[1], num_workers=0, progress=False)
        import fsspec
        fsspec.filesystem("s3").get(sys.argv[1], "copy", recursive=True)
        assert forebay.open_cache(sys.argv[1])[999][0].equal(forebay.open_cache("copy")[999][0])
    """
    script = tmp_path / "script.py"
    script.write_text("import forebay\n" + "\n".join(map(str.strip, source.splitlines())))
    code, _, err = trainers.run(script, url, SCRIPT.parent, cwd=tmp_path)
    assert code == 0, err
    assert bucket.outputs() == published(tmp_path / "whole") == published(tmp_path / "copy")
    for name in ("blocks.bin", "cache.json"):
        body = (tmp_path / "whole" / ".forebay" / name).read_bytes()
        assert bucket.read(f"out/.forebay/{name}") == body
        assert (tmp_path / "copy" / ".forebay" / name).read_bytes() == body


# ---- copied --------------------------------------------------------------------------------------


def test_a_copy_of_the_folder_is_an_ordinary_cache(there, local, tmp_path):
    """By any tool that copies files; it needs no bucket."""
    there.get("/bucket/cache", str(tmp_path / "copy"), recursive=True)
    there.rm("/bucket", recursive=True)
    assert files(tmp_path / "copy") == files(local)
    assert_same(list(forebay.open_cache(tmp_path / "copy")), PICTURES)
    assert_same(list(make(Pictures(), tmp_path / "copy")), PICTURES)


@pytest.mark.parametrize(
    ("location", "options", "words"),
    [
        (URL, {"disk": "all", "directory": "x"}, "disk='all'"),
        (
            URL,
            {"disk": "1GB", "directory": "s3://bucket/x"},
            "'s3://bucket/x' is not a local folder",
        ),
        ("cache", {"disk": "1GB"}, "are for a cache in a bucket"),
        ("cache", {"directory": "copy"}, "are for a cache in a bucket"),
        (None, {}, "None names no folder"),
    ],
)
def test_impossible_openings_are_refused(there, location, options, words):
    """The message names the argument."""
    with pytest.raises(forebay.OptionError, match=words):
        forebay.open_cache(location, **options)


OPEN = "print(len(forebay.open_cache(sys.argv[1])))"
SECRET = "hunter2secret"


@pytest.mark.slow
@pytest.mark.parametrize("status", [403, pytest.param(401, marks=pytest.mark.thorough)])
def test_credentials_that_are_refused_are_never_printed(local, tmp_path, script, status):
    """The file is named that could not be read, and what to check."""
    with served(local) as server:
        server.status = status
        url = server.url.replace("://", f"://me:{SECRET}@")
        code, out, err = script(OPEN, url).end()
    assert code == 1 and SECRET not in out + err
    assert f"{server.url}/.forebay/cache.json: " in err
    assert "your credentials" in err and f"{status}" in err


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_an_error(bucket, tmp_path, script):
    """With the advice to check its name."""
    code, _, err = script(OPEN, "s3://no-such-bucket/cache").end()
    assert code == 1
    assert "s3://no-such-bucket/cache/.forebay/cache.json: there is no such object" in err
    assert "Check the name of the bucket" in err
