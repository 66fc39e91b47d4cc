"""The file that a loader shows itself in: whole for readers, harmless for the writer."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import weakref
from weakref import WeakMethod

import pytest
from torch.utils.data import Dataset

from forebay import DataLoader
from forebay.base import machine
from forebay.loading.facts import LiveLoader
from forebay.observe import diagnosis
from forebay.observe.diagnosis import LEAST_STEPS
from forebay.show import live_page as show_page
from forebay.show import top
from forebay.show.live_page import PAGE_BYTES, LivePage, is_dead, read_page
from forebay.show.top import live_views


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Have the folder in a runtime folder of the test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    # Others may run on this machine.
    monkeypatch.setattr(top, "private_folders", lambda: [str(tmp_path / "forebay")])
    return tmp_path / "forebay"


def test_what_is_written_is_read(folder) -> None:
    """In one private file, which is removed."""
    page = LivePage()
    for number in range(3):
        page({"kind": "loader", "number": number})
        (path,) = folder.iterdir()
        data = read_page(str(path))
        assert (data["number"], data["pid"]) == (number, os.getpid())
        assert not is_dead(data)
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    page.remove()
    assert list(folder.iterdir()) == []


class Slow(Dataset):
    """Samples that take long enough for each step to be recorded by itself."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(0.003)
        return index


def test_the_diagnosis_is_made_by_who_looks(folder, monkeypatch) -> None:
    """A training writes numbers only, at once when there are enough of them."""
    with DataLoader(Slow(), num_workers=0) as loader:
        show = LiveLoader(WeakMethod(loader._kind), weakref.ref(loader._loader_progress))
        loader._loader_progress.trace.publish_from(math.inf, lambda: show)  # only when it is called
        batches, seen = iter(loader), []
        for count in (3, 4 * LEAST_STEPS):
            with monkeypatch.context() as training:
                training.setattr(diagnosis, "diagnose", None)
                training.setattr(diagnosis, "recorded_work", None)
                for _ in range(count):
                    next(batches)
                show(loader._loader_progress.trace)
            (view,) = [each for each in live_views() if "Slow(" in each.title]
            seen.append(view.verdict)
    assert "too little" in seen[0]
    assert seen[1]
    assert "too little" not in seen[1]


def test_a_closed_loader_is_shown_no_more(folder) -> None:
    """Until it is used again."""
    with DataLoader(Slow(), num_workers=0) as loader:
        trace = loader._loader_progress.trace
        for _ in range(2):
            next(iter(loader))
            trace.show(time.perf_counter())
            assert [each.suffix for each in folder.iterdir()] == [".page"]
            loader.close()
            assert list(folder.iterdir()) == []


def test_a_reader_never_sees_half_a_page(folder) -> None:
    """While a process writes as fast as it can, every look finds one state."""
    code = """
        import itertools
        from forebay.show.live_page import LivePage
        page = LivePage()
        page({"number": 0, "copy": [0] * 1000})
        print(flush=True)
        for number in itertools.count(1):
            page({"number": number, "copy": [number] * 1000})
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE
    ) as writer:
        writer.stdout.readline()
        (path,) = folder.glob("*.page")
        seen = []
        while len(seen) < 2000 or seen[0] == seen[-1]:
            data = read_page(str(path))
            assert data["copy"] == [data["number"]] * 1000
            seen.append(data["number"])
        writer.kill()
    assert seen == sorted(seen)


DAMAGED = {
    "empty": b"",
    "torn": b'{"a":1',
    "more": b'{"a":1}x',
    "no UTF-8": b'{"a":"\xff"}',
    "long": b'{"a":1}'.ljust(PAGE_BYTES + 1),
    "random": os.urandom(PAGE_BYTES),
    "zeros": bytes(PAGE_BYTES),
    "list": b"[1]",
    "number": b"1",
    "deep": b"[" * 8000,
    "digits": b"9" * 6000,
    "string": b'"\\ud800"',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_page_is_none(tmp_path, content) -> None:
    """It is data: whatever is in the file, nothing but None or a dict comes out."""
    (tmp_path / "x.page").write_bytes(content)
    assert read_page(str(tmp_path / "x.page")) is None


def test_links_and_pipes_are_not_read(tmp_path) -> None:
    """A link leads elsewhere, and a pipe would block."""
    (tmp_path / "real").write_text("{}")
    (tmp_path / "link.page").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe.page")
    assert read_page(str(tmp_path / "link.page")) is None
    assert read_page(str(tmp_path / "pipe.page")) is None


@pytest.mark.parametrize("kind", ["link", "open", "file", "foreign"])
def test_a_folder_that_others_may_enter_is_not_used(folder, monkeypatch, kind) -> None:
    """A link, a folder with other permissions or another owner, a file: nothing is written."""
    other = folder.parent / "other"
    other.mkdir(mode=0o700)
    if kind == "link":
        folder.symlink_to(other)
    elif kind == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o755 if kind == "open" else 0o700)
    if kind == "foreign":
        user = os.geteuid()
        monkeypatch.setattr(machine.os, "geteuid", lambda: user + 1)
    assert not machine.is_private(str(folder))
    monkeypatch.setattr(machine, "private_folders", lambda: [str(folder)])
    LivePage()({"a": 1})
    assert list(other.iterdir()) == []
    assert kind in ("link", "file") or list(folder.iterdir()) == []


@pytest.mark.parametrize("fault", ["full", "unserializable", "large"])
def test_no_fault_reaches_the_trainer(folder, monkeypatch, fault) -> None:
    """A full disk, data that do not fit: there is no file, and no error."""
    data = {"a": 1}
    if fault == "full":

        def fail(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(show_page.os, "replace", fail)
    else:
        data = {"a": object()} if fault == "unserializable" else {"a": "x" * PAGE_BYTES}
    LivePage()(data)
    assert not folder.exists() or list(folder.iterdir()) == []


def test_a_folder_that_vanishes_is_made_again(folder) -> None:
    """The system removes a user's runtime folder when the last session ends."""
    page = LivePage()
    page({"a": 1})
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    page({"a": 2})
    (path,) = folder.iterdir()
    assert read_page(str(path))["a"] == 2
    page.remove()


