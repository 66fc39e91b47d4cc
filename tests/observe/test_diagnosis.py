"""Why training waits: from made-up traces for each cause, and from real loaders."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from forebay import AutoWorkers, Buffer, DataLoader, Diagnosis
from forebay.base.formatting import byte_size
from forebay.buffer import buffer_of
from forebay.observe.causes import Causes
from forebay.observe.diagnosis import LEAST_STEPS, OTHER_RATE, diagnose
from forebay.observe.measurements import (
    Fetched,
    MadeRecord,
    Measured,
    Setup,
    SlowSample,
    StepRecord,
)
from forebay.observe.record import FINEST_S
from forebay.observe.recorded_work import IDLE_CORES, recorded_work, slowdown
from forebay.observe.simulated_loader import BUSY_CORES, FILLED, SimulatedLoader
from forebay.observe.simulation import UNLIMITED, Work, depth_of, simulate, stretched

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def trace_of(
    steps,
    setup,
    batch_s,
    *,
    cpu=0.0,
    queued=0.0,
    slow=None,
    epoch=0,
    start_s=0.0,
    trainer_cpu=0.0,
    read=0,
    idle=None,
    threads=0.0,
    system=0.0,
    faults=0,
):
    """Return what a loader would record whose batches and steps take these times.

    Args:
        steps: Seconds of each step.
        setup: Of the loader, whose workers take turns.
        batch_s: Seconds of each batch, or of all.
        cpu: Part of them that is processor time.
        queued: Part of them that is waiting for a core.
        slow: By batch: seconds of its slowest sample.
        epoch: Batches of an epoch; 0 for one epoch.
        start_s: Seconds that workers take to start.
        trainer_cpu: Processor time of the trainer's process for a step.
        read: Bytes that are read from storage for a batch.
        idle: Part of the time that the cores are idle.
        threads: Processor time of other threads of a worker, as a part of the batch's time.
        system: Processor time in the system, as a part of the batch's time.
        faults: Page faults for a batch.
    """
    count, workers = len(steps), setup.num_workers
    times = batch_s if isinstance(batch_s, list) else [batch_s] * count
    depth = setup.prefetch_factor * workers
    free, ends, got, now = [0.0] * max(workers, 1), [], [], 0.0
    asked, made, taken, waited, total = [], [], [], 0.0, 0.0
    for number in range(count):
        asked.append(now)
        is_first = number == 0 or bool(epoch and number % epoch == 0)
        if is_first and not setup.crosses_epochs:
            opened = now + start_s * (number == 0 or not setup.keeps_workers)
            free = [max(each, opened) for each in free]
        last = min(count, number + depth)
        if epoch and not setup.crosses_epochs:
            last = min(last, (number // epoch + 1) * epoch)
        while workers and len(ends) < last:  # those that may be requested by now
            each = len(ends)
            begin = max(free[each % workers], got[-1] if got else 0.0)
            free[each % workers] = begin + times[each]
            ends.append(free[each % workers])
        end = ends[number] if workers else now + times[number]
        now = max(now, end)
        got.append(now)
        wait = now - asked[-1]
        waited, total = waited + wait, total + times[number]
        sums = (number + 1, total, total * cpu, total * queued, (number + 1) * read)
        sums += (total * threads, total * system, (number + 1) * faults)
        seconds, slowest = times[number], (slow or {}).get(number, 0.0)
        made.append(MadeRecord(end, seconds, 0.0, 10_000, slowest, *sums))
        cpu_s = trainer_cpu * (number + 1)
        idle_s = None if idle is None else asked[-1] * idle
        ready = sum(end <= asked[-1] for end in ends[number:])
        sums = (number + 1, waited, cpu_s, 0.0, idle_s)
        taken.append(StepRecord(asked[-1], wait, is_first, ready, *sums))
        now += steps[number]
    return taken, made


def told(steps, setup, batch_s, **more) -> Diagnosis:
    """Return the diagnosis of such a loader."""
    return diagnose(Measured(*trace_of(steps, setup, batch_s, **more)), setup)


def workers(count, cores=16, **more):
    """Return the setup of a loader with so many workers, and plenty of cores."""
    more = {"requests": 2 * count} | more
    return Setup(num_workers=count, takes_turns=True, cores=cores, **more)


STEPS = [0.02] * 200


# ---- the causes --------------------------------------------------------------------------------


def test_too_few_workers_are_told_how_many_it_takes():
    """84 ms a batch and 21 ms a step: four workers, and then the step is the limit."""
    found = told([0.021] * 200, workers(2), 0.084, cpu=0.9)
    assert (found.cause, found.advice) == ("workers", {"num_workers": 4})
    assert found.rate == pytest.approx(2 / 0.084, rel=0.02)
    assert found.expected_rate == pytest.approx(1 / 0.021, rel=0.02)
    assert found.wait_share == pytest.approx(0.5, abs=0.02)
    assert str(found) == (
        "Training waits 50% of the time. A worker takes 84 ms for a batch, and a step takes "
        "21 ms: too much for 2 workers. Use num_workers=4, for 47.6 batches/s instead of 23.9; "
        "then the training step is the limit."
    )


def test_the_advice_comes_true():
    """The same loader with the advice followed: the rate expected, and nothing to change."""
    rng = random.Random(0)
    times = [0.084 * rng.uniform(0.7, 1.3) for _ in range(400)]
    steps = [0.02] * 400
    before = told(steps, workers(2), times, cpu=0.9)
    after = told(steps, workers(before.advice["num_workers"]), times, cpu=0.9)
    assert after.rate == pytest.approx(before.expected_rate, rel=0.03)


def test_workers_stop_at_the_cores():
    """More workers than cores are not advised, and the cores are named as the next limit."""
    setup = replace(workers(1), cores=2)
    found = told([0.005] * 200, setup, 0.05, cpu=1.0)
    assert (found.cause, found.advice) == ("workers", {"num_workers": 2})
    assert found.expected_rate == pytest.approx(40, rel=0.03)
    assert str(found).endswith("then the 2 cores are the limit.")


def test_without_workers_they_are_the_advice():
    """The trainer makes the batches itself."""
    found = told(STEPS, replace(workers(0), requests=1), 0.018, cpu=0.9)
    assert (found.cause, found.advice) == ("workers", {"num_workers": 1})
    assert found.expected_rate == pytest.approx(50, rel=0.02)
    assert "itself" in str(found)


def test_a_processor_that_is_the_limit_has_no_number_of_workers():
    """Four busy workers on two cores: nothing that a setting changes."""
    setup = replace(workers(4), cores=2)
    found = told([0.005] * 200, setup, 0.08, cpu=0.5, queued=0.5)
    assert (found.cause, found.advice, found.expected_rate) == ("cpu", {}, None)
    assert found.evidence["cores_needed"] == pytest.approx(8, rel=0.02)
    assert "have 2 cores: no number of workers helps" in str(found)


def test_strangers_on_the_cores():
    """Two workers on two cores wait for them two thirds of the time."""
    setup = replace(workers(2), cores=2)
    found = told(STEPS, setup, 0.09, cpu=1 / 3, queued=2 / 3)
    assert (found.cause, found.advice) == ("contention", {})
    assert found.expected_rate == pytest.approx(50, rel=0.02)
    assert "other programs use the 2 cores" in str(found)


def test_the_same_wait_for_cores_with_too_many_workers_is_their_own():
    """Six workers on two cores get a third each."""
    setup = replace(workers(6), cores=2)
    assert told([0.005] * 200, setup, 0.09, cpu=1 / 3, queued=2 / 3).cause == "cpu"


def jittered(seconds, count, seed=1):
    """Return times that differ by up to 40 %."""
    rng = random.Random(seed)
    return [seconds * rng.uniform(0.6, 1.4) for _ in range(count)]


def test_storage_that_serves_each_worker_as_fast():
    """Batches next to fewer others, at the ends of epochs, take as long as all: more workers."""
    setup = workers(3, keeps_workers=True)
    found = told([0.01] * 240, setup, jittered(0.1, 240), epoch=24)
    assert found.cause == "storage"
    assert found.advice["num_workers"] in range(9, 14)
    assert found.expected_rate is not None


def test_waits_for_a_network_are_for_several_samples_at_once():
    """With the rate that this gives, also for one worker; up to what the rest of a batch takes."""
    steps, waits = [0.01] * 200, jittered(0.2, 200)
    found = told(steps, workers(1, concurrency=1), waits, cpu=0.02)
    assert (found.cause, list(found.advice)) == ("storage", ["concurrency"])
    assert found.advice["concurrency"] in range(18, 26)
    assert found.expected_rate == pytest.approx(97, rel=0.05)
    more = told(steps, workers(1, concurrency=4), waits, cpu=0.02)
    assert more.advice["concurrency"] in range(60, 65), "four of them wait at once already"
    bound = told([0.001] * 200, workers(1, concurrency=1), waits, cpu=0.2)
    assert bound.expected_rate == pytest.approx(1 / 0.04, rel=0.05)


def test_a_dataset_that_cannot_have_it_and_a_disk_are_not_told_so():
    """How much a disk serves at once is not known."""
    found = told([0.01] * 200, workers(1), jittered(0.2, 200), cpu=0.02)
    assert (found.cause, list(found.advice)) == ("storage", ["num_workers"])
    assert list(reading(2, concurrency=1).advice) == ["num_workers"]


def shared_rate(workers, count, epoch, read_s):
    """Return batches that share storage of a fixed rate equally, epoch after epoch."""
    needs, now, total, made = jittered(read_s, count), 0.0, 0.0, []
    for first in range(0, count, epoch):
        waiting = list(range(first, min(first + epoch, count)))
        active = {}  # by worker: number, when it began, what is left to read
        while waiting or active:
            for worker in range(workers):
                if worker not in active and waiting:
                    number = waiting.pop(0)
                    active[worker] = (number, now, needs[number])
            share = len(active)
            next_s = min(left for *_, left in active.values())
            now += next_s * share
            active = {each: (*told, left - next_s) for each, (*told, left) in active.items()}
            for worker in [each for each, (*_, left) in active.items() if left < 1e-9]:
                _, began, _ = active.pop(worker)
                total += now - began
                sums = (len(made) + 1, total, 0.0, 0.0)
                made.append(MadeRecord(now, now - began, 0.0, 100, 0.0, *sums))
    return made


def test_storage_with_a_fixed_rate_is_told_by_batches_that_take_longer_together():
    """Then no number of workers helps, and the advice is to read less."""
    batches = shared_rate(4, 240, 24, 0.03)
    assert slowdown(batches, 4) > 0.6
    steps, total = [], 0.0
    for number, each in enumerate(batches):
        asked = 0.0 if not number else steps[-1].asked_at + steps[-1].waited_s + 0.01
        waited = max(each.ended_at - asked, 0.0)
        total += waited
        steps.append(StepRecord(asked, waited, number == 0, 0, number + 1, total, 0.0, 0.0))
    found = diagnose(Measured(steps, batches), workers(4, keeps_workers=True))
    assert (found.cause, found.advice, found.expected_rate) == ("storage", {}, None)
    assert "fixed rate" in str(found)


MB = 1_000_000
READ = 16 * MB  # for a batch


def reading(count, batch_s=0.05, **more):
    """Return the diagnosis of a loader whose workers wait for a disk, mostly."""
    setup = replace(workers(count, batch_size=16), **more)
    return told([0.01] * 200, setup, batch_s, cpu=0.1, read=READ)


def test_how_many_workers_a_disk_serves_is_left_to_trials():
    """Of one number of workers it cannot be told, and no rate is promised."""
    found = reading(2)
    assert (found.cause, found.advice, found.expected_rate) == (
        "storage",
        {"num_workers": "auto"},
        None,
    )
    rate = found.evidence["read_rate"]
    assert rate == pytest.approx(40 * READ, rel=0.05)
    assert f"Storage gives {byte_size(rate)}/s, and training could use 1.6 GB/s" in str(found)


def test_trials_that_go_on_are_waited_for():
    """With "auto" there is nothing to change before it has tried."""
    found = reading(2, most_workers=8)
    assert (found.cause, found.advice) == ("storage", {})
    assert 'num_workers="auto" tries it' in str(found)


def test_more_than_auto_tries_is_said_by_its_limit():
    """It would stop at the number that there is, or that it has by itself."""
    for more in ({"count": 9}, {"count": 8, "most_workers": 8}):
        most = reading(**more, batch_s=0.5).advice["num_workers"]
        assert isinstance(most, AutoWorkers)
        assert int(most) in range(50, 60)


def test_a_trial_that_showed_no_gain_is_not_advised_again():
    """Up to the limit of "auto", and beyond."""
    for most in (8, 16):
        found = reading(2, most_workers=most, tried={2: 40.0, 4: 40.5, 8: 39.8})
        assert (found.cause, found.advice) == ("storage", {})
        assert "8 were tried, and made 39.8 batches/s instead of" in str(found)


def test_a_trial_that_showed_a_gain_says_that_storage_serves_more():
    """Twice the workers read twice as much: then they do not disturb each other."""
    found = reading(4, 0.1, most_workers=4, tried={2: 20.0, 4: 40.0})
    assert found.cause == "storage"
    assert found.advice["num_workers"] in range(10, 13)
    assert found.expected_rate is not None
    few = reading(4, 0.1, most_workers=4, tried={2: 20.0, 4: 40.0}, cores=1)
    assert (few.advice, few.expected_rate) == (found.advice, None)
    assert found.expected_rate == pytest.approx(100, rel=0.1)


def test_a_limit_of_a_control_group_is_no_matter_of_workers():
    """If it is reached; far below it, storage is asked."""
    found = reading(2, read_limit=660 * MB)
    assert (found.cause, found.advice) == ("storage", {})
    assert "a control group limits reading to 660 MB/s" in str(found)
    assert reading(2, read_limit=1200 * MB).advice == {"num_workers": "auto"}


@pytest.mark.parametrize(
    ("samples", "words"),
    [(10_000, "10 GB and fit into the 20 GB of free memory"), (100_000, "100 GB, and 20 GB of")],
)
def test_what_fits_into_memory_is_read_once(samples, words):
    """And what does not is read in each epoch."""
    found = reading(2, read_limit=660 * MB, samples=samples, free_memory=20_000 * MB)
    assert words in str(found)
    assert "forebay.cache()" in str(found)


def test_threads_of_libraries_are_named():
    """A worker that waits for its own threads waits for no disk, and a core is not missing."""
    setup = replace(workers(2), cores=2)
    found = told(STEPS, setup, 0.09, cpu=0.3, queued=0.3, threads=0.7)
    assert (found.cause, found.advice) == ("cpu", {})
    assert "Libraries compute in threads of their own: each of 2 workers uses 1.0 cores" in str(
        found
    )
    assert "OMP_NUM_THREADS" in str(found)
    assert "no number of workers helps" not in str(found)
    assert found.evidence["threads_s"] == pytest.approx(0.063, rel=0.01)
    assert told(STEPS, workers(2), 0.09, cpu=0.3, threads=0.7, idle=0.8).cause == "workers"


def test_one_thread_that_a_worker_waits_for_is_none_too_many():
    """As in Arrow's pool of one thread: the worker and it compute by turns."""
    setup = replace(workers(2), cores=2)
    found = told(STEPS, setup, 0.09, cpu=0.3, queued=0.05, threads=0.6)
    assert "threads of their own" not in str(found)
    assert "OMP_NUM_THREADS" not in str(found)
    assert found.cause == "cpu"


