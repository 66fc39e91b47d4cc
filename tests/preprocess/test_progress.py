"""Progress is shown where it can be, and never ends the work."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from driving import SOURCE, make_inputs

from forebay.observe import progress
from forebay.observe.progress import Progress, note

# Shows a line at every update; the work makes sure that nothing else has the number of stderr.
SCRIPT = """
import os, sys
import forebay
from forebay.observe import progress

progress.FIRST_LINE_S = progress.SLOWEST_LINE_S = 0.0
inputs, output, verb = sys.argv[1:]


def work(source, out):
    assert os.path.exists("/proc/self/fd/2")
    target = os.readlink("/proc/self/fd/2")
    assert ".forebay" not in target and "socket" not in target, target


class Samples:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return float(index)


if __name__ == "__main__":
    for workers in (0, 2):
        there = f"{output}{workers}"
        if verb == "preprocess":
            print(forebay.preprocess(work, inputs, there, num_workers=workers).done)
        elif verb == "predict":
            print(forebay.predict(lambda batch: batch, Samples(), there, num_workers=workers,
                                  batch_size=8, part_size=10).done)
        else:
            print(len(forebay.cache(Samples(), there, num_workers=workers)))
"""

DONE = {"preprocess": "6\n6\n", "predict": "40\n40\n", "cache": "40\n40\n"}
VERBS = [
    "preprocess",
    *(pytest.param(verb, marks=pytest.mark.slow) for verb in ("predict", "cache")),
]


@pytest.fixture
def command(tmp_path):
    make_inputs(tmp_path / "in", 6)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return [sys.executable, script, tmp_path / "in", tmp_path / "out"]


def run(command, *, prefix=(), stderr=subprocess.PIPE):
    """Run it to its end; return its exit code and what it printed."""
    done = subprocess.run(
        [*prefix, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_lines_are_shown_where_a_person_reads_them(command, verb):
    """So that the next tests are about lines that would be written."""
    code, out, err = run([*command, verb])
    assert (code, out) == (0, DONE[verb])
    assert "forebay: " in err and " left\n" in err


@pytest.mark.parametrize(
    ("verb", "where"),
    [
        ("preprocess", "closed"),
        ("preprocess", "full"),
        ("preprocess", "no reader"),
        pytest.param("predict", "no reader", marks=pytest.mark.slow),
        pytest.param("cache", "closed", marks=pytest.mark.slow),
    ],
)
def test_a_stderr_that_cannot_be_written_to_ends_nothing(command, verb, where):
    """All is done, and the exit code is that of a success."""
    if where == "no reader":
        reader, writer = os.pipe()
        os.close(reader)
        try:
            code, out, _ = run([*command, verb], stderr=writer)
        finally:
            os.close(writer)
    else:
        redirection = {"closed": "2>&-", "full": "2>/dev/full"}[where]
        code, out, _ = run(
            [*command, verb], prefix=("sh", "-c", f'exec "$@" {redirection}', "sh"), stderr=None
        )
    assert (code, out) == (0, DONE[verb])


class Broken(io.StringIO):
    """A user's own stderr, which refuses everything."""

    def write(self, text):
        raise RuntimeError("no")

    def isatty(self):
        raise AttributeError("isatty")


@pytest.mark.parametrize("stream", [None, Broken(), "closed"], ids=["none", "broken", "closed"])
def test_a_replaced_stderr_ends_nothing(stream, monkeypatch, capsys):
    """Also one that is no file at all; and nothing lands on stdout instead."""
    if stream == "closed":
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(sys, "stderr", stream)
    shown = Progress(10, clock=lambda: 1.0)
    shown.update(1, 1)
    shown.close()
    note("words")
    monkeypatch.undo()
    assert (shown.done, shown.failed) == (1, 1)
    assert capsys.readouterr().out == ""


def test_what_could_not_be_written_is_forgotten(tmp_path, monkeypatch):
    """Python would try to write it once more at its end, and exit with code 120."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        note("lost")
        monkeypatch.undo()
        full.flush()
        assert os.readlink(f"/proc/self/fd/{full.fileno()}") == "/dev/full"
