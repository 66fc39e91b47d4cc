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

import preempted
from kit.leaks import no_leaks

PROGRAM = Path(preempted.__file__)
EXAMPLE = Path(__file__).parents[1] / "examples" / "train_until_preempted.py"
SQUARES = [float(at) ** 2 for at in range(96)]
SIGNALS = ["SIGTERM", "SIGUSR2", "SIGUSR1", "SIGHUP"]


@pytest.fixture(autouse=True)
def leaves_nothing():
    with no_leaks():
        yield


def run(name, what, folder):
    """Run the program; return what came of its work, and which processes called the handler."""
    command = [sys.executable, PROGRAM, name, what, folder]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    *calls, result = out.splitlines()
    return json.loads(result), [int(each) == process.pid for each in calls]


@pytest.mark.slow
@pytest.mark.parametrize("settings", preempted.SETTINGS)
@pytest.mark.parametrize("name", SIGNALS)
def test_a_loader_goes_on_after_a_signal_to_every_process(name, settings, tmp_path):
    """Each sample once in each of two epochs, in the order without signals.

    They come while the workers start, twice in a row, with the last batch, and while an epoch
    begins. The user's handler is called in the user's process alone.
    """
    samples, calls = run(name, settings, tmp_path)
    assert all(calls), "called in a worker"
    assert 1 <= len(calls) <= 8  # signals that wait for the same process are one
    epochs = samples[:96], samples[96:]
    if settings == "torch's arguments":
        assert epochs == (SQUARES, SQUARES)
    else:
        assert samples == preempted.load(preempted.SETTINGS[settings], 0)
        assert [*map(sorted, epochs)] == [SQUARES, SQUARES]
        assert epochs[0] != epochs[1]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["preprocess", "predict", "cache"])
@pytest.mark.parametrize("name", SIGNALS)
def test_a_job_goes_on_after_a_signal_to_every_process(name, what, tmp_path):
    """All is done, and nothing failed: what a dead worker had is done again."""
    for at in range(60):
        (tmp_path / f"{at:02}.txt").write_text("x" * at)
    result, calls = run(name, what, tmp_path)
    assert calls and all(calls), "called in a worker"
    assert result == {"preprocess": [60, 0], "predict": [96, 0], "cache": SQUARES}[what]


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
