"""Batches that are slices of tensors or columns: equal to torch's, and made without workers."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import PATIENCE_S
from same import assert_same
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset

from forebay import Buffer, DataLoader, collate, from_table, mix
from forebay.loading import local_feed

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

ROWS = 23
WAYS = {
    "trainer": {},
    "workers": {"num_workers": 2},
    "buffer": {"num_workers": 2, "buffer": "1MB"},
    "threads": {"num_workers": 2, "backend": "thread", "buffer": "1MB"},
}


def table():
    return from_table(
        pa.table(
            {
                "number": np.arange(ROWS),
                "half": np.linspace(0, 1, ROWS, dtype=np.float32),
                "word": [f"word {row}" for row in range(ROWS)],
                "kind": pa.array(["a", "b", "c"] * 7 + ["a", "b"]).dictionary_encode(),
                "pair": pa.array([[row, -row] for row in range(ROWS)], pa.list_(pa.int16(), 2)),
                "flag": [row % 3 == 0 for row in range(ROWS)],
            }
        ),
        columns=["number", "half", "word", "kind", "pair", "flag"],
    )


def tensors():
    return TensorDataset(torch.arange(ROWS), torch.rand(ROWS, 2))


DATASETS = {
    "table": table,
    "tensors": tensors,
    "part": lambda: Subset(table(), [4, 4, 0, 22, 7, 9, -1]),
    "part of a part": lambda: Subset(Subset(tensors(), range(3, 20)), np.arange(10)[::-1].copy()),
    "side by side": lambda: StackDataset(table(), torch.arange(ROWS), np.ones((ROWS, 2))),
    "by name": lambda: StackDataset(row=table(), more=tensors(), plain=torch.eye(ROWS)),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DATASETS)
def test_batches_are_those_of_torch(name, way):
    """In type, order and bits, which torch makes of single samples; whatever makes them."""
    dataset, arguments = DATASETS[name](), {"batch_size": 4, "shuffle": True}
    found = []
    with DataLoader(dataset, **arguments, **WAYS[way]) as loader:
        assert loader._kind().is_sliced
        for make in (lambda: TorchDataLoader(dataset, **arguments), lambda: loader):
            torch.manual_seed(3)
            found.append([*make(), *make()])
        assert loader.statistics().num_workers == 0
    if "buffer" not in WAYS[way]:
        assert_same(found[1], found[0])
        return
    # A buffer has an order of its own, which a loader without workers has with the same seed.
    torch.manual_seed(3)
    with DataLoader(dataset, **arguments, seed=loader.state_dict()["seed"]) as other:
        assert_same([*other, *other], found[1])


@pytest.mark.parametrize("name", DATASETS)
def test_a_seed_gives_the_batches_of_single_samples(name):
    """By any number of workers, and of ranks."""

    class OneByOne(Dataset):
        def __len__(self):
            return len(dataset)

        def __getitem__(self, index):
            return dataset[index]

    dataset = DATASETS[name]()
    arguments = {"batch_size": 2, "shuffle": True, "seed": 5, "world_size": 2, "rank": 1}
    with DataLoader(OneByOne(), **arguments) as loader:
        expected = [*loader, *loader]
    for way in WAYS.values():
        with DataLoader(dataset, **arguments, **way) as loader:
            assert_same([*loader, *loader], expected)


def test_a_mixture_of_tables_is_that_of_their_samples():
    """Which come from either table, by its weight."""
    mixture = mix({"one": (Subset(table(), range(9)), 2), "two": (table(), 1)})
    with DataLoader(mixture, batch_size=6, seed=0) as loader:
        expected = list(loader)
    assert set(expected[0]) == set(table()[0])
    with DataLoader(mixture, batch_size=6, seed=0, num_workers=2, buffer="1MB") as loader:
        assert_same(list(loader), expected)


# ---- lists of different lengths ------------------------------------------------------------------


def ragged():
    lists = [list(range(row % 4)) for row in range(ROWS)]
    return from_table({"tokens": lists, "number": np.arange(ROWS)}, columns=["tokens", "number"])


@pytest.mark.parametrize("way", WAYS)
def test_lists_of_different_lengths_name_the_collate_function_that_pads(way):
    """Where the batch is made; those of equal lists are made all the same."""
    sampler = [[1, 5], [4, 8], [0, 1], [2, 6]]
    with DataLoader(ragged(), batch_sampler=sampler, **WAYS[way]) as loader:
        iterator = iter(loader)
        assert next(iterator)["tokens"].tolist() == [[0], [0]]
        assert next(iterator)["tokens"].shape == (2, 0)
        with pytest.raises(RuntimeError, match="equal size") as caught:
            next(iterator)
        notes = "\n".join(caught.value.__notes__)
        assert "collate_fn=by_field(tokens=pad())" in notes and "samples [0, 1]" in notes
        assert next(iterator)["tokens"].tolist() == [[0, 1], [0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_pad_lists_of_a_table(start, tmp_path):
    """They have the columns of the trainer, or map the same file."""
    samples = ragged().__getitems__(range(ROWS))
    rows = {name: [each[name].tolist() for each in samples] for name in samples[0]}
    with pa.ipc.new_file(tmp_path / "t.arrow", pa.table(rows).schema) as writer:
        writer.write_table(pa.table(rows), 5)
    arguments = {"batch_size": 6, "collate_fn": collate.by_field(tokens=collate.pad())}
    with DataLoader(ragged(), **arguments) as loader:
        expected = list(loader)
    mapped = from_table(tmp_path / "t.arrow", columns=["tokens", "number"])
    for dataset in (ragged(), mapped):
        context = {"num_workers": 1, "multiprocessing_context": start}
        with DataLoader(dataset, **arguments, **context) as loader:
            assert_same(list(loader), expected)
            assert loader.statistics().num_workers == 1


# ---- in advance ----------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    """Have a thread make slices in advance, small as they are; list what it made, and the trainer.

    Of each batch: whether the thread made it, and its number. `arrived` is set with each.
    """
    trainer, actual, found = threading.get_ident(), local_feed._made, []
    arrived = threading.Semaphore(0)

    def recorded(job, request):
        result = actual(job, request)
        is_ahead = threading.get_ident() != trainer
        found.append((is_ahead, request.batch))
        if is_ahead:
            arrived.release()
        return result

    monkeypatch.setattr(local_feed, "_made", recorded)
    monkeypatch.setattr(local_feed, "LEAST_S", 1e-9)  # the first batch is always the trainer's
    monkeypatch.setattr(local_feed, "STEP_SHARE", 0.0)
    recorded.found, recorded.arrived = found, arrived
    return recorded


def test_a_thread_makes_batches_in_advance(made):
    """As many as workers would prefetch, while the trainer does something else; in order."""
    arguments = {"num_workers": 1, "prefetch_factor": 3}
    with DataLoader(tensors(), batch_size=2, **arguments) as loader:
        iterator = iter(loader)
        batches = [next(iterator), next(iterator)]
        for _ in range(3):
            assert made.arrived.acquire(timeout=PATIENCE_S)
        while loader.statistics().ready_batches < 3:  # the third is made, and not there yet
            time.sleep(0.001)
        assert [batch for is_ahead, batch in made.found if is_ahead][-3:] == [2, 3, 4]
        batches += iterator
        assert [number for numbers, _ in batches for number in numbers] == list(range(ROWS))
        assert [number for _, number in sorted(made.found, key=lambda each: each[1])] == [
            *range(12)
        ]


@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        ({}, 0),
        ({"num_workers": 3}, 6),
        ({"num_workers": 3, "prefetch_factor": 4}, 12),
        ({"num_workers": 3, "buffer": Buffer(max_batches=5)}, 5),
        ({"num_workers": 3, "buffer": Buffer("1KiB")}, 1024 // (4 * 8)),
        ({"num_workers": 3, "buffer": Buffer("1KiB", max_batches=5)}, 5),
        ({"num_workers": 3, "buffer": Buffer(8)}, 1),
    ],
)
def test_as_many_batches_are_made_in_advance_as_workers_would_make(arguments, most):
    """A buffer's marks count, and there is room for one in any case."""
    loader = DataLoader(torch.arange(10), batch_size=4, **arguments)
    assert loader._kind().sliced_ahead == most