@pytest.mark.parametrize(
    ("setup", "faults", "words"),
    [
        ({}, 10_000, "for 10,000 page faults"),
        ({}, 10_000, "make each smaller than 32 MiB"),
        ({"backend": "thread"}, 10_000, "Use workers that are processes"),
        ({}, 50, "for calls such as reading and opening files"),
        ({}, 50, "Read fewer and larger parts"),
    ],
)
def test_time_in_the_system_is_named(setup, faults, words):
    """With what helps; page faults take microseconds each, and reading takes none."""
    setup = replace(workers(2, **setup), cores=2)
    found = told(STEPS, setup, 0.09, cpu=0.95, system=0.7, faults=faults)
    assert (found.cause, found.advice) == ("cpu", {})
    assert "The system takes 74% of the workers' processor time, 63 ms for each batch" in str(found)
    assert words in str(found)
    assert "no number of workers helps" not in str(found)
    assert found.evidence["system_s"] == pytest.approx(0.063, rel=0.01)
    assert found.evidence["faults"] == pytest.approx(faults)


def test_time_in_the_system_is_no_cause_if_it_is_little_or_cores_are_free():
    """Then it is the user's code that takes the time, and more workers help as they did."""
    setup = replace(workers(2), cores=2)
    assert "system" not in str(told(STEPS, setup, 0.09, cpu=0.95, system=0.4, faults=9000))
    found = told(STEPS, workers(2), 0.09, cpu=0.95, system=0.7, faults=9000)
    assert (found.cause, "system" in str(found)) == ("workers", False)


