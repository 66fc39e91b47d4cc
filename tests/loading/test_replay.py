"""replay(): the batches of any epoch that can be made again, of any sampler, on any rank."""

from __future__ import annotations

import pytest
import torch
from same import assert_same
from streams import DrawingSampler, Noisy
from torch.utils.data import RandomSampler, Sampler, WeightedRandomSampler

from forebay import DataLoader, OptionError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNT = 26


class Told(Sampler):
    """Its order is a function of the epoch that it is told."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return COUNT

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(COUNT, generator=generator).tolist())


class Positioned(Sampler):
    """Resumes within an epoch, from its own state."""

    def __init__(self):
        self.epoch, self.at = 0, 0

    def __len__(self):
        return COUNT

    def __iter__(self):
        while self.at < COUNT:
            self.at += 1
            yield (self.at * 7 + self.epoch) % COUNT
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch, self.at = state["epoch"], state["at"]


WEIGHTS = torch.arange(1.0, COUNT + 1)
SAMPLERS = {
    "weights": lambda: WeightedRandomSampler(WEIGHTS, COUNT),
    "draws": lambda: DrawingSampler(COUNT),
    "a list": lambda: [*range(COUNT - 1, -1, -1)],
    "told the epoch": Told,
    "own generator": lambda: RandomSampler(
        range(COUNT), generator=torch.Generator().manual_seed(4)
    ),
    "own position": Positioned,
}
WITH_STATE = ("own generator", "own position")


def loaders(name, world, batch_size=3, **options):
    """Return the loader of each rank."""
    ranks = [{"world_size": world, "rank": rank} for rank in range(world)] if world > 1 else [{}]
    return [
        DataLoader(Noisy(COUNT), batch_size, sampler=SAMPLERS[name](), seed=5, **rank, **options)
        for rank in ranks
    ]


def epoch(loader, number):
    """Return the batches of an epoch, which the sampler is told."""
    if isinstance(loader.sampler, Told):
        loader.sampler.set_epoch(number)
    return list(loader)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 1, 3])
@pytest.mark.parametrize("name", SAMPLERS)
def test_each_batch_of_each_rank_is_made_again(name, world):
    """Of an epoch that runs, in any order, while others are prefetched; and by a new loader."""
    made = []
    for loader in loaders(name, world):
        with loader:
            made.append([epoch(loader, number) for number in range(2)])
    for loader, expected in zip(loaders(name, world, num_workers=0), made, strict=True):
        assert_same(epoch(loader, 0), expected[0])
        if name == "told the epoch":
            loader.sampler.set_epoch(1)
        rest = iter(loader)
        assert_same(next(rest), expected[1][0])
        for batch in (*range(len(expected[1]) - 1, -1, -1), 1):
            assert_same(loader.replay(epoch=1, batch=batch), expected[1][batch])
        with pytest.raises(IndexError, match=f"epoch 1 has no batch {len(expected[1])}"):
            loader.replay(epoch=1, batch=len(expected[1]))
        assert_same(list(rest), expected[1][1:])
    if name in WITH_STATE:
        with pytest.raises(OptionError, match="the sampler has a state, and its state before"):
            loaders(name, world)[0].replay(epoch=1, batch=0)
        return
    for loader, expected in zip(loaders(name, world), made, strict=True):
        if name == "told the epoch":
            loader.sampler.set_epoch(1)
        for batch in range(len(expected[0])):
            assert_same(loader.replay(epoch=1, batch=batch), expected[1][batch])


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("world", [2, 1])
def test_the_rest_of_a_resumed_epoch_is_made_again(name, world):
    """Where it began, also if each batch has another size since."""
    first = loaders(name, world)
    states = []
    for loader in first:
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
        states.append(loader.state_dict())
    for size in (3, 2):
        for loader, state in zip(loaders(name, world, size), states, strict=True):
            loader.load_state_dict(state, strict=size == 3)
            iterator = iter(loader)
            begun = 2
            expected = [next(iterator)]
            for at in range(2):
                expected.append(next(iterator))
                assert_same(loader.replay(epoch=0, batch=begun + at), expected[at])
            if size == 2 and name != "own position":
                with pytest.raises(OptionError, match=r"was made before .*the batch size"):
                    loader.replay(epoch=0, batch=0)
