"""Caches in a bucket: made there as in a folder, and copied to local disks."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import cached
import pytest
from cached import Asked, Noise, Pictures
from driving import PATIENCE_S, published
from same import assert_same
from served import served

import forebay
from forebay.base.file_stores import Folder, Store
from forebay.caching import copies
from forebay.caching.index import Index
from kit.faults import Gate

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


def copy(folder, url=URL, **options):
    """Open a cache by copying it."""
    return forebay.open_cache(url, directory=folder, disk="all", progress=False, **options)


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
    with pytest.raises(forebay.InputError, match=r"'memory://.*/cache\.json' is damaged"):
        copy(tmp_path / "copy")
    make(Pictures(shift=1), URL, resume=False)
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
        cached = forebay.open_cache(sys.argv[1], directory="copy", disk="all")
        assert cached[999][0].equal(forebay.open_cache("copy")[999][0])
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


def test_a_copy_is_an_ordinary_cache(there, local, tmp_path):
    """With the same bytes; it needs no bucket, and the next call reads only its index there."""
    found = copy(tmp_path, transform=lambda sample: sample["label"])
    assert list(found) == list(range(40)) and found.directory == tmp_path
    assert files(tmp_path) == files(local)
    assert sorted(os.listdir(tmp_path / ".forebay")) == [
        "blocks.bin",
        "cache.json",
        "lock",
        "lock.1",
    ]
    for name in there.find("/bucket/cache"):
        if not name.endswith("cache.json"):
            there.rm(name)
    assert_same(list(copy(tmp_path)), PICTURES)
    there.rm("/bucket", recursive=True)
    assert_same(list(forebay.open_cache(tmp_path)), PICTURES)
    assert_same(list(make(Pictures(), tmp_path)), PICTURES)


def test_what_a_copy_lost_is_copied_again(there, local, tmp_path):
    """And nothing else is."""
    copy(tmp_path)
    before = {name: (tmp_path / name).stat().st_ino for name in FILES}
    (tmp_path / "shard-00007.arrow").unlink()
    (tmp_path / ".forebay" / "blocks.bin").unlink()
    os.truncate(tmp_path / "shard-00008.arrow", 100)
    copy(tmp_path)
    assert files(tmp_path) == files(local)
    now = {name: (tmp_path / name).stat().st_ino for name in FILES}
    changed = {name for name in FILES if before[name] != now[name]}
    assert changed <= {"shard-00007.arrow", "shard-00008.arrow", ".forebay/blocks.bin"}


@pytest.mark.parametrize(
    ("name", "at", "words"),
    [
        ("shard-00007.arrow", BLOCK, "its bytes [0-9,]+ to [0-9,]+ have the checksum"),
        ("shard-00007.arrow", 20, "its schema or end has the checksum"),
        ("shard-00007.arrow", -30, "its schema or end has the checksum"),
        (".forebay/blocks.bin", 500, "its checksum or size is not that of the index"),
    ],
)
def test_a_flipped_bit_is_found_wherever_it_is(there, local, tmp_path, name, at, words):
    """The file is named, and not there; what is copied stays, and the same call continues."""
    if at == BLOCK:
        at = int(Index.read(Folder(local)).read_blocks(Folder(local)).offset[7]) + 100
    body = flip(there, name, at)
    key = name.replace(".", r"\.")
    with pytest.raises(forebay.InputError, match=f"(?s){key}' is not what was written: {words}"):
        copy(tmp_path)
    assert not (tmp_path / name).exists()
    with pytest.raises(forebay.InputError, match="holds no finished cache"):
        forebay.open_cache(tmp_path)
    kept = {path: path.stat().st_ino for path in tmp_path.glob("*.arrow")}
    assert len(kept) == (0 if name == FILES[0] else 7)
    there.pipe_file(f"/bucket/cache/{name}", body)
    copy(tmp_path)
    assert files(tmp_path) == files(local)
    assert kept == {path: path.stat().st_ino for path in kept}


def test_a_file_that_arrives_damaged_once_is_downloaded_again(there, local, tmp_path, monkeypatch):
    """Truncated on the way, or with other bytes: what was wrong was not in the bucket."""
    download, damaged = Store.download, set()

    def damage_first(store, name, path, **others):
        found = download(store, name, path, **others)
        if name not in damaged and name in ("shard-00003.arrow", "shard-00004.arrow"):
            damaged.add(name)
            with path.open("r+b") as file:
                file.truncate(500) if "3" in name else file.write(b"????")
        return found

    monkeypatch.setattr(Store, "download", damage_first)
    copy(tmp_path)
    assert files(tmp_path) == files(local) and len(damaged) == 2


@pytest.mark.parametrize("name", FILES[:1] + FILES[5:6])
def test_a_missing_or_truncated_file_is_named(there, local, tmp_path, name):
    """With the key, and what to do."""
    body = there.cat(f"/bucket/cache/{name}")
    there.rm(f"/bucket/cache/{name}")
    with pytest.raises(forebay.InputError, match=f"(?s)'{URL}/{name}' is missing.*forebay.cache"):
        copy(tmp_path)
    there.pipe_file(f"/bucket/cache/{name}", body[:-1])
    with pytest.raises(forebay.InputError, match=f"'{URL}/{name}' is not what was written"):
        copy(tmp_path)
    there.pipe_file(f"/bucket/cache/{name}", body)
    copy(tmp_path)
    assert files(tmp_path) == files(local)


def test_a_cache_that_was_made_again_is_not_mixed_with_its_copy(memory, tmp_path):
    """Neither with a finished one, nor with a part of one; the old copy still opens."""
    make(Pictures(), URL)
    copy(tmp_path / "whole")
    body = memory.cat(f"/bucket/cache/{FILES[9]}")
    memory.rm(f"/bucket/cache/{FILES[9]}")
    with pytest.raises(forebay.InputError, match="is missing"):
        copy(tmp_path / "part")
    memory.pipe_file(f"/bucket/cache/{FILES[9]}", body)
    make(Pictures(shift=1), URL, resume=False)
    for name in ("whole", "part"):
        with pytest.raises(
            forebay.ChangedError, match=f"(?s){name}' has a copy of an earlier cache.*{URL}"
        ):
            copy(tmp_path / name)
    assert forebay.open_cache(tmp_path / "whole")[5]["image"].max() == 5
    assert copy(tmp_path / "new")[5]["image"].max() == 6


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 39])
@pytest.mark.parametrize("is_finished", [True, False])
def test_a_cache_that_is_made_again_while_it_is_copied_is_an_error(
    memory, tmp_path, monkeypatch, at, is_finished
):
    """Whether a shard is missed, does not fit, or all of them were copied before."""
    make(Pictures(), URL)
    download = Store.download

    def replace_meanwhile(store, name, path, **others):
        found = download(store, name, path, **others)
        if name == f"shard-{at:05}.arrow":
            memory.rm("/bucket/cache/.forebay/cache.json")
            if is_finished:
                make(Pictures(shift=1), URL, resume=False)
        return found

    monkeypatch.setattr(Store, "download", replace_meanwhile)
    with pytest.raises(forebay.ChangedError, match=f"'{URL}' was made again, or removed, while"):
        copy(tmp_path)
    assert not (tmp_path / ".forebay" / "cache.json").exists()


def test_a_folder_with_something_else_is_not_written_to(there, local, tmp_path):
    """Shards that are no part of a copy, or the ledger of a run."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "shard-00003.arrow").write_text("mine")
    make(Pictures(3), tmp_path / "two")
    (tmp_path / "two" / ".forebay" / "cache.json").unlink()
    for path in (tmp_path / "two").glob("*.arrow"):
        path.unlink()
    for name in ("one", "two"):
        with pytest.raises(forebay.OutputError, match=r"holds '(shard|ledger)[^']*', which is no"):
            copy(tmp_path / name)
    make(Pictures(3), tmp_path / "three")
    with pytest.raises(forebay.ChangedError, match="has a copy of an earlier cache"):
        copy(tmp_path / "three")
    (tmp_path / "four").mkdir()
    (tmp_path / "four" / ".forebay").symlink_to(tmp_path / "one")
    with pytest.raises(forebay.OutputError, match="is a link"):
        copy(tmp_path / "four")
    assert files(tmp_path / "one") == {"shard-00003.arrow": b"mine"}