def test_cores_that_are_idle_are_not_missing():
    """Workers that get what they wait for at the same time wait for a core at the same time."""
    setup, more = replace(workers(2), cores=2), {"cpu": 1 / 3, "queued": 2 / 3}
    assert told(STEPS, setup, 0.09, **more, idle=0.1).cause == "contention"
    found = told(STEPS, setup, 0.09, **more, idle=0.5)
    assert found.cause != "contention"
    assert found.evidence["idle_share"] == pytest.approx(0.5)


def test_bursts_need_a_deeper_buffer():
    """Sixteen steps at once and then a pause: more prefetched batches, no more workers."""
    steps = ([0.001] * 15 + [0.3]) * 20
    found = told(steps, workers(2), 0.03)
    assert found.cause == "buffer"
    assert 5 <= found.advice["prefetch_factor"] <= 8
    assert found.expected_rate == pytest.approx(16 / 0.315, rel=0.05)
    deep = workers(2, requests=2 * found.advice["prefetch_factor"])
    assert told(steps, deep, 0.03).cause == "healthy"


def test_a_buffer_is_advised_in_bytes():
    """What a loader with a buffer changes is its size."""
    steps = ([0.001] * 15 + [0.3]) * 20
    trace = trace_of(steps, workers(2), 0.03)
    setup = workers(2, buffer_bytes=40_000, crosses_epochs=True)
    found = diagnose(Measured(*trace), setup)
    assert found.cause == "buffer"
    assert buffer_of(found.advice["buffer"]).nbytes > 80_000