def test_without_workers_there_is_no_thread(made):
    """Samples that draw would draw in it while the trainer does."""
    with DataLoader(range(ROWS), batch_size=2, seed=3) as loader:
        for _ in range(2):
            assert [number for batch in loader for number in batch] == list(range(ROWS))
    assert not any(is_ahead for is_ahead, _ in made.found)


def test_the_trainer_makes_what_the_thread_has_not_begun(made, monkeypatch):
    """So that it waits for one batch at most: no more than without the thread."""
    actual, may_go = local_feed._made, threading.Event()

    def slow_thread(job, request):
        if request.batch > 1 and threading.current_thread() is not threading.main_thread():
            assert may_go.wait(PATIENCE_S)
        return actual(job, request)

    monkeypatch.setattr(local_feed, "_made", slow_thread)
    sampler = [[row] for row in range(6)]
    with DataLoader(torch.arange(6), batch_sampler=sampler, num_workers=2) as loader:
        iterator = iter(loader)
        found = [next(iterator).item() for _ in range(2)]  # the thread may hang in the third
        may_go.set()
        found += [each.item() for each in iterator]
    assert found == list(range(6))
    assert sorted(number for _, number in made.found) == list(range(6)), "each is made once"


def test_an_error_of_a_batch_is_raised_where_it_is_taken(made):
    """Not where it was made, and those after it are returned."""
    sampler = [[0], [1], [2], [3, ROWS], [4], [5]]
    with DataLoader(table(), batch_sampler=sampler, num_workers=2) as loader:
        iterator = iter(loader)
        assert [next(iterator)["number"].item() for _ in range(2)] == [0, 1]
        for _ in range(2):
            assert made.arrived.acquire(timeout=PATIENCE_S)
        assert next(iterator)["number"].item() == 2
        with pytest.raises(IndexError, match=f"there are {ROWS}") as caught:
            next(iterator)
        assert f"samples [3, {ROWS}]" in "\n".join(caught.value.__notes__)
        assert [each["number"].item() for each in iterator] == [4, 5]


