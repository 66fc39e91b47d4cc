"""All four calls in surroundings that containers, clusters and small machines have.

Most of them are set up in a process of its own after torch was imported, which takes time; a few
need a new interpreter. `docs/explanation/surroundings.md` has the same table.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import forebay

SOURCE = str(Path(forebay.__file__).parents[1])

# A program that makes all four calls, in a folder with two inputs.
PROGRAM = """
import os, sys
import forebay

def work(source, out):
    out.file(source.name).write_bytes(source.read_bytes())
    return {"size": os.path.getsize(source)}

def double(batch):
    return batch * 2

def main(folder):
    quiet = {"progress": False, "num_workers": 1}
    inputs, out, made = (os.path.join(folder, name) for name in ("in", "out", "made"))
    found = [forebay.preprocess(work, inputs, out, **quiet).done]
    cached = forebay.cache([*map(float, range(8))], os.path.join(folder, "cache"), **quiet)
    with forebay.DataLoader(cached, 4, num_workers=1, buffer="1MB") as loader:
        found += [batch.tolist() for batch in loader]
    found.append(forebay.predict(double, cached, made, batch_size=4, **quiet).done)
    with open(os.path.join(folder, "found"), "w") as file:  # a stream may be closed
        print(found, file=file)

if __name__ == "__main__":
    main(sys.argv[1])
"""
FOUND = "[2, [0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], 8]\n"

# Of a script: a mount namespace of its own, in which `mount` works; otherwise it ends.
MOUNTS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def mount(source, target, kind=None, flags=0, options=None):
    if libc.mount(source, target, kind, flags, options):
        print("not permitted")
        sys.exit()
if libc.unshare(0x20000):  # CLONE_NEWNS
    print("not permitted")
    sys.exit()
mount(None, b"/", None, (1 << 18) | (1 << 14))  # MS_PRIVATE | MS_REC
"""
SMALL_TMP = """
folder = os.path.join(sys.argv[1], "tmp")
os.mkdir(folder)
mount(b"tmpfs", folder.encode(), b"tmpfs", {flags}, {options!r})
if {is_full}:
    open(os.path.join(folder, "file"), "w").close()
os.environ["TMPDIR"] = os.environ["HOME"] = folder
"""
LONG = """
folder = os.path.join(sys.argv[1], "x" * 100)
os.mkdir(folder)
os.environ.update({name: folder for name in ("TMPDIR", "HOME", "XDG_RUNTIME_DIR")})
"""
# Less than what a loader reserves for its batches; beyond what torch, its threads and their heaps
# have mapped on this machine.
ADDRESSES = (
    "import resource; size = int(open('/proc/self/statm').read().split()[0]); "
    "limit = size * resource.getpagesize() + (12 << 30); "
    "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))"
)
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_{0}, ({1}, {1}))"
READ_ONLY = """
folder = sys.argv[1].encode()
mount(folder, folder, None, 1 << 12)  # MS_BIND: this one stays writable
mount(None, b"/", None, (1 << 5) | (1 << 12) | 1)  # MS_REMOUNT | MS_BIND | MS_RDONLY
assert os.statvfs("/").f_flag & os.ST_RDONLY
"""
# The machine was suspended for an hour after the first input: the clock of the day goes on.
SUSPENDED = """
import time
earlier, flag = time.time, os.path.join(sys.argv[1], "out", "a.txt")
time.time = lambda: earlier() + 3600 * os.path.exists(flag)
"""

FORKED = {
    "nothing special": "",
    "/dev/shm of 64 MB": MOUNTS + "mount(b'tmpfs', b'/dev/shm', b'tmpfs', 0, b'size=64m')",
    "no /dev/shm": MOUNTS + "mount(b'tmpfs', b'/dev/shm', b'tmpfs', 1, b'size=4k,mode=000')",
    "no /proc": MOUNTS + "mount(b'tmpfs', b'/proc', b'tmpfs', 1, None)",
    "no HOME, no TMPDIR": "[os.environ.pop(name, None) for name in ('HOME', 'TMPDIR')]",
    "HOME and TMPDIR that are missing": "os.environ |= {'HOME': '/none', 'TMPDIR': '/none'}",
    "HOME and TMPDIR that are full": MOUNTS
    + SMALL_TMP.format(flags=0, options=b"size=4k,nr_inodes=2", is_full=True),
    "HOME and TMPDIR with noexec": MOUNTS
    + SMALL_TMP.format(flags=8, options=b"size=4m", is_full=False),
    "HOME and TMPDIR of 100 characters": LONG,
    "a read-only root": MOUNTS + READ_ONLY,
    "ulimit -n 64": LIMIT.format("NOFILE", 64),
    "ulimit -u": LIMIT.format("NPROC", 64),
    "ulimit -v": ADDRESSES,
    "no stream is open": "[os.close(each) for each in (0, 1, 2)]",
    "a machine that was suspended": SUSPENDED,
}


