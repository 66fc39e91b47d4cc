"""Workers: what they know, how long they live, and the order in which their batches come."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.util import register_after_fork

import pytest
import torch
from datasets import (
    PATIENCE_S,
    Counting,
    Gate,
    Gated,
    Marked,
    Squares,
    WhoAmI,
    as_it_is,
    error_of_next,
    fail_in_second,
    mark_copy,
    numbers,
)
from same import assert_same
from torch.utils.data import get_worker_info

import forebay

# A machine of one core is warned of two workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker")

METHODS = ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]


@pytest.fixture
def gate():
    """A gate that is opened at the end, so that no worker waits for ever."""
    gate = Gate()
    yield gate
    gate.close()


def who(loader):
    """Return what the workers of an epoch know of themselves: one tuple a batch."""
    return [known for ((_, known, _),) in loader]


def pids(loader):
    """Return the process ids that made the batches of an epoch."""
    return [pid for ((_, _, pid),) in loader]


class Multiprocessed:
    """A dataset with what `multiprocessing` has to reset after a fork, as its managers do."""

    def __init__(self, context):
        self.queue = context.Queue()
        self.queue.put("from the trainer")  # starts its thread, which no fork has
        assert self.queue.get(timeout=PATIENCE_S) == "from the trainer"
        self.reset_in = os.getpid()
        register_after_fork(self, Multiprocessed.reset)

    def reset(self):
        self.reset_in = os.getpid()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.queue.put(index)
        return self.reset_in == os.getpid(), multiprocessing.current_process().name


# ---- what a worker knows ------------------------------------------------------------------------


def test_objects_of_multiprocessing_work_in_a_worker(loader_class):
    """A manager's connection is not shared with other workers, and what a queue got arrives."""
    dataset = Multiprocessed(multiprocessing.get_context("fork"))
    loader = loader_class(
        dataset, batch_size=2, num_workers=2, collate_fn=as_it_is, multiprocessing_context="fork"
    )
    batches = list(loader)
    assert all(is_reset for batch in batches for is_reset, _ in batch)
    names = {name for batch in batches for _, name in batch}
    assert len(names) == 2
    assert "MainProcess" not in names
    assert {dataset.queue.get(timeout=PATIENCE_S) for _ in range(4)} == {0, 1, 2, 3}


def test_a_worker_knows_its_number_and_its_seed(loader_class):
    """id, num_workers, seed (base_seed + id, and torch was seeded with it), and its dataset."""
    torch.manual_seed(11)
    base_seed = torch.empty((), dtype=torch.int64).random_().item()
    torch.manual_seed(11)
    loader = loader_class(WhoAmI(4), collate_fn=as_it_is, num_workers=2)
    seeds = [base_seed, base_seed + 1]
    assert who(loader) == [(w, 2, seeds[w], seeds[w]) for w in (0, 1, 0, 1)]


def test_there_is_no_worker_in_the_main_process(loader_class):
    """get_worker_info() is None here, also while samples are made, and while workers run."""
    assert who(loader_class(WhoAmI(2), collate_fn=as_it_is)) == [None, None]
    for _ in loader_class(WhoAmI(4), collate_fn=as_it_is, num_workers=2):
        assert get_worker_info() is None
    assert pids(loader_class(WhoAmI(1), collate_fn=as_it_is)) == [os.getpid()]


def test_seeds_differ_from_epoch_to_epoch(loader_class):
    """Every iterator draws a new base seed; persistent workers keep the one they started with."""
    for persistent in (False, True):
        loader = loader_class(
            WhoAmI(2), collate_fn=as_it_is, num_workers=2, persistent_workers=persistent
        )
        assert (who(loader) == who(loader)) is persistent


def test_a_worker_has_one_thread_for_tensors(loader_class):
    """So that as many workers as cores do not get in each other's way."""
    loader = loader_class([0], collate_fn=count_threads, num_workers=1)
    assert list(loader) == [1]


def count_threads(samples):
    return torch.get_num_threads()


def test_workers_are_other_processes(loader_class):
    """Samples are made in two processes, none of them this one."""
    loader = loader_class(WhoAmI(8), collate_fn=as_it_is, num_workers=2)
    first, second, *others = pids(loader)
    assert os.getpid() != first != second != os.getpid()
    assert others == [first, second] * 3