def test_a_fork_leaves_the_page_of_its_parent(folder) -> None:
    """It has its own, and removes only that."""
    page = LivePage()
    page({"a": 1})
    (mine,) = folder.iterdir()
    pid = os.fork()
    if not pid:
        page.remove()
        page({"a": 2})
        ok = len(list(folder.iterdir())) == 2 and read_page(str(mine))["a"] == 1
        page.remove()
        os._exit(0 if ok and list(folder.iterdir()) == [mine] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    page.remove()


def test_what_workers_copy_is_part_of_the_verdict(folder) -> None:
    """As the trainer wrote it on its page; anything else there is not shown."""
    page = LivePage()
    page({"kind": "loader", "title": "a loader", "memory_note": "dataset.items is\na list."})
    (view,) = [each for each in live_views() if each.pid == os.getpid()]
    assert view.verdict == "dataset.items is a list."
    page({"kind": "loader", "title": "a loader", "memory_note": ["no", "string"]})
    (view,) = [each for each in live_views() if each.pid == os.getpid()]
    assert view.verdict == ""
    page.remove()


def test_pages_of_the_dead_are_removed(folder) -> None:
    """By the second page of the next writer; others stay, and for an hour what cannot be read."""
    code = 'from forebay.show.live_page import LivePage; LivePage()({"a": 1})'
    done = subprocess.run([sys.executable, "-c", f"{code}; import os; os._exit(0)"])
    assert done.returncode == 0
    (dead,) = folder.iterdir()
    data = read_page(str(dead))
    assert is_dead(data)
    elsewhere = folder / "1-a.page"
    elsewhere.write_text(json.dumps({**data, "kernel": "another"}))
    unknown = folder / "2-b.page"
    unknown.write_bytes(b"x")
    torn = folder / "4-d.page.new"  # its writer was killed within a write
    torn.write_bytes(b"x")
    os.utime(torn, (0, 0))
    unnamed = folder / "5-e.page.new"  # and this one's before it renamed the file
    unnamed.write_text(json.dumps(data))
    # The same number, of a process that began at another time.
    reused = folder / "3-c.page"
    reused.write_text(json.dumps({**data, "pid": os.getpid(), "process_start": "1"}))
    page = LivePage()
    for _ in range(2):
        page({"a": 1})
    left = set(folder.iterdir())
    assert {elsewhere, unknown} < left
    assert not {dead, reused, torn, unnamed} & left
    page.remove()


def test_the_first_page_imports_little(folder) -> None:
    """It is written within a step of the training: neither a simulation nor files are needed."""
    code = """
        import sys
        from forebay.observe.page_numbers import as_numbers
        from forebay.show.live_page import LivePage
        LivePage()({"a": 1})
        late = {"observe.simulation", "observe.diagnosis", "base.files"}
        print({name for name in late if f"forebay.{name}" in sys.modules})
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("pid", [None, "1", -1, 0, True, 2**40, 1.5])
def test_a_process_that_cannot_be_is_not_looked_for(pid) -> None:
    """A page may name anything: no signal goes to a group or to all processes."""
    data = {"pid": pid, "process_start": "1", "kernel": show_page.kernel()}
    assert not is_dead(json.loads(json.dumps(data)))
