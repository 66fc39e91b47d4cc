"""What a scheduler does that wants its machine back: signals to every process of a program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forebay
import preempted

PROGRAM = Path(preempted.__file__)
EXAMPLE = Path(__file__).parents[1] / "examples" / "train_until_preempted.py"
SQUARES = [float(at) ** 2 for at in range(96)]
SIGNALS = ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"]
FORKED = [each for each in preempted.SETTINGS if each not in preempted.SLOW]


@pytest.fixture
def run(trainers, tmp_path):
    """Run the program; return what came of its work, and how often the handler was called.

    In the user's own process, it is checked, which prints the result as well.
    """

    def run(name, what):
        code, out, err = trainers.run(PROGRAM, name, what, tmp_path, cwd=tmp_path)
        assert code == 0, err
        *calls, result = out.splitlines()
        trainers.await_none_left()
        pid, result = json.loads(result)
        assert {*map(int, calls)} == {pid}, "called in a worker"
        return result, len(calls)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, FORKED) for name in SIGNALS),
        *(pytest.param(name, preempted.SLOW, marks=pytest.mark.full) for name in SIGNALS[:2]),
    ],
)
def test_a_loader_goes_on_after_a_signal_to_every_process(run, name, settings):
    """Each sample once in each of two epochs, in the order without signals.

    They come while the workers start, in mid-epoch, with the last batch, and while an epoch begins;
    the program first or the workers first. The user's handler is called once for each.
    """
    found, calls = run(name, ",".join(settings))
    assert calls == found.pop("signals")
    for each, samples in found.items():
        epochs = samples[:96], samples[96:]
        assert [*map(sorted, epochs)] == [SQUARES, SQUARES], each
        if preempted.SETTINGS[each].get("shuffle"):
            assert samples == found["seed" if "seed" in found else settings[0]]
            assert epochs[0] != epochs[1]
        elif each != "stream":
            assert epochs == (SQUARES, SQUARES)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNALS)
def test_a_job_goes_on_after_a_signal_to_every_process(run, name, tmp_path):
    """All is done, and nothing failed: what a dead worker had is done again."""
    for at in range(60):
        (tmp_path / f"{at:02}.txt").write_text("x" * at)
    found, calls = run(name, "jobs")
    assert 1 <= calls <= 7  # those that wait for the same process are one
    assert found == [[60, 0], [96, 0], SQUARES]


def end_by_signal(path):
    """Return a row; of "thrice" only the fourth time, and of "always" never."""
    tries = len([*path.parent.glob(f"{path.stem}.try*")])
    if path.stem == "always" or (path.stem == "thrice" and tries < 3):
        path.with_suffix(f".try{tries}").touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return {"tries": tries}


def test_an_input_is_not_blamed_for_a_worker_that_was_told_to_end(tmp_path):
    """Not even with retries=0, unless that comes again and again: it may send the signal itself."""
    for name in ("thrice", "other", "always"):
        (tmp_path / f"{name}.txt").touch()
    report = forebay.preprocess(
        end_by_signal,
        tmp_path / "*.txt",
        tmp_path / "out",
        num_workers=1,
        retries=0,
        progress=False,
        max_failures=1,
    )
    assert (report.done, report.failed) == (2, 1)
    assert "SIGTERM" in report.failures[0].message
    assert sorted(report.metadata.column("tries").to_pylist()) == [0, 3]


IN_A_CONTAINER = """
import os, signal, sys
from pathlib import Path
import forebay
from forebay.pools import processes

def work(path):
    if path.stem in "abc" and not path.with_suffix(".tried").exists():
        path.with_suffix(".tried").touch()
        os.kill(os.getppid(), signal.SIGTERM if path.stem == "a" else signal.SIGKILL)
    return {}

assert os.getpid() == 1
processes.REAP_S = 60.0
folder = Path(sys.argv[1])
report = forebay.preprocess(work, folder / "*.txt", folder / "out", num_workers=2, progress=False)
print(report.done, report.failed, [each for each in os.listdir("/proc") if each.isdigit()])
"""


@pytest.mark.slow
def test_the_first_process_of_a_container_keeps_no_dead_workers(tmp_path):
    """It is the parent of all whose own has ended, and nobody else waits for them."""
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt").touch()
    program = tmp_path / "program.py"
    program.write_text(IN_A_CONTAINER)
    command = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no namespace of processes can be made here")
    done = subprocess.run(
        [*command, sys.executable, program, tmp_path], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "8 0 ['1']\n"), done.stderr


# ---- without a handler ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_program_without_a_handler_ends_with_its_workers(script, tmp_path, name):
    """At once, whatever they do; nothing is left in memory or on the disk."""
    folder = tmp_path / "buffer"
    folder.mkdir()
    code, out, err = script(
        f"""
        import preempted
        buffer = forebay.Buffer("20MB", directory=sys.argv[1])
        loaders = [
            forebay.DataLoader(Numbers(1000, 10_000), 2, num_workers=2, **settings)
            for settings in ({{}}, {{"persistent_workers": True}}, {{"buffer": buffer}})
        ]
        iterators = [iter(each) for each in loaders]
        batches = [next(each) for each in iterators]
        preempted.signal_all(signal.{name}, os.getpid())
        """,
        folder,
    ).end()
    assert (code, out, err) == (-getattr(signal, name), "", "")
    assert list(folder.iterdir()) == []


# ---- stopped, and continued ----------------------------------------------------------------------


def train(checkpoint, *arguments, stop_after=None, name=signal.SIGTERM):
    """Run the example; after a number of steps, send a signal to all its processes."""
    command = [sys.executable, EXAMPLE, checkpoint, "--samples", "480", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        steps = []
        for line in process.stdout:
            steps.append(line)
            if len(steps) == stop_after:
                preempted.signal_all(name, process.pid)
    assert process.returncode == (0 if stop_after is None else 75)
    return steps


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("workers", ["2", "0"])
def test_a_preempted_training_continues_as_if_nothing_had_been(workers, tmp_path):
    """Stopped twice, in different epochs and by different signals: the same losses, to the bit."""
    whole = train(tmp_path / "whole.pt", "--num-workers", workers)
    assert len(whole) == 90
    parts = train(tmp_path / "it.pt", stop_after=10)
    assert 10 <= len(parts) < 90
    parts += train(tmp_path / "it.pt", stop_after=40, name=signal.SIGUSR1)
    assert 50 <= len(parts) < 90
    parts += train(tmp_path / "it.pt")
    assert parts == whole
    assert sorted(os.listdir(tmp_path)) == ["it.pt", "whole.pt"]


@pytest.mark.slow
@pytest.mark.full
def test_a_training_on_two_ranks_is_continued_on_one(tmp_path):
    """The first to see the signal stops all; the model is that of one rank, but for rounding."""
    train(tmp_path / "whole.pt")
    ranked = tmp_path / "ranked.pt"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, EXAMPLE, ranked, "--samples", "480"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        for number, _ in enumerate(process.stdout):
            if number == 10:
                preempted.signal_all(signal.SIGTERM, process.pid)
    batch = torch.load(ranked, weights_only=True)["loader"]
    assert (batch["epoch"], batch["batch"]) < (3, 0)
    train(ranked)
    models = [torch.load(tmp_path / f"{each}.pt")["model"] for each in ("whole", "ranked")]
    torch.testing.assert_close(*models, rtol=1e-4, atol=1e-5)