def test_a_buffer_that_is_never_full_is_not_enlarged():
    """With a quarter of it ready at most, it is not what limits prefetching."""
    taken, made = trace_of(([0.001] * 15 + [0.3]) * 20, workers(2), 0.03)
    setup = workers(2, buffer_batches=4, crosses_epochs=True)
    assert max(each.ready for each in taken) == 4
    assert diagnose(Measured(taken, made), setup).cause == "buffer"
    low = [each._replace(ready=min(each.ready, 1)) for each in taken]
    found = diagnose(Measured(low, made), setup)
    assert found.cause != "buffer"
    assert "buffer" not in found.advice


def test_slow_samples_are_told_from_slow_workers():
    """One batch in twenty-five has a sample that takes twelve steps."""
    times = [0.012 + (0.24 if number % 25 == 7 else 0.0) for number in range(300)]
    slow = {number: 0.24 if number % 25 == 7 else 0.003 for number in range(300)}
    setup = workers(2, batch_size=4)
    trace = trace_of([0.02] * 300, setup, times, slow=slow)
    found = diagnose(Measured(*trace, SlowSample(0.24, 29, 0, 7)), setup)
    assert found.cause == "skew"
    assert found.expected_rate > 1.1 * found.rate
    assert "slow samples, such as sample 29, of up to 240 ms" in str(found)


