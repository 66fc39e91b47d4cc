"""Reading `state_dict()` and `epoch` changes nothing, and reads no sampler."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Sampler

from forebay import DataLoader

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