# ---- worker_init_fn -----------------------------------------------------------------------------


def test_worker_init_fn_is_called_in_each_worker_after_seeding(loader_class):
    """It gets the worker's id, sees its copy of the dataset, and draws from the seed."""
    torch.manual_seed(2)
    loader = loader_class(Marked(4), collate_fn=as_it_is, num_workers=2, worker_init_fn=mark_copy)
    marks = [mark for (mark,) in loader]
    assert [mark[:3] for mark in marks] == [(w, w, True) for w in (0, 1, 0, 1)]
    # Called once: it is the same random number ever after, another one in each worker.
    assert marks[0] == marks[2]
    assert marks[0][3] != marks[1][3]


def test_worker_init_fn_is_called_once_in_a_persistent_worker(loader_class):
    """Not again in the next epoch."""
    loader = loader_class(
        Marked(2),
        collate_fn=as_it_is,
        num_workers=2,
        worker_init_fn=mark_copy,
        persistent_workers=True,
    )
    assert list(loader) == list(loader)


def test_worker_init_fn_is_not_called_in_the_main_process(loader_class):
    """Without workers there is nobody to set up."""
    assert list(loader_class([1], collate_fn=as_it_is, worker_init_fn=fail_in_second)) == [[1]]


def test_an_error_in_worker_init_fn_comes_as_that_workers_first_batch(loader_class):
    """The other worker's batch before it is handed out."""
    iterator = iter(loader_class(range(4), num_workers=2, worker_init_fn=fail_in_second))
    assert next(iterator).item() == 0
    kind, words = error_of_next(iterator)
    assert kind is ValueError
    assert words.startswith("Caught ValueError in DataLoader worker process 1.\nOriginal Traceback")
    assert "worker 1 will not start" in words


# ---- how long workers live ----------------------------------------------------------------------


def test_each_epoch_gets_fresh_workers_and_copies(loader_class):
    """What a dataset notes in a worker is forgotten; what changes in the main process arrives."""
    dataset = Counting(4)
    loader = loader_class(dataset, num_workers=2)
    assert [numbers(loader) for _ in range(2)] == [[[1], [1], [2], [2]]] * 2
    assert dataset.asked == 0
    dataset.asked = 10
    assert numbers(loader) == [[11], [11], [12], [12]]


def test_persistent_workers_keep_their_copies(loader_class):
    """The same processes go on in the next epoch, with all that the dataset has noted."""
    loader = loader_class(Counting(4), num_workers=2, persistent_workers=True)
    assert [numbers(loader) for _ in range(2)] == [[[1], [1], [2], [2]], [[3], [3], [4], [4]]]
    loader = loader_class(WhoAmI(4), collate_fn=as_it_is, num_workers=2, persistent_workers=True)
    assert pids(loader) == pids(loader)


def test_persistent_workers_have_one_iterator(loader_class):
    """iter() starts it again from the beginning, half-way or at the end."""
    loader = loader_class(range(4), num_workers=2, persistent_workers=True)
    first = iter(loader)
    assert next(first).item() == 0
    second = iter(loader)
    assert second is first
    assert numbers(second) == [[0], [1], [2], [3]]
    assert numbers(loader) == [[0], [1], [2], [3]]


def test_an_iterators_workers_can_be_looked_at(loader_class):
    """`_workers`, which tools read: processes with a pid, alive until the epoch ends."""
    iterator = iter(loader_class(WhoAmI(6), collate_fn=as_it_is, num_workers=2))
    workers = list(iterator._workers)
    assert all(worker.is_alive() for worker in workers)
    assert pids(iterator) == [worker.pid for worker in workers] * 3
    for worker in workers:
        worker.join(PATIENCE_S)
        assert not worker.is_alive()
        assert worker.exitcode in (0, -signal.SIGKILL)  # it was killed if the machine is too busy


def test_a_worker_that_does_not_end_is_killed_and_its_handle_says_so():
    """A stopped process ends only by a kill."""
    iterator = iter(forebay.DataLoader(range(4), num_workers=1))
    (worker,) = iterator._workers
    os.kill(worker.pid, signal.SIGSTOP)
    iterator._shutdown_workers()
    assert (worker.exitcode, worker.is_alive()) == (-signal.SIGKILL, False)


