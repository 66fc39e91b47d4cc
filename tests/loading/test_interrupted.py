"""An exception that a signal's handler raises anywhere in `next()`: a watchdog, a preemption."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forebay

SOURCE = str(Path(forebay.__file__).parent) + os.sep
SAMPLES, BATCH = 48, 4


class AlarmError(Exception):
    """What the handler raises."""


class Stream(torch.utils.data.IterableDataset):
    """The same samples, read by workers in turns."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        own, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for at in range(own, SAMPLES // BATCH, count):
            yield from range(at * BATCH, (at + 1) * BATCH)


def raised_at(moment):
    """Return a profile function that raises an AlarmError at the n-th moment, and what is left.

    A moment is one at which Python may call a signal's handler in forebay's code: a function
    begins, or a call of one that is written in C has ended.
    """
    left = [moment]

    def profile(frame, event, argument):
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(SOURCE):
            left[0] -= 1
            if not left[0]:
                raise AlarmError

    return profile, left


def interrupted_epoch(loader, moment):
    """Read an epoch whose third batch is interrupted at the n-th moment.

    Returns:
        Each batch's first sample; how it ended; whether there was such a moment.
    """
    found, iterator = [], iter(loader)
    profile, left = raised_at(moment)
    try:
        for at in range(1 + SAMPLES // BATCH):
            if at == 2:
                sys.setprofile(profile)
            try:
                batch = next(iterator)
            except AlarmError:
                continue
            finally:
                sys.setprofile(None)
            found.append(int(batch[0]))
        for batch in iterator:  # the exception cost one call of next()
            found.append(int(batch[0]))
    except StopIteration:
        return found, "ended", left[0] <= 0
    except RuntimeError as error:
        end = "refused" if "was interrupted during its work" in str(error) else str(error)
        return found, end, left[0] <= 0
    return found, "ended", left[0] <= 0


class Once(list):
    """Samples that are not made a second time."""

    made_once = True


def try_all(dataset, arguments, step):
    """Interrupt the third batch of an epoch at each moment, or each of `step`."""
    whole = list(range(0, SAMPLES, BATCH))
    moment, exists = 1, True
    gc.collect()
    gc.disable()  # a loader's `__del__` that runs by chance would be interrupted instead
    while exists:
        with forebay.DataLoader(dataset, BATCH, **arguments) as loader:
            found, end, exists = interrupted_epoch(loader, moment)
            assert end in ("ended", "refused"), (moment, end)
            assert found == [each for each in whole if each in found], (moment, found)
            assert end == "refused" or len(found) >= len(whole) - 1, (moment, found)
            after = [int(batch[0]) for batch in loader]
            assert after == whole, (moment, after)
        moment += step
    assert moment > 10, moment  # at the last one, nothing was interrupted


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        pytest.param("Once(range(SAMPLES)), dict(num_workers=0, seed=0), 1", id="no workers"),
        pytest.param("Once(range(SAMPLES)), dict(num_workers=2, seed=0), 4", id="workers"),
        pytest.param("Stream(), dict(num_workers=2), 9", id="stream"),
        pytest.param(
            "Once(range(SAMPLES)), dict(num_workers=1, seed=0, buffer='1MB'), 4", id="buffer"
        ),
        pytest.param("range(SAMPLES), dict(num_workers=0, seed=0), 40", id="samples made again"),
    ],
)
def test_an_exception_from_a_signal_at_any_moment_loses_at_most_its_batch(call):
    """The next batch comes in order, or an error says to begin anew; nothing hangs or comes twice.

    Also between a result that was taken and the record of its request. The batch of the call that
    was interrupted may be lost, as with torch's class. The next epoch is whole. (Within a sampler,
    it ends the sampler and so its epoch, as with torch's; with these arguments there is none.)
    """
    program = f"from test_interrupted import *; try_all({call})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