def test_no_rate_is_promised_where_other_programs_slow_the_trainer_down():
    """Workers would compete with these programs as well."""
    setup = replace(workers(0), cores=2)
    found = told([0.005] * 200, setup, 0.03, cpu=0.6, queued=0.4)
    assert (found.cause, found.expected_rate) == ("workers", None)
    assert "Try num_workers=" in str(found)


def test_epochs_that_begin_slowly():
    """Workers that start for each epoch: let them persist; if they do, prefetch across epochs."""
    found = told([0.02] * 120, workers(2), 0.01, epoch=10, start_s=0.2)
    assert (found.cause, found.advice) == ("startup", {"persistent_workers": True})
    setup = workers(2, keeps_workers=True)
    found = told([0.02] * 120, setup, 0.035, epoch=8)
    assert found.cause == "startup"
    assert set(found.advice) == {"buffer"}


def test_the_first_start_is_left_out():
    """One long start before a long epoch is no cause, and not part of the rate."""
    found = told(STEPS, workers(2), 0.03, start_s=30.0)
    assert found.cause == "healthy"
    assert found.rate == pytest.approx(50, rel=0.02)


def test_a_loader_that_could_do_twice_as_much():
    """Then the step is the limit, and otherwise all is well: in either case without an alarm."""
    slow = told(STEPS, workers(2), 0.01)
    fine = told(STEPS, workers(2), 0.03)
    assert (slow.cause, fine.cause) == ("consumer", "healthy")
    assert slow.advice == fine.advice == {}
    assert slow.expected_rate == slow.rate


def test_threads_share_one_core():
    """Python code in three threads: processes, not more threads."""
    setup = replace(workers(3), backend="thread")
    found = told([0.005] * 200, setup, 0.06, cpu=0.3, trainer_cpu=0.019)
    assert (found.cause, found.advice) == ("cpu", {"backend": "process"})
    assert "one thread at a time" in str(found)


def test_too_little_to_judge_by():
    """Fewer than twenty steps, or none at all."""
    assert diagnose(Measured([], []), workers(2)).cause == "unknown"
    found = told(STEPS[: LEAST_STEPS - 1], workers(2), 0.1)
    assert (found.cause, found.expected_rate) == ("unknown", None)
    assert "too little" in str(found)


def test_too_little_says_how_long_to_wait():
    """In steps, and in time as soon as any are known; after so many there is enough."""
    assert str(diagnose(Measured([], []), workers(2))).endswith("Ask again after 22 more steps.")
    steps, batches = trace_of([0.5] * 80, workers(2), 0.1)
    found = diagnose(Measured(steps[:8], batches[:8]), workers(2))
    assert str(found) == (
        "There is too little to judge by: 5 steps were measured, and 20 are needed. Ask again "
        "after 15 more steps, in about 7.5 s."
    )
    for count in (1, 2, 8, 64):
        told = [
            str(diagnose(Measured(steps[:n], batches[:n]), workers(count))) for n in range(2, 80)
        ]
        enough = next(n for n, words in enumerate(told, start=2) if "too little" not in words)
        for known in range(2, enough):
            left = enough - known
            words = f"Ask again after {left} more step{'s' * (left != 1)}, in about "
            assert words in told[known - 2]


def test_the_rate_of_the_whole_run_is_named_if_it_is_another():
    """A report shows that one: with pauses and the start, it is lower."""
    trace = trace_of([0.021] * 200, workers(2), 0.084, cpu=0.9)
    rate = diagnose(Measured(*trace), workers(2)).rate
    same = diagnose(Measured(*trace, run_rate=rate * (1 - OTHER_RATE / 2)), workers(2))
    assert "for 47.6 batches/s instead of 23.9; then" in str(same)
    other = diagnose(Measured(*trace, run_rate=2.63), workers(2))
    assert "instead of 23.9 (2.63 over the whole run, start and pauses included); then" in str(
        other
    )
    assert other.rate == rate


def test_records_that_contradict_each_other():
    """Steps waited as if batches took 100 ms, and the batches say 1 ms."""
    steps, _ = trace_of(STEPS, workers(2), 0.1)
    _, batches = trace_of(STEPS, workers(2), 0.001)
    found = diagnose(Measured(steps, batches), workers(2))
    assert (found.cause, found.expected_rate) == ("unknown", None)
    assert "The cause is unknown: " in str(found)