@pytest.mark.parametrize(
    ("location", "options", "words"),
    [
        (URL, {"disk": "all"}, "directory=None is not a local folder"),
        (
            URL,
            {"disk": "all", "directory": "s3://bucket/x"},
            "'s3://bucket/x' is not a local folder",
        ),
        ("cache", {"disk": "all"}, "are for a cache in a bucket"),
        ("cache", {"directory": "copy"}, "are for a cache in a bucket"),
        (None, {}, "None names no folder"),
    ],
)
def test_impossible_openings_are_refused(there, location, options, words):
    """The message names the argument."""
    with pytest.raises(forebay.OptionError, match=words):
        forebay.open_cache(location, **options)


def test_where_there_is_no_cache_the_error_says_what_is_there(memory, tmp_path):
    """Nothing at all, which is a wrong URL, most often; or a cache that is not finished."""
    with pytest.raises(
        forebay.InputError, match=f"'{URL}' holds no finished cache\n  There is noth"
    ):
        copy(tmp_path)
    memory.pipe_file("/bucket/cache/shard-00000.arrow", b"")
    with pytest.raises(forebay.InputError, match=f"'{URL}' holds no finished cache\n  forebay.cac"):
        copy(tmp_path)
    assert os.listdir(tmp_path) == []


# ---- disks ---------------------------------------------------------------------------------------


