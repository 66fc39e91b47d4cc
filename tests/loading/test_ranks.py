"""Many ranks: the same global batches however many there are, also when their number changes."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
from datasets import Failing, Squares
from streams import Noisy, epochs_of
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
)
from worlds import World, digest

import forebay
from forebay import DataLoader, FailuresError, OptionError
from forebay.loading.facts import setup_now
from forebay.loading.workers import WorkerTuning
from forebay.observe.record import Trace
from forebay.ranks import ranks_sharing_cores

COUNT, TOGETHER = 110, 24  # four global batches, and a tail of 14
WORLDS = (1, 2, 3, 4, 6, 8, 12)
HANG_S = 180  # far more than two imports of torch take


def noisy(**options):
    """Make a loader whose samples draw from every generator."""
    return DataLoader(Noisy(COUNT), **{"seed": 7, "shuffle": True, **options})


def mixed(**options):
    """Make one over three sources."""
    sources = {
        "a": (Noisy(50), 0.5),
        "b": (Noisy(50), 0.3),
        "c": (Noisy(9), 0.2),
    }
    return DataLoader(forebay.mix(sources), **{"seed": 7, "shuffle": True, **options})


def whole(make, epochs=2, **options):
    """Return the global batches of some epochs, of one rank and no worker."""
    with World(partial(make, **options), 1, TOGETHER) as world:
        return [list(world.batches()) for _ in range(epochs)]


@functools.cache
def expected_of(make):
    """Return what two epochs are, by one rank without workers."""
    return list(map(digest, whole(make)))


# Each number of ranks, and each number of workers, at least once; all pairs start 576 processes.
USUAL = {*((world, 0) for world in WORLDS), (1, 5), (2, 1), (3, 2)}
PAIRS = [
    pytest.param(*pair, marks=() if pair in USUAL else pytest.mark.thorough)
    for pair in itertools.product(WORLDS, (0, 1, 2, 5))
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create 5 worker processes")
@pytest.mark.parametrize(("world", "num_workers"), PAIRS)
def test_global_batches_are_equal_bit_for_bit(world, num_workers):
    """For any number of ranks and workers; in every epoch, mixed or not, tail and random numbers
    included."""
    for make in (noisy, mixed):
        with World(partial(make, num_workers=num_workers), world, TOGETHER) as ranks:
            found = [list(ranks.batches()) for _ in range(2)]
        assert list(map(digest, found)) == expected_of(make)


@pytest.mark.slow
@pytest.mark.parametrize("make", [noisy, mixed])
@pytest.mark.parametrize("worlds", [(3, 5, 2), (5, 2, 6), (1, 15, 3)])
def test_the_number_of_ranks_changes_in_mid_epoch(make, worlds):
    """Each goes on where the ranks before it stood; over the end of an epoch, too."""
    together, state, found = 30, None, []
    with World(make, 1, together) as world:
        expected = [batch for _ in range(2) for batch in world.batches()]
    for number, count in enumerate(worlds):
        with World(make, count, together, state) as world:
            batches = world.batches()
            if number < len(worlds) - 1:
                found += [next(batches) for _ in range(2 if number else 1)]
                state = world.state()
            else:
                found += [*batches, *world.batches()]
    assert digest(found) == digest(expected)


def test_a_state_of_another_global_batch_size_says_what_would_fit():
    """It names both sizes and the `batch_size` to use; and it can be counted in samples."""
    with World(noisy, 3, TOGETHER) as ranks:
        next(ranks.batches())
        state = ranks.state()
    with noisy(batch_size=8, world_size=4, rank=0) as loader:
        with pytest.raises(OptionError, match=r"of 24 samples.* of 32 samples") as caught:
            loader.load_state_dict(state)
        assert "batch_size=6 with world_size=4" in str(caught.value)
    with noisy(batch_size=8, world_size=5, rank=0) as loader:
        with pytest.raises(OptionError, match="a world size that divides 24: 1, 2, 3, 4, 6, 8, 12"):
            loader.load_state_dict(state)
    make = partial(noisy, seed=7)
    loaders = [make(batch_size=8, world_size=4, rank=rank) for rank in range(4)]
    left = []
    for loader in loaders:
        with loader:
            loader.load_state_dict(state, strict=False)
            left += [index for batch in loader for index in batch[0][loader.mask].tolist()]
    with noisy(batch_size=24) as loader:
        all_of_them = [index for batch in loader for index in batch[0].tolist()]
    assert sorted(left) == sorted(all_of_them[24:])


def test_the_mask_names_what_is_repeated():
    """A tail of 14 over four ranks: two of them repeat one sample, so that all have four."""
    loaders = [noisy(batch_size=6, world_size=4, rank=rank) for rank in range(4)]
    seen = []
    for loader in loaders:
        *_, last = loader
        assert len(last[0]) == len(loader.mask) == 4
        seen.append(last[0][loader.mask].tolist())
    assert sorted(map(len, seen)) == [3, 3, 4, 4]
    assert len({index for own in seen for index in own}) == 14


@pytest.mark.parametrize("sampler", [None, [*range(25, -1, -1)]])
def test_a_filled_tail_goes_on_with_the_beginning_of_the_epoch(sampler):
    """As Accelerate fills it, rank by rank, also after a resume; of a plan or of a sampler."""
    order = sampler or [*range(26)]
    whole = [
        DataLoader(range(26), 6, sampler=sampler, world_size=4, rank=rank, tail="fill")
        for rank in range(4)
    ]
    gathered = [list(loader) for loader in whole]
    last = [index for own in gathered for index in own[-1].tolist()]
    assert last == [*order[24:], *order[:22]]
    begun = iter(whole[1])
    next(begun)
    whole[2].load_state_dict(whole[1].state_dict())
    assert [batch.tolist() for batch in whole[2]] == [gathered[2][-1].tolist()]


def test_an_uneven_tail_repeats_nothing():
    """A tail of two over four ranks: two ranks have a step less, as they say themselves."""
    loaders = [
        DataLoader(Squares(26), batch_size=6, world_size=4, rank=rank, tail="uneven")
        for rank in range(4)
    ]
    found = [list(loader) for loader in loaders]
    assert list(map(len, loaders)) == list(map(len, found))
    assert sorted(map(len, found)) == [1, 1, 2, 2]
    assert sum(len(batch[0]) for own in found for batch in own) == 26


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_rank_without_a_good_sample_says_so(num_workers):
    """A step less would make the other ranks wait; a loop that catches the error stays in step."""
    bad = Failing(12, KeyError("x"), (0, 1, 2))
    first, second = (
        DataLoader(bad, 3, num_workers=num_workers, on_error="skip", world_size=2, rank=rank)
        for rank in range(2)
    )
    with first, second:
        iterators = iter(first), iter(second)
        with pytest.raises(FailuresError, match=r"rank 0 of 2 has no sample .* epoch 0, batch 0"):
            next(iterators[0])
        assert next(iterators[1]).tolist() == [3, 4, 5]
        assert first.state_dict() == second.state_dict()
        assert [failure.source for failure in first.failures] == [0, 1, 2]
        assert [next(each).tolist() for each in iterators] == [[6, 7, 8], [9, 10, 11]]


def test_samples_of_different_ranks_draw_different_numbers():
    """With `world_size`, and with a DistributedSampler, whose rank goes into the seed."""
    draws = set()
    for rank in range(2):
        sampler = DistributedSampler(Noisy(40), num_replicas=2, rank=rank)
        for loader in (
            DataLoader(Noisy(40), sampler=sampler, batch_size=4, seed=3),
            DataLoader(Noisy(40), batch_size=4, seed=4, world_size=2, rank=rank),
        ):
            draws |= {tuple(row) for batch in loader for row in batch[1].tolist()}
    assert len(draws) == 80


def test_random_numbers_do_not_depend_on_the_batch_size():
    """A sample's seed is its position in the epoch."""
    found = [
        {
            int(index): tuple(row)
            for batch in noisy(batch_size=size)
            for index, row in zip(batch[0], batch[1].tolist(), strict=True)
        }
        for size in (1, 7, 24)
    ]
    assert found[0] == found[1] == found[2]