def crowded(
    *, count=200, step_s=0.133, batch_s=0.00131, wait_s=0.02, tail=0.0, often=1.0, ready=2, **more
):
    """Return records of a machine where waits do not follow from steps and batches.

    Args:
        wait_s: Seconds that training waits, on average, for each batch for which it does.
        tail: Share of batches and of steps that take 20 times as long.
        often: Share of the batches that training waits for.
        ready: Batches ready, each time.
    """
    chance = random.Random(more.get("seed", 0))
    cpu, queued, idle = (more.get(name, 0.0) for name in ("cpu", "queued", "idle"))
    trainer_cpu, trainer_queued = more.get("trainer_cpu", 0.0), more.get("trainer_queued", 0.0)
    steps, batches, now, waited, total = [], [], 0.0, 0.0, 0.0

    def length(seconds):
        return seconds * chance.uniform(0.5, 1.5) * (20 if chance.random() < tail else 1)

    for number in range(count):
        wait, made_s = 0.0, length(batch_s)
        if chance.random() < often:
            wait = 2 * wait_s * chance.random()
        waited, total = waited + wait, total + made_s
        sums = (number + 1, total, total * cpu, total * queued, (number + 1) * more.get("read", 0))
        batches.append(MadeRecord(now + 1e-4, made_s, 0.0, 100_000, 0.0, *sums))
        is_first = number % (more.get("epoch") or count) == 0
        trainer = ((number + 1) * step_s * trainer_cpu, (number + 1) * step_s * trainer_queued)
        cores_idle_s = None if idle is None else now * idle
        sums = (number + 1, waited, *trainer, cores_idle_s)
        steps.append(StepRecord(now, wait, is_first, ready, *sums))
        now += wait + length(step_s)
    return steps, batches


@pytest.mark.parametrize("buffer", [{}, {"buffer_bytes": 1_000_000, "crosses_epochs": True}])
@pytest.mark.parametrize("tail", [0.0, 0.02])
def test_a_crowded_machine_is_not_told_as_a_loader_that_is_too_small(buffer, tail):
    """Batches of 1.31 ms are not too much for two workers and steps of 133 ms."""
    setup = replace(workers(2), cores=2, **buffer)
    found = diagnose(Measured(*crowded(idle=0.02, trainer_cpu=0.3, tail=tail)), setup)
    assert (found.cause, found.advice, found.expected_rate) == ("contention", {}, None)
    assert "other programs use the rest" in str(found)
    # The same where the system does not tell how idle the cores are, and workers wait for them.
    found = diagnose(Measured(*crowded(cpu=0.1, queued=0.88, tail=tail)), setup)
    assert (found.cause, found.advice, found.expected_rate) == ("contention", {}, None)
    assert "Workers wait for a core 88% of the time that they spend on batches" in str(found)
    # Where the cores are not known to be busy, nobody else is blamed.
    found = diagnose(Measured(*crowded(idle=0.6, trainer_cpu=0.3, tail=tail)), setup)
    assert (found.cause, found.advice) == ("unknown", {})
    assert diagnose(Measured(*crowded(idle=None, tail=tail)), setup).cause == "unknown"


@given(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 1000),
            "count": st.sampled_from([30, 60, 200]),
            "step_s": st.floats(0.001, 0.3),
            "batch_s": st.floats(0.0003, 0.3),
            "wait_s": st.sampled_from([0.0, 0.002, 0.01, 0.1]),
            "often": st.sampled_from([0.02, 0.1, 1.0]),
            "tail": st.sampled_from([0.0, 0.02, 0.1]),
            "ready": st.sampled_from([0, 1, 2, 4, 20]),
            "cpu": st.floats(0.0, 0.5),
            "queued": st.floats(0.0, 0.5),
            "idle": st.none() | st.floats(0.0, 1.0),
            "trainer_cpu": st.floats(0.0, 1.0),
            "trainer_queued": st.floats(0.0, 0.5),
            "epoch": st.sampled_from([None, 10]),
            "read": st.sampled_from([0, 10**5, 10**7]),
        }
    ),
    st.builds(
        workers,
        st.sampled_from([0, 1, 2, 4]),
        st.sampled_from([None, 1, 2, 8]),
        buffer_bytes=st.none() | st.just(1_000_000),
        keeps_workers=st.booleans(),
        may_adjust=st.booleans(),
    ),
)
def test_no_verdict_contradicts_its_numbers(made, setup):
    """Whatever was recorded: the inequalities of a finding hold, the promised rate included.

    The numbers are those of the evidence, where each cause can be checked by hand.
    """
    steps, batches = crowded(**made)
    found, recorded = (
        diagnose(Measured(steps, batches), setup),
        recorded_work(steps, batches, setup.num_workers),
    )
    if recorded is None or recorded.steps < LEAST_STEPS:
        assert found.cause == "unknown"
        return
    finding = Causes(SimulatedLoader(recorded, setup)).finding()
    assert finding.cause == found.cause
    assert all(larger > smaller for larger, smaller in finding.claims)
    numbers, count = found.evidence, setup.num_workers
    if found.cause not in ("healthy", "consumer") and found.expected_rate is not None:
        assert found.expected_rate > found.rate
    if count and (found.cause == "workers" or "num_workers" in found.advice):
        batch_s = max(numbers["batch_s"], numbers["slow_batch_s"])
        assert batch_s > count * numbers["quick_step_s"] or recorded.read_rate > 0
    if found.cause == "buffer":
        assert numbers["most_ready"] + 1 >= FILLED * numbers["depth"]
        assert numbers["batch_s"] < count * numbers["step_s"]
    if found.cause == "cpu" and not found.advice:
        used = (numbers["cpu_s"] + numbers["trainer_cpu_s"]) * found.rate
        assert max(numbers["cores_needed"], used / BUSY_CORES) >= numbers["cores"]
    if found.cause == "contention" and not finding.claims and numbers["queued_s"] == 0.0:
        assert numbers["idle_share"] < IDLE_CORES


