"""Reading `state_dict()` and `epoch` changes nothing, and reads no sampler."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler, Sampler

from forebay import DataLoader, OptionError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # A state of an epoch that is then left by break: here the state is only read.
    pytest.mark.filterwarnings("ignore:epoch 1 was left after batch 3 and state_dict"),
]


class Draws:
    """Samples with random numbers, so that it shows when something else has drawn."""

    def __len__(self):
        return 13

    def __getitem__(self, index):
        return index, torch.rand(()).item()


class Stream(IterableDataset):
    """The same, read in one go."""

    def __iter__(self):
        return map(Draws().__getitem__, range(13))


class Logging(Sampler):
    """A sampler of the user, which draws an index at a time and counts how far it was read."""

    def __init__(self) -> None:
        self.reads = 0

    def __iter__(self):
        for _ in range(13):
            self.reads += 1
            yield int(torch.randint(13, ()))
        self.reads += 1

    def __len__(self):
        return 13


class Resuming(Logging):
    """The same with a position of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.next = 0

    def __iter__(self):
        while self.next < 13:
            self.reads += 1
            self.next += 1
            yield (self.next * 5) % 13
        self.reads += 1
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


SAMPLERS: dict[str, Any] = {
    "sequential": dict,
    "random": lambda: {"shuffle": True},
    "generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "drawn": lambda: {"sampler": RandomSampler(range(13), replacement=True, num_samples=13)},
    "logging": lambda: {"sampler": Logging()},
    "resuming": lambda: {"sampler": Resuming()},
    "stream": dict,
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "in_order": False},
    {"num_workers": 1, "persistent_workers": True},
    {"seed": 3},
    {"seed": 3, "num_workers": 1, "buffer": "1MB"},
    {"backend": "thread", "num_workers": 1, "seed": 3},
]


def state_of(loader: DataLoader[Any]) -> Any:
    """Return the state, or that there is none: in any order there is none within an epoch."""
    try:
        return copy.deepcopy(loader.state_dict())
    except OptionError as error:
        return str(error).partition("\n")[0]


def recorded(name: str, options: dict[str, Any], times: int) -> list[Any]:
    """Return all that a training sees, reading the state so many times at each moment."""
    torch.manual_seed(1)
    dataset = Stream() if name == "stream" else Draws()
    seen: list[Any] = []
    with DataLoader(dataset, batch_size=2, **SAMPLERS[name](), **options) as loader:
        sampler = loader.sampler
        is_shared = options.get("backend") == "thread"  # threads draw from the same generators

        def reached() -> tuple[int, list[int]]:
            return getattr(sampler, "reads", 0), [] if is_shared else torch.get_rng_state().tolist()

        def look() -> None:
            before = reached()
            states = [(state_of(loader), loader.epoch) for _ in range(times)]
            assert all(each == states[0] for each in states)
            assert reached() == before

        look()
        for epoch in range(3):
            batches = iter(loader)
            look()
            for number, (index, value) in enumerate(batches):
                look()
                # The loop draws, too: it shows when a sampler draws earlier or later.
                if not options.get("num_workers"):
                    seen.append((torch.rand(()).item(), getattr(sampler, "reads", 0)))
                if options.get("in_order", True):
                    seen.append((index.tolist(), value.tolist()))
                if epoch == 1 and number == 2:
                    break
            look()
            seen.append((loader.epoch, reached()[1]))
        loader.close()
        look()
        seen.append(state_of(loader))
    return seen


# Each sampler here and in a worker, and each way to work with one sampler; all pairs take long.
USUAL = ("random", "resuming", "stream")
PAIRS = [
    pytest.param(
        *(name, options),
        marks=() if name in USUAL or options in OPTIONS[:2] else pytest.mark.thorough,
        id=f"{name}, {options}",
    )
    for name in SAMPLERS
    for options in OPTIONS
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), PAIRS)
def test_reading_the_state_changes_nothing(name, options) -> None:
    """Not the batches, not the random numbers, and not how far a sampler was read."""
    if name == "stream" and options.get("backend") == "thread":
        pytest.skip("threads cannot share an iterable dataset")
    if name == "generator" and "seed" in options:
        pytest.skip("a generator beside a seed is refused")
    assert recorded(name, options, 3) == recorded(name, options, 0)


class Unsized(Resuming):
    """The same without a length."""

    __len__ = None


def test_the_end_of_a_sampler_without_a_length_is_known_when_it_is_read() -> None:
    """Without workers it is read as late as in torch: a state may be of an epoch without rest."""
    with DataLoader(Draws(), batch_size=13, sampler=Unsized()) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        assert (state["epoch"], state["batch"]) == (0, 1)
        assert next(batches, None) is None
        assert loader.state_dict()["epoch"] == loader.epoch == 1
        (following,) = [index.tolist() for index, _ in loader]
    with DataLoader(Draws(), batch_size=13, sampler=Unsized()) as loader:
        loader.load_state_dict(state)
        assert list(loader) == []
        assert loader.epoch == 1
        assert [index.tolist() for index, _ in loader] == [following]