@contextmanager
def mounted(folder, *options):
    """A small file system of its own, in memory, at `folder`."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", folder]
    done = subprocess.run(words, capture_output=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_copied(there, tmp_path):
    """The message has both sizes."""
    with mounted(tmp_path / "small", "size=32k") as folder:
        with pytest.raises(forebay.OutputError, match=r"[0-9.]+ kB of .* its disk has [0-9.]+ kB"):
            copy(folder)
        assert not list(folder.glob("*.arrow"))


def test_a_disk_that_fills_up_is_an_error_and_the_same_call_continues(
    there, local, tmp_path, monkeypatch
):
    """Nothing torn has the name of a shard."""
    monkeypatch.setattr(copies.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    with mounted(tmp_path / "small", "size=64k") as folder:
        with pytest.raises(forebay.OutputError, match="No space left on device"):
            copy(folder)
        found = files(folder)
        assert found.items() < files(local).items() and ".forebay/cache.json" not in found
        subprocess.run(["mount", "-o", "remount,size=10m", folder], check=True)
        copy(folder)
        assert files(folder) == files(local)


def test_a_read_only_disk_is_an_error_unless_the_copy_is_there(there, tmp_path):
    """Which needs no lock, and nothing written."""
    with mounted(tmp_path / "disk", "size=10m") as folder:
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        with pytest.raises(forebay.OutputError, match=r"(?s)Read-only file system.*another"):
            copy(folder)
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
        copy(folder)
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        assert len(copy(folder)) == 40


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user_is_an_error(there, tmp_path):
    """It names the folder, and says what to do."""
    tmp_path.chmod(0o755)
    for path in tmp_path.parents:
        if path.owner() == "root" and path.is_relative_to("/tmp"):
            path.chmod(path.stat().st_mode | 0o011)
    os.seteuid(65534)
    try:
        with pytest.raises(forebay.OutputError, match=f"(?s){tmp_path}.*Permission denied.*choose"):
            copy(tmp_path)
    finally:
        os.seteuid(0)


# ---- processes -----------------------------------------------------------------------------------

OPEN = """
cached = forebay.open_cache(sys.argv[1], directory=sys.argv[2], disk="all")
assert [cached[at]["label"] for at in range(40)] == [*range(40)]
"""
TWO = """
gate, child = Gate(Path(sys.argv[3])), os.fork()
if child:
    print(child)
    gate.wait()
{OPEN}
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)
"""
SECRET = "hunter2secret"


def await_text(path, text):
    """Wait until a file has a text in it."""
    deadline = time.monotonic() + PATIENCE_S
    while text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_two_openers_copy_once(local, tmp_path, script, is_killed):
    """The second one says whom it waits for, and goes on with what that one did if it is killed."""
    folder, gate = tmp_path / "copy", Gate(tmp_path)
    with served(local) as server:
        server.held = "shard-00030.arrow"
        two = script(TWO.replace("{OPEN}", OPEN), server.url, folder, tmp_path)
        gate.wait_reached()
        one = int((tmp_path / "stdout").read_text())
        assert server.reached.wait(PATIENCE_S)
        gate.open()
        await_text(tmp_path / "stderr", "waits until it is copied")
        kept = {path.name for path in folder.glob("*.arrow")}
        if is_killed:
            os.kill(one, signal.SIGKILL)
        server.released.set()
        code, _, err = two.end()
        assert code == is_killed * (256 - signal.SIGKILL), err
        once = kept if is_killed else {name for name in FILES if "cache.json" not in name}
        assert {server.gets[name] for name in once} == {1}
        assert server.held not in kept and len(kept) > 5
    assert f"pid {one} on " in err and err.count("waits") == 1
    assert files(folder) == files(local)
    assert not list(folder.glob(".shard*"))


@pytest.mark.slow
def test_ctrl_c_ends_a_copy_while_the_server_does_not_answer(local, tmp_path, script):
    """The process ends, and the same call continues."""
    folder = tmp_path / "copy"
    with served(local) as server:
        server.held = "shard-00020.arrow"
        one = script(OPEN, server.url, folder)
        assert server.reached.wait(PATIENCE_S)
        one.kill(signal.SIGINT)
        code, _, err = one.end()
        assert code == -signal.SIGINT and "KeyboardInterrupt" in err, err
        kept = {path.name for path in folder.glob("*.arrow")}
        server.released.set()
        assert script(OPEN, server.url, folder).end().code == 0
        assert {server.gets[name] for name in kept} == {1}
    assert files(folder) == files(local)


@pytest.mark.slow
@pytest.mark.parametrize("status", [403, pytest.param(401, marks=pytest.mark.thorough)])
def test_credentials_that_are_refused_are_never_printed(local, tmp_path, script, status):
    """The file is named that could not be read, and what to check."""
    with served(local) as server:
        server.status = status
        url = server.url.replace("://", f"://me:{SECRET}@")
        code, out, err = script(OPEN, url, tmp_path / "copy").end()
    assert code == 1 and SECRET not in out + err
    assert f"{server.url}/.forebay/cache.json cannot be read: " in err
    assert "your credentials" in err and f"{status}" in err
    assert not (tmp_path / "copy").exists()


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_an_error(bucket, tmp_path, script):
    """With the advice to check its name."""
    code, _, err = script(OPEN, "s3://no-such-bucket/cache", tmp_path / "copy").end()
    assert code == 1
    assert "'s3://no-such-bucket/cache' holds no finished cache\n" in err
    assert "There is nothing at all: check the URL, the bucket and your credentials" in err