def test_pauses_between_epochs_count_neither_as_steps_nor_as_waits():
    """Validation after each epoch changes nothing."""
    with_pauses = [20.0 if number % 40 == 39 else 0.02 for number in range(200)]
    found = told(with_pauses, workers(2, keeps_workers=True), 0.03, epoch=40)
    assert found.rate == pytest.approx(50, rel=0.1)
    assert found.cause == "healthy"


def test_sampled_records_stand_for_several_steps():
    """Where only each tenth was recorded, rate and waits are those of all."""
    steps, batches = trace_of([0.0001] * 2000, workers(2), 0.0004)
    full = recorded_work(steps, batches, 2)
    thin = recorded_work(steps[::10], batches[::10], 2)
    assert thin.rate == pytest.approx(full.rate, rel=0.03)
    assert thin.wait_share == pytest.approx(full.wait_share, abs=0.03)


# ---- the simulation ----------------------------------------------------------------------------

seconds = st.floats(0.001, 1.0)
works = st.integers(3, 60).flatmap(
    lambda count: st.builds(
        Work,
        batch_s=st.lists(seconds, min_size=count, max_size=count),
        step_s=st.lists(seconds, min_size=count, max_size=count),
    )
)
setups = st.builds(
    Setup,
    num_workers=st.integers(0, 5),
    buffer_batches=st.integers(1, 12),
    refill_below=st.none() | st.integers(1, 12),
    in_order=st.booleans(),
    takes_turns=st.booleans(),
    keeps_workers=st.just(True),
    crosses_epochs=st.just(True),
)


@given(works, setups)
def test_no_setup_is_faster_than_the_steps(work, setup):
    """Time is steps and waits, and nothing else."""
    outcome = simulate(work, setup)
    stepping = sum(work.step_s[:-1])
    assert outcome.rate <= (len(work.step_s) - 1) / stepping * (1 + 1e-9)
    assert 0.0 <= outcome.wait_share < 1.0
    elapsed = (len(work.step_s) - 1) / outcome.rate
    assert elapsed * (1 - outcome.wait_share) == pytest.approx(stepping)


def end_of(work, count, depth):
    """Return when the last batch is taken, the wait for the first one included."""
    ahead = Work(batch_s=[0.0, *work.batch_s], step_s=[0.0, *work.step_s], ready=1)
    outcome = simulate(ahead, Setup(num_workers=count, buffer_batches=depth))
    return len(work.batch_s) / outcome.rate


@given(works, st.integers(1, 5), st.integers(1, 12))
def test_more_workers_and_a_deeper_buffer_never_delay(work, count, depth):
    """In order, with the first free worker making the next batch."""
    usual = end_of(work, count, depth)
    assert end_of(work, count + 1, depth) <= usual * (1 + 1e-9)
    assert end_of(work, count, depth + 1) <= usual * (1 + 1e-9)


@given(works, st.integers(1, 5))
def test_as_many_workers_as_batches_wait_only_for_the_slowest(work, count):
    """With one worker for each batch, each is ready after what it takes."""
    length = len(work.batch_s)
    outcome = simulate(work, Setup(num_workers=length, buffer_batches=UNLIMITED))
    got = first = work.batch_s[0]
    for number in range(1, length):
        got = max(got + work.step_s[number - 1], work.batch_s[number])
    assert (length - 1) / outcome.rate == pytest.approx(got - first)


@given(st.integers(1, 64), st.floats(0.25, 64), seconds, st.floats(0.0, 1.0))
def test_stretched_processor_time_fits_the_cores(num_workers, cores, cpu_s, other_s):
    """All workers together use the cores that there are, or less."""
    factor = stretched(num_workers, cores, cpu_s, other_s)
    used = num_workers * cpu_s / (cpu_s * factor + other_s)
    assert used <= cores * (1 + 1e-9)
    assert factor == 1.0 or used == pytest.approx(cores)


# ---- real loaders ------------------------------------------------------------------------------


class Sleepy(Dataset):
    """Samples that wait for a disk."""

    def __init__(self, length, seconds):
        self.length, self.seconds = length, seconds

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((100,), float(index))


# A step that takes this long is recorded by itself; of quicker ones, which a busy machine makes
# many of, only some are.
RECORDED_S = 2 * FINEST_S