def test_an_interrupt_loses_no_batch(made, monkeypatch):
    """Ctrl-C while the trainer makes one, or waits for the thread; each comes when asked again."""
    actual, interrupts = local_feed._made, [5, 2, 0]

    def interrupted(job, request):
        is_trainer = threading.current_thread() is threading.main_thread()
        if is_trainer and interrupts and request.batch >= interrupts[-1]:
            interrupts.pop()
            raise KeyboardInterrupt
        return actual(job, request)

    monkeypatch.setattr(local_feed, "_made", interrupted)
    waits = [1]
    result = local_feed.Future.result

    def interrupted_wait(self, *arguments):
        if waits:
            waits.pop()
            raise KeyboardInterrupt
        return result(self, *arguments)

    monkeypatch.setattr(local_feed.Future, "result", interrupted_wait)
    with DataLoader(torch.arange(200), batch_size=2, num_workers=2) as loader:
        iterator, found, count = iter(loader), [], 0
        while len(found) < 100:
            try:
                found.append(next(iterator).tolist())
            except KeyboardInterrupt:
                count += 1
            if len(found) == 20 and waits:
                assert made.arrived.acquire(timeout=PATIENCE_S)
        assert next(iterator, None) is None
    assert found == torch.arange(200).reshape(100, 2).tolist()
    assert count >= 3