def test_the_handle_of_a_worker_that_was_killed_knows_its_exit_code():
    """As soon as its process is gone, though the trainer takes no batch."""
    iterator = iter(forebay.DataLoader(range(4), num_workers=1))
    (worker,) = iterator._workers
    os.kill(worker.pid, signal.SIGKILL)
    while worker.is_alive():
        pass
    assert worker.exitcode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("taken", [0, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_their_iterator(loader_class, taken, persistent):
    """Nothing is left of an iterator that nobody holds, whether it has begun or not."""
    loader = loader_class(range(100), num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    workers = list(iterator._workers)
    for _ in range(taken):
        next(iterator)
    del iterator, loader
    gc.collect()
    for worker in workers:
        worker.join(PATIENCE_S)
        assert not worker.is_alive()


def test_workers_can_be_ended_by_hand(loader_class):
    """terminate() does what it does for any process."""
    iterator = iter(loader_class(range(2), num_workers=2))
    assert numbers(iterator) == [[0], [1]]
    for worker in iterator._workers:
        worker.terminate()
        worker.join(PATIENCE_S)
        assert not worker.is_alive()


# ---- iterators ----------------------------------------------------------------------------------


def test_an_iterator_that_has_ended_stays_at_its_end(loader_class, num_workers):
    """StopIteration again and again."""
    iterator = iter(loader_class(range(3), batch_size=2, num_workers=num_workers))
    assert iter(iterator) is iterator
    assert numbers(iterator) == [[0, 1], [2]]
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


def test_a_loader_can_be_zipped_with_itself(loader_class, num_workers):
    """Both sides are the same batch, in memory of its own."""
    loader = loader_class(Squares(6), batch_size=2, num_workers=num_workers)
    pairs = list(zip(loader, loader, strict=True))
    assert len(pairs) == 3
    for one, other in pairs:
        assert_same(one, other)
        one[1].fill_(-1)
        assert other[1].ge(0).all()


@pytest.mark.slow
def test_loops_over_one_loader_can_be_nested(loader_class, num_workers):
    """Every pair of batches comes."""
    loader = loader_class(range(3), num_workers=num_workers)
    pairs = [(one.item(), other.item()) for one in loader for other in loader]
    assert pairs == [(one, other) for one in range(3) for other in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 3])
def test_fewer_batches_than_workers_is_enough(loader_class, count):
    """Idle workers hold nothing up."""
    loader = loader_class(range(count), num_workers=2, prefetch_factor=8)
    assert [numbers(loader) for _ in range(2)] == [[[n] for n in range(count)]] * 2


# ---- order and waiting --------------------------------------------------------------------------


def test_a_slow_batch_comes_in_its_turn(loader_class, gate):
    """In order, however long the first one takes."""
    loader = loader_class(OpensAtLast(8, 0, gate), num_workers=2)
    assert numbers(loader) == [[n] for n in range(8)]


class OpensAtLast(Gated):
    """The first sample waits until the fourth has been made, by the other worker."""

    def __getitem__(self, index):
        if index == 3:
            self.gate.open()
        return super().__getitem__(index)


def test_out_of_order_a_quick_batch_comes_before_a_slow_one(loader_class, gate):
    """in_order=False: the first batch waits at a gate, and the others do not wait for it."""
    loader = loader_class(Gated(6, 0, gate), num_workers=2, in_order=False)
    iterator = iter(loader)
    early = [next(iterator).item(), next(iterator).item()]
    assert early == [1, 3]
    gate.open()
    assert sorted(early + [batch.item() for batch in iterator]) == [0, 1, 2, 3, 4, 5]


def test_out_of_order_every_batch_comes_once(loader_class):
    """Epoch after epoch, none is lost and none comes twice."""
    loader = loader_class(range(40), batch_size=3, num_workers=2, in_order=False)
    for _ in range(2):
        loaded = numbers(loader)
        assert sorted(loaded) == [list(range(n, min(n + 3, 40))) for n in range(0, 40, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [1, 0.5])
def test_a_batch_that_takes_too_long_is_a_timeout(loader_class, gate, timeout):
    """`timeout=` seconds without a batch: torch's RuntimeError, in torch's words."""
    iterator = iter(loader_class(Gated(2, 0, gate), num_workers=1, timeout=timeout))
    kind, words = error_of_next(iterator)
    gate.open()
    assert issubclass(kind, RuntimeError)
    assert f"DataLoader timed out after {timeout} seconds" in words


def test_a_timeout_that_is_not_reached_changes_nothing(loader_class):
    """Nor does the time that the consumer takes count."""
    loader = loader_class(range(4), 2, num_workers=2, timeout=PATIENCE_S)
    assert [numbers(loader) for _ in range(2)] == [[[0, 1], [2, 3]]] * 2


# ---- start methods ------------------------------------------------------------------------------


class ThreadContext(multiprocessing.get_context("spawn").__class__):
    """Starts threads in place of processes, as MONAI's `ThreadDataLoader` may."""

    Process = threading.Thread


def test_a_context_that_starts_threads_is_refused():
    """They would run in the trainer's process what ends with the process."""
    context = ThreadContext()
    loader = forebay.DataLoader(Squares(4), num_workers=1, multiprocessing_context=context)
    with pytest.raises(forebay.OptionError, match=r"instances of Thread(.|\n)*backend='thread'"):
        iter(loader)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_workers_can_be_started_in_any_way(loader_class, method):
    """fork, forkserver, spawn: the same batches, seeds and worker_init_fn."""
    torch.manual_seed(11)
    base_seed = torch.empty((), dtype=torch.int64).random_().item()
    torch.manual_seed(11)
    loader = loader_class(
        WhoAmI(4),
        collate_fn=as_it_is,
        num_workers=1,
        multiprocessing_context=method,
        worker_init_fn=mark_copy,
    )
    known = (0, 1, base_seed, base_seed)
    assert [[(index, seen) for index, seen, _ in batch] for batch in loader] == [
        [(n, known)] for n in range(4)
    ]


def test_a_lambda_for_spawned_workers_is_refused_with_what_to_do():
    """The error is torch's own; the note says what forebay does without the argument."""
    loader = forebay.DataLoader(
        range(2), num_workers=1, collate_fn=lambda samples: samples, multiprocessing_context="spawn"
    )
    with pytest.warns(UserWarning, match="Got pickle error"):
        with pytest.raises(Exception, match="pickle") as caught:
            iter(loader)
    assert "pass multiprocessing_context='fork'" in caught.value.__notes__[-1]


OWN_WORKERS = """
    multiprocessing.set_start_method({method!r})

    def main():
        class Squares(Dataset):
            def __init__(self):
                self.square = lambda index: index * index
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return self.square(index)
        loader = forebay.DataLoader(Squares(), 2, num_workers=1, collate_fn=lambda batch: batch)
        print(list(loader))

    if __name__ == "__main__":
        main()
"""


@pytest.mark.slow
def test_the_default_start_method_of_newer_pythons_takes_nothing_away(script):
    """Lambdas and local classes need no pickling where only the program's method is forkserver."""
    ended = script(OWN_WORKERS.format(method="forkserver")).end()
    assert (ended.out, ended.code) == ("[[0, 1], [4, 9]]\n", 0), ended.err


@pytest.mark.slow
def test_a_start_method_of_the_program_is_not_called_an_argument(script):
    """Nothing was passed that could be left out."""
    ended = script(OWN_WORKERS.format(method="spawn")).end()
    assert ended.code == 1
    assert "start method 'spawn' pickles" in ended.err
    assert "pass multiprocessing_context='fork'" in ended.err
    assert "leave multiprocessing_context out" not in ended.err


UNGUARDED = """
from forebay import DataLoader

class Data:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index

print("begins", flush=True)
list(DataLoader(Data(), num_workers=2, multiprocessing_context="spawn"))
"""


@pytest.mark.slow
def test_a_script_without_a_guard_ends_at_once_and_is_told_of_it(tmp_path):
    """Its first spawned process imports it again, and cannot begin: no other one is tried."""
    path = tmp_path / "unguarded.py"
    path.write_text(UNGUARDED)
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stdout.count("begins") == 2
    assert 'if __name__ == "__main__":' in ended.stderr.partition("WorkerDiedError")[2]


@pytest.mark.slow
def test_a_class_of_a_program_without_a_file_is_named():
    """A spawned process cannot import it; none is started."""
    command = [sys.executable, "-c", UNGUARDED]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stdout.count("begins") == 1
    assert "OptionError: the start method 'spawn' cannot find Data: " in ended.stderr
