"""Progress is shown where it can be, and never ends the work."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest
from driving import SOURCE, make_inputs

from forebay.observe import progress
from forebay.observe.progress import Progress, note, run_label

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


def command_in(folder):
    """Return the command of a run with everything in a folder."""
    make_inputs(folder / "in", 6)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return [sys.executable, script, folder / "in", folder / "out"]


@pytest.fixture
def command(tmp_path):
    return command_in(tmp_path)


def run(command, *, prefix=(), stderr=subprocess.PIPE):
    """Run it to its end; return its exit code and what it printed."""
    done = subprocess.run(
        [*prefix, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    return done.returncode, done.stdout, done.stderr


# Both take torch, and what they show is shown by the same lines.
THOROUGH = [pytest.param(verb, marks=pytest.mark.thorough) for verb in ("predict", "cache")]


@pytest.fixture(scope="module", params=["preprocess", *THOROUGH])
def readable(request, tmp_path_factory):
    """A verb, and a run of it whose lines are read: its exit code and what it printed."""
    command = command_in(tmp_path_factory.mktemp(request.param))
    return request.param, run([*command, request.param])


@pytest.mark.slow
def test_lines_are_shown_where_a_person_reads_them(readable):
    """So that the next tests are about lines that would be written."""
    verb, (code, out, err) = readable
    assert (code, out) == (0, DONE[verb])
    assert "forebay: " in err and " left\n" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "where"),
    [
        ("preprocess", "closed"),
        ("preprocess", "full"),
        ("preprocess", "no reader"),
        pytest.param("predict", "no reader", marks=pytest.mark.thorough),
        pytest.param("cache", "closed", marks=pytest.mark.thorough),
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
    assert (shown.done, shown.trace.failed) == (1, 1)
    assert capsys.readouterr().out == ""


def test_what_could_not_be_written_is_forgotten(tmp_path, monkeypatch):
    """Python would try to write it once more at its end, and exit with code 120."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        note("lost")
        monkeypatch.undo()
        full.flush()
        assert os.readlink(f"/proc/self/fd/{full.fileno()}") == "/dev/full"


# ---- labels, and bars in notebooks --------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "label"),
    [
        ("build/pieces/", "cache pieces"),
        ("s3://bucket/pieces", "cache pieces"),
        ("a\nb\x1b", "cache a\\nb\\x1b"),
        ("/", "cache /"),
        ("x" * 50, f"cache {'x' * 39}…"),
    ],
)
def test_a_label_names_the_output(output, label):
    """Its last name, whatever is in it, in one short line."""
    assert run_label("cache", output) == label


@pytest.mark.slow
def test_lines_say_what_is_done_and_count_what_the_user_counts(readable):
    """Samples for cache and predict, inputs for preprocess."""
    verb, (_, _, err) = readable
    unit, total = ("input", 6) if verb == "preprocess" else ("sample", 40)
    for workers in (0, 2):
        assert f"forebay: {verb} out{workers}: {total} of {total} done, 0 failed" in err
    assert f" {unit}s/s" in err


class Bar:
    """Stands for tqdm's bar, and keeps what it is told."""

    def __init__(self, **settings):
        self.settings, self.at, self.is_closed = settings, settings["initial"], False

    def update(self, count):
        self.at += count

    def set_postfix(self, **values):
        self.settings |= values

    def close(self):
        self.is_closed = True


class Shell:
    """A shell of IPython, in a kernel or on a terminal."""

    def __init__(self, *applications):
        self.config = dict.fromkeys(applications)

    def get_ipython(self):
        return self


def test_a_notebook_has_tqdms_own_bar_for_notebooks(monkeypatch):
    """With the label, the unit and the counts; stderr is no terminal there."""
    monkeypatch.setitem(sys.modules, "IPython", Shell("IPKernelApp"))
    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    shown = Progress(10, done=2, unit="sample", label="cache out")
    bar = shown._bar
    assert isinstance(bar, Bar)
    shown.update(3, 1)
    shown.close()
    assert (bar.at, bar.is_closed) == (6, True)
    named = {key: bar.settings[key] for key in ("desc", "total", "unit", "failed")}
    assert named == {"desc": "cache out", "total": 10, "unit": "sample", "failed": 1}


@pytest.mark.parametrize(
    "shell", [None, Shell("TerminalIPythonApp"), object()], ids=["none", "terminal", "odd"]
)
def test_elsewhere_there_are_lines(shell, monkeypatch):
    """IPython on a terminal is a terminal like any other; here stderr is none."""
    if shell is None:
        monkeypatch.delitem(sys.modules, "IPython", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "IPython", shell)
    shown = Progress(10)
    assert shown._bar is None
    shown.close()


WITHOUT_WIDGETS = """
import sys, types, warnings
warnings.simplefilter("error")
sys.modules["ipywidgets"] = None
kernel = types.ModuleType("IPython")
kernel.get_ipython = lambda: types.SimpleNamespace(config={"IPKernelApp": {}})
sys.modules["IPython"] = kernel
from forebay.observe.progress import Progress
shown = Progress(10, label="cache out")
shown.update(10, 0)
shown.close()
"""


def test_a_notebook_without_widgets_has_a_bar_of_text():
    """And no warning about them."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_WIDGETS],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "cache out: 100%" in done.stderr
    assert "10/10" in done.stderr


def test_a_terminal_that_does_not_tell_its_size_has_a_bar():
    """As in a container with a terminal that nobody is attached to."""
    code = "from forebay.observe.progress import Progress; Progress(10, label='cache out').close()"
    mine, theirs = pty.openpty()  # 0 columns
    with open(mine, "rb", buffering=0) as screen:
        try:
            subprocess.run(
                [sys.executable, "-c", code],
                stderr=theirs,
                check=True,
                timeout=60,
                env={**os.environ, "PYTHONPATH": SOURCE},
            )
            assert b"cache out:" in screen.read(4096)
        finally:
            os.close(theirs)