def test_a_thread_that_cannot_be_started_is_not_needed(made, monkeypatch):
    """Where the system refuses one, the trainer makes all batches."""

    def refuse(self, *arguments):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(local_feed.ThreadPoolExecutor, "submit", refuse)
    with DataLoader(torch.arange(9), batch_size=2, num_workers=2) as loader:
        assert [each.tolist() for each in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert not any(is_ahead for is_ahead, _ in made.found)


@pytest.mark.parametrize("way", ["workers", "buffer"])
def test_a_change_between_epochs_is_seen(made, way):
    """The next epoch has it: nothing of it was made before it began."""
    dataset = TensorDataset(torch.zeros(40))
    with DataLoader(dataset, batch_size=2, **WAYS[way]) as loader:
        assert sum(batch.sum() for (batch,) in loader) == 0
        dataset.tensors[0].fill_(1)
        assert sum(batch.sum() for (batch,) in loader) == 40
        dataset.tensors = (torch.full((60,), 2.0),)
        assert sum(batch.sum() for (batch,) in loader) == 120


def test_random_numbers_of_the_trainer_are_its_own(made):
    """Slices draw none, with a seed or without."""
    random.seed(1)
    expected = [random.random() for _ in range(12)]
    random.seed(1)
    with DataLoader(tensors(), batch_size=2, seed=0, num_workers=2) as loader:
        assert [random.random() for _ in loader] == expected


FORKED = """
from forebay.loading import local_feed
local_feed.LEAST_S = local_feed.STEP_SHARE = 0.0
loader = forebay.DataLoader(torch.arange(1000), batch_size=2, num_workers=2, {options})
iterator = iter(loader)
first = [next(iterator).tolist() for _ in range(3)]
child = os.fork()
rest = [each.tolist() for each in iterator]
assert first + rest == torch.arange(1000).reshape(500, 2).tolist(), first + rest
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("both")
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "buffer='1MB'"], ids=["plain", "buffer"])
def test_a_fork_of_the_trainer_makes_the_rest_of_its_batches(script, options):
    """It has no such thread, and waits for none."""
    assert script(FORKED.format(options=options)).end() == (0, "both\n", "")


@pytest.mark.slow
def test_a_script_ends_while_a_thread_makes_batches(script):
    """With everything alive, and in the middle of an epoch."""
    ending = script("""
        from forebay.loading import local_feed
        local_feed.LEAST_S = local_feed.STEP_SHARE = 0.0
        loader = forebay.DataLoader(torch.rand(100000, 64), batch_size=4096, num_workers=2)
        iterator = iter(loader)
        kept = [next(iterator) for _ in range(3)]
        print(len(kept))
    """).end()
    assert ending == (0, "3\n", "")


def test_workers_with_a_function_of_their_own_are_started(tmp_path):
    """`worker_init_fn` is called in workers."""
    with DataLoader(tensors(), 4, num_workers=1, worker_init_fn=print) as loader:
        assert not loader._kind().is_sliced


def negative(batch, *, collate_fn_map=None):
    """Collate tensors in a way of its own."""
    return -torch.stack(batch)


def firsts_backwards(batch, *, collate_fn_map=None):
    """Collate tuples in a way of its own."""
    return torch.stack([each[0] for each in reversed(batch)])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["samples", "a tensor", "tuples"])
def test_functions_that_replace_torchs_are_called(kind, num_workers, monkeypatch):
    """Those in `default_collate_fn_map`, for what would be sliced, or stacked by a worker."""
    dataset, replaced, function, want = {
        "samples": (list(torch.arange(2.0)), torch.Tensor, negative, [0.0, -1.0]),
        "a tensor": (torch.arange(2.0), torch.Tensor, negative, [0.0, -1.0]),
        "tuples": (TensorDataset(torch.arange(2.0)), tuple, firsts_backwards, [1.0, 0.0]),
    }[kind]
    table = torch.utils.data._utils.collate.default_collate_fn_map
    monkeypatch.setitem(table, replaced, function)
    loader = DataLoader(dataset, batch_size=2, num_workers=num_workers)
    assert [batch.tolist() for batch in loader] == [want]