def trained(loader, step_s=0.0, epochs=1):
    """Train, and return the loader's diagnosis."""
    with loader:
        for _ in range(epochs):
            for _ in loader:
                time.sleep(step_s)
        return loader.diagnose()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"persistent_workers": True},
        {"seed": 0},
        {"buffer": Buffer(max_batches=4)},
        {"backend": "thread"},
    ],
    ids=repr,
)
def test_a_real_loader_with_too_few_workers(arguments):
    """One worker that sleeps 20 ms a batch, whatever kind of loader it is."""
    found = trained(DataLoader(Sleepy(40, 0.02), batch_size=1, num_workers=1, **arguments))
    assert found.cause not in ("healthy", "consumer")
    assert found.wait_share > 0.5
    assert found.evidence["batch_s"] >= 0.02


def test_diagnosing_is_possible_at_any_time():
    """Before the first epoch, while iterating, between epochs, and after closing."""
    loader = DataLoader(Sleepy(30, 0.001), batch_size=1, num_workers=1, persistent_workers=True)
    assert loader.diagnose().cause == "unknown"
    for number, _ in enumerate(loader):
        if number == 5:
            assert loader.diagnose().cause == "unknown"
        time.sleep(RECORDED_S)
    assert loader.diagnose().evidence["steps"] > LEAST_STEPS
    loader.close()
    assert loader.diagnose().rate > 0


def test_only_what_followed_the_last_change_of_the_workers_counts():
    """With `num_workers="auto"` earlier steps had another number of workers."""
    with DataLoader(Sleepy(100, 0.004), batch_size=1, num_workers=1) as loader:
        for _ in loader:
            time.sleep(RECORDED_S)
        before = loader.diagnose().evidence["steps"]
        trace = loader._loader_progress.trace
        trace.decisions.append((trace.steps[-40].asked_at, "one worker more"))
        assert LEAST_STEPS < loader.diagnose().evidence["steps"] < before
        trace.decisions.append((trace.steps[-5].asked_at, "and one more"))
        assert "steps were measured since the number of workers changed" in str(loader.diagnose())


def test_a_loader_with_auto_can_be_asked():
    """It prefetches for the largest number of workers."""
    with DataLoader(Sleepy(60, 0.004), batch_size=1, num_workers="auto") as loader:
        for _ in loader:
            pass
        assert loader.diagnose().wait_share >= 0.0
    setup = Setup(num_workers=2, most_workers=8, requests=16, takes_turns=True)
    assert depth_of(setup, Work(batch_s=[], step_s=[])) == 16
    assert setup.with_workers(16).requests == 32


def test_steps_that_wait_for_a_core_are_contention_though_batches_are_ready():
    """Other programs slow the training step itself down, and the workers with it."""
    setup = replace(workers(2), cores=2)
    steps, batches = trace_of(STEPS, setup, 0.03, cpu=0.5, queued=0.5)
    assert diagnose(Measured(steps, batches), setup).cause in ("healthy", "consumer")
    slowed = [step._replace(trainer_queued_s=0.005 * step.taken) for step in steps]
    found = diagnose(Measured(slowed, batches), setup)
    assert found.cause == "contention"
    assert "The training step itself waits for a core 25% of its time." in str(found)
    assert found.evidence["trainer_queued_s"] == pytest.approx(0.005)
    assert found.expected_rate > 1.1 * found.rate


# ---- buckets -----------------------------------------------------------------------------------


def bucket(**more):
    """Return what was fetched of a cache of 200 GB, 1 MB a sample, at 100 MB/s without a pause."""
    facts = {"requests": 2500, "nbytes": 10**10, "busy_s": 100.0, "elapsed_s": 100.0}
    return Fetched(**facts | {"total": 2 * 10**11} | more)


def test_a_bucket_that_is_too_slow_is_told_how_much_to_keep():
    """32 MB a step of 0.2 s are 160 MB/s: 37.5 % have to be there for 100 MB/s to be enough."""
    setup = workers(2, samples=200_000, batch_size=32, fetched=bucket())
    found = told([0.2] * 200, setup, 0.6)
    assert (found.cause, found.expected_rate) == ("storage", pytest.approx(5.0))
    assert (
        "The bucket gives 100 MB/s, and training could use 160 MB/s, with 0% of the dataset "
        "on disk. Keep 38% or more of it there, from the second epoch on: "
        'open it with disk="75GB", directory=..., for 5 batches/s instead of 3.3'
    ) in str(found)
    two = replace(setup, fetched=bucket(readers=2))
    assert "Keep 69% or more" in str(told([0.2] * 200, two, 0.6))


@pytest.mark.parametrize(
    "facts",
    [{"elapsed_s": 200.0}, {"nbytes": 2 * 10**10}, {"on_disk": 10**11}],
    ids=["it pauses", "it is fast enough", "enough is there"],
)
def test_a_bucket_that_is_fast_enough_is_not_the_cause(facts):
    """Workers are."""
    setup = workers(2, samples=200_000, batch_size=32, fetched=bucket(**facts))
    assert "bucket" not in str(told([0.2] * 200, setup, 0.6))