def test_without_a_seed_all_ranks_have_one():
    """They must agree without talking: the seed is 0, as a DistributedSampler's."""
    loader = DataLoader(Noisy(COUNT), batch_size=4, shuffle=True, world_size=3, rank=1)
    assert loader.seed == 0
    assert "rank=1 of 3" in repr(loader)


REFUSED = {
    "no world": ({"rank": 1}, "rank=1 requires world_size"),
    "no rank": ({"world_size": 4}, "world_size=4 without rank"),
    "no such rank": ({"world_size": 4, "rank": 4}, "it must be 0 to 3"),
    "no number": ({"world_size": "all"}, "'auto' or None"),
    "rank and auto": ({"world_size": "auto", "rank": 0}, "finds the rank automatically"),
    "tail": ({"tail": "uneven"}, "world_size= is not given"),
    "no tail": ({"world_size": 1, "rank": 0, "tail": "cut"}, "'repeat' or 'uneven'"),
    "batches": (
        {"world_size": 2, "rank": 0, "batch_sampler": [[0]], "batch_size": 1},
        "batches of the user's own",
    ),
    "single": ({"world_size": 2, "rank": 0, "batch_size": None}, "batches of the user's own"),
    "both": (
        {"world_size": 2, "rank": 0, "sampler": DistributedSampler(range(9), 2, 0)},
        "would both divide the samples among ranks",
    ),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused(options, words):
    """When the loader is made, with what to do."""
    with pytest.raises(OptionError, match=words):
        DataLoader(Squares(9), **options)


LAUNCHED = {
    "torchrun": {"WORLD_SIZE": "3", "RANK": "2"},
    "srun": {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"},
    "mpirun": {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"},
    "mpiexec": {"PMI_SIZE": "3", "PMI_RANK": "2"},
}


@pytest.mark.parametrize("environment", LAUNCHED.values(), ids=LAUNCHED)
def test_auto_reads_what_the_launcher_says(monkeypatch, environment):
    """A loader finds its rank by itself; a count alone finds the rank that goes with it."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for world_size in ("auto", 3):
        loader = DataLoader(Squares(9), world_size=world_size)
        assert loader._ranks == (3, 2)
    with pytest.raises(OptionError, match="one of 3"):
        DataLoader(Squares(9), world_size=4)
    monkeypatch.setenv(next(name for name in environment if name.endswith(("K", "D"))), "3")
    with pytest.raises(OptionError, match="not a rank"):
        DataLoader(Squares(9), world_size="auto")


@pytest.mark.parametrize("looks", [False, True])
def test_a_loader_made_before_the_ranks_are_known_is_divided_among_them(monkeypatch, looks):
    """ "auto" is looked up when an iteration begins, and a look at one batch is no epoch."""
    loader = DataLoader(Squares(9), batch_size=2, world_size="auto", shuffle=True)
    assert len(loader) == 5
    if looks:
        next(iter(loader))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    expected = DataLoader(Squares(9), batch_size=2, world_size=2, rank=1, shuffle=True)
    epoch = epochs_of(expected, 1)[0]
    assert (len(loader), repr(loader)) == (3, repr(expected))
    assert str(epochs_of(loader, 1)[0]) == str(epoch)
    assert loader.state_dict()["made_with"]["global_batch_size"] == 4


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_the_sampler_of_a_rank_is_a_distributed_sampler_of_its_samples(world, shuffle):
    """So libraries add none of theirs; around it, batches are the loader's, without repeats."""
    seen = []
    for rank in range(world):
        made = functools.partial(DataLoader, range(20), 2, shuffle, world_size=world, rank=rank)
        loader = made(tail="uneven")
        sampler = loader.sampler
        assert isinstance(sampler, DistributedSampler)
        assert (sampler.num_replicas, sampler.rank, len(sampler)) == (world, rank, len([*sampler]))
        expected = [batch.tolist() for batch in loader]
        sampler.set_epoch(0)
        assert list(BatchSampler(sampler, 2, drop_last=False)) == expected
        sampler.set_epoch(0)
        around = DataLoader(range(20), batch_sampler=Wrapped(sampler), world_size=world, rank=rank)
        assert [batch.tolist() for batch in around] == expected
        seen += [number for batch in expected for number in batch]
        again = made()  # without `world_size=`, as a library may make it
        other = DataLoader(range(20), 2, sampler=again.sampler, seed=0)
        assert [batch.tolist() for batch in other] == [batch.tolist() for batch in made()]
    assert sorted(seen) == list(range(20))


class Wrapped:
    """Batches of a sampler, by a class of another library."""

    def __init__(self, sampler):
        self.sampler, self.batch_size, self.drop_last = sampler, 2, False

    def __iter__(self):
        return iter(BatchSampler(self.sampler, 2, drop_last=False))

    def __len__(self):
        return (len(self.sampler) + 1) // 2


def test_auto_leaves_the_division_to_a_distributed_sampler():
    """A library may have put it there; a number of ranks beside it stays an error."""
    sampler = DistributedSampler(range(20), 2, 1, shuffle=False)
    loader = DataLoader(range(20), 2, sampler=sampler, world_size="auto")
    assert [number for batch in loader for number in batch.tolist()] == [*range(1, 20, 2)]
    assert loader.state_dict()["made_with"]["global_batch_size"] == 4


def test_auto_alone_is_one_rank():
    """The same script runs without a launcher."""
    loader = DataLoader(Squares(9), world_size="auto", batch_size=2)
    assert loader._ranks == (1, 0)
    assert len(epochs_of(loader, 1)[0]) == 5


def test_the_ranks_of_torchrun_share_the_cores(monkeypatch):
    """Unless bound to some: "auto" starts with fewer workers, and advice counts fewer cores."""
    own, torchrun = os.sched_getaffinity(0), {"LOCAL_WORLD_SIZE": "2"}
    assert ranks_sharing_cores({}) == ranks_sharing_cores({"LOCAL_WORLD_SIZE": "many"}) == 1
    if len(own) < os.cpu_count() or len(own) < 2:
        pytest.skip("this process may not use two cores, and all of them")
    os.sched_setaffinity(0, {min(own)})
    try:
        assert ranks_sharing_cores(torchrun) == 1
    finally:
        os.sched_setaffinity(0, own)
    assert ranks_sharing_cores(torchrun) == 2
    loader, trace = DataLoader(Squares(60)), Trace()
    cores = setup_now(loader._kind().setup, trace).cores
    workers = WorkerTuning(64, False, trace).num_workers
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert setup_now(loader._kind().setup, trace).cores == cores / 2
    assert WorkerTuning(64, False, trace).num_workers == max(1, workers // 2)


WRONG = {
    "two equal ranks": ("world_size=2, rank=0", "rank 0 appears 2 times"),
    "another seed": ("world_size='auto', seed=rank", "seed=0"),
    "another size": ("world_size='auto', batch_size=2 + rank", "global_batch_size="),
    "one shuffles": ("world_size='auto', shuffle=rank == 0", "shuffle=True"),
}

# What each of two processes of a real group runs; they print a line of JSON in the end.
GROUP = f"""
import json
import os
import sys
import warnings
import torch.distributed as dist
import forebay
import forebay.ranks
from forebay import DataLoader

def samples(loader):
    return [int(x) for batch in loader for x in batch]

def refusal(**options):
    try:
        next(iter(DataLoader(range(20), **{{"seed": 1, **options}})))
    except forebay.OptionError as error:
        return str(error)

early = DataLoader(range(20), seed=int(os.environ["RANK"]), world_size="auto")
next(iter(early))

def refusal_later():
    try:
        next(iter(early))
    except forebay.OptionError as error:
        return str(error)

where = f"file://{{sys.argv[1]}}"
dist.init_process_group("gloo", where, world_size=2, rank=int(os.environ["RANK"]))
rank = dist.get_rank()

# Process 1 begins to iterate only when process 0 has said that it waits.
port = [None]
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = [store.port]
dist.broadcast_object_list(port)
warned = []
if rank == 0:
    def note(message, *_):
        warned.append(str(message))
        store.set("warned", "yes")
    warnings.showwarning, forebay.ranks.PATIENCE_S = note, 0.0
    warnings.simplefilter("always")
else:
    dist.TCPStore("127.0.0.1", port[0], is_master=False).wait(["warned"])
next(iter(DataLoader(range(20), world_size="auto")))
forebay.ranks.PATIENCE_S = 60.0
warnings.simplefilter("ignore")

shared = DataLoader(range(20), batch_size=4, shuffle=True, world_size="auto")
found = {{
    "parts": samples(shared),
    "state": shared.state_dict(),
    "refused later": refusal_later(),
    "warned": warned,
    "same": samples(DataLoader(range(20), batch_size=4, world_size=1, rank=0)),
    "refused": [{", ".join(f"refusal({options})" for options, _ in WRONG.values())}],
}}
dist.destroy_process_group()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """Return what each of two processes of a real group found; importing torch takes seconds."""
    meeting = tmp_path_factory.mktemp("group") / "file"
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", GROUP, meeting],
            env={**os.environ, "WORLD_SIZE": "2", "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=HANG_S)[0] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    assert [process.returncode for process in started] == [0, 0], printed
    return [json.loads(each.splitlines()[-1]) for each in printed]


@pytest.mark.slow
def test_the_group_says_which_rank_this_is(group):
    """In two real processes: every sample once, and the same state in both."""
    first, second = group
    assert sorted(first["parts"] + second["parts"]) == list(range(20))
    assert first["state"] == second["state"]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_ranks_that_do_not_fit_are_named_before_the_first_batch(group, wrong):
    """By process, in an error on every rank; nothing hangs."""
    words, at = WRONG[wrong][1], list(WRONG).index(wrong)
    errors = [found["refused"][at] for found in group]
    assert all(words in error or "appears" in error for error in errors)
    assert all("process 1" in error for error in errors)


@pytest.mark.slow
def test_a_loader_that_was_iterated_before_there_was_a_group_is_checked_later(group):
    """Many scripts look at a batch first, to see its shape."""
    assert all("seed=0" in found["refused later"] for found in group)
    assert all("seed=1" in found["refused later"] for found in group)


@pytest.mark.slow
def test_a_rank_that_waits_for_the_others_says_so(group):
    """A loader that only one rank iterates would wait without a word."""
    first, second = (found["warned"] for found in group)
    assert ["process 0 of 2 has waited" in words for words in first] == [True]
    assert second == []


@pytest.mark.slow
def test_a_group_may_have_more_processes_than_ranks(group):
    """Tensor parallelism: processes that share a rank each need its batches."""
    assert [found["same"] for found in group] == [list(range(20))] * 2