@pytest.fixture
def folder(tmp_path):
    """A folder with two inputs."""
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "in" / name).write_text(name)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("setup", FORKED.values(), ids=FORKED)
def test_all_four_calls_work(script, folder, setup):
    """Whatever the surroundings of the process lack."""
    ending = script(setup + PROGRAM, folder).end()
    if ending.out == "not permitted\n":
        pytest.skip("nothing can be mounted here")
    assert ending.code == 0, ending.err
    assert (folder / "found").read_text() == FOUND


@pytest.mark.slow
def test_files_that_must_be_small_are_said_with_their_limit(script, folder):
    """`ulimit -f`: runs with small outputs work, and a loader's shared memory is a large file."""
    ending = script(LIMIT.format("FSIZE", 1 << 20) + PROGRAM, folder).end()
    assert ending.code == 1
    assert "OptionError: shared memory for batches could not be mapped" in ending.err
    assert "`ulimit -f`" in ending.err
    assert len(list((folder / "out").glob("*.txt"))) == 2


STOPPED = (
    PROGRAM.replace("if __name__", "if False and __name__")
    + """
from forebay.pools import zygote_handle
zygote_handle.CHECK_S, zygote_handle.ZYGOTE_S = 0.1, 2.0
def wait(value):
    if not os.path.exists(os.path.join(sys.argv[1], "reached")):
        open(os.path.join(sys.argv[1], "reached"), "w").close()
        while not os.path.exists(os.path.join(sys.argv[1], "go on")):
            pass
    return value
values = list(forebay.DataLoader([wait] * 4, None, num_workers=1, collate_fn=lambda each: each(7)))
assert values == [7] * 4, values
main(sys.argv[1])
"""
)


@pytest.mark.slow
def test_a_program_that_was_stopped_goes_on(script, folder):
    """With all of its processes, as by Ctrl-Z or a scheduler, for longer than any limit here."""
    running = script(STOPPED, folder)
    end = time.monotonic() + 180
    while not (folder / "reached").exists():
        assert time.monotonic() < end, "no sample was asked for"
        time.sleep(0.01)
    tree = [running.pid, *descendants(running.pid)]
    for pid in tree:
        os.kill(pid, signal.SIGSTOP)
    (folder / "go on").touch()
    time.sleep(2.5)  # the pause
    for pid in tree:
        os.kill(pid, signal.SIGCONT)
    ending = running.end()
    assert (ending.code, ending.err) == (0, "")
    assert (folder / "found").read_text() == FOUND


def descendants(pid):
    """Return the processes that descend from one."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(child)]
    return found


# ---- new interpreters ----------------------------------------------------------------------------

# By name: what is before the interpreter, its flags, how it gets the program, and its environment.
NO_NAME = ("setpriv", "--reuid=54321", "--clear-groups")
KEEPS = ("--inh-caps=+dac_override,+fowner", "--ambient-caps=+dac_override,+fowner")
STARTED = {
    "LANG=C and names that are not ASCII": ((), (), "file", {"LANG": "C", "LC_ALL": "C"}),
    "python -O": ((), ("-O",), "file", {}),
    "python -I": ((), ("-I",), "argument", {}),
    "a program from stdin": ((), (), "stdin", {}),
    "a user without a name": ((*NO_NAME, *KEEPS), (), "file", {}),
    "no terminal": (("setsid", "-w"), (), "file", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("prefix", "flags", "way", "more"), STARTED.values(), ids=STARTED)
def test_all_four_calls_work_in_such_an_interpreter(folder, prefix, flags, way, more):
    """However it was started."""
    if prefix and shutil.which(prefix[0]) is None:
        pytest.skip(f"no {prefix[0]} here")
    if prefix and subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip(f"{prefix[0]} is not permitted here")
    if more:
        (folder / "in" / "b.txt").rename(folder / "in" / "Übung ☃.txt")
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    isolated = f"import sys; sys.path.insert(0, {SOURCE!r}); sys.argv = ['', {str(folder)!r}]\n"
    given = {
        "file": [program, folder],
        "argument": ["-c", isolated + PROGRAM],
        "stdin": ["-", folder],
    }[way]
    done = subprocess.run(
        [*prefix, sys.executable, *flags, *given],
        input=PROGRAM.encode() if way == "stdin" else b"",
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE, **more},
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert (folder / "found").read_text() == FOUND
    assert len(list((folder / "out").glob("*.txt"))) == 2


def test_the_document_has_a_row_for_each():
    """Which of them are tried."""
    page = Path(__file__).parents[1] / "docs" / "explanation" / "surroundings.md"
    rows = re.findall(r"^\| ([^|]+?) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    shown = {each.replace("`", "") for each in rows}
    assert {*FORKED, *STARTED} - {"nothing special"} <= shown
