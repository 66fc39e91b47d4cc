"""Workers that replace others draw other random numbers than those have drawn."""

from __future__ import annotations

import json
import random
import signal

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from forebay import DataLoader

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Drawing(IterableDataset):
    """A stream whose samples are random numbers, with a state."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        begin, self.at = self.at, 0
        for number in range(begin, 8):
            self.at = number + 1
            yield random.random()
        self.at = 0

    def state_dict(self):
        """How far it was read."""
        return {"at": self.at}

    def load_state_dict(self, state):
        """Read on from there."""
        self.at = state["at"]


class Told(Drawing):
    """One that is told the epoch: its workers begin anew with each."""

    def set_epoch(self, epoch):
        """Be told it."""


WAYS = {
    "buffer": {"num_workers": 1, "buffer": "1MB"},
    "persistent": {"num_workers": 1, "persistent_workers": True},
    "plain": {"num_workers": 1},
}


def numbers_of(loader, most=8):
    """The numbers of an epoch, or of its first batches."""
    found = []
    for batch in loader:
        found += batch.tolist()
        if len(found) >= most:
            break
    return found


@pytest.mark.parametrize("kind", [Drawing, Told])
@pytest.mark.parametrize("way", WAYS)
def test_without_a_seed_each_epoch_draws_other_numbers(kind, way):
    """Also when workers are replaced between epochs, by `set_epoch` or `refresh`."""
    with DataLoader(kind(), batch_size=2, **WAYS[way]) as loader:
        found = numbers_of(loader)
        loader.refresh()
        found += numbers_of(loader) + numbers_of(loader)
    assert len(set(found)) == 24


@pytest.mark.parametrize("way", WAYS)
def test_without_a_seed_a_resume_does_not_draw_again(way):
    """What came before the state is not drawn a second time in the rest of the epoch."""
    with DataLoader(Drawing(), batch_size=2, **WAYS[way]) as loader:
        iterator = iter(loader)
        first = next(iterator).tolist() + next(iterator).tolist()
        state = json.loads(json.dumps(loader.state_dict()))
    with DataLoader(Drawing(), batch_size=2, **WAYS[way]) as loader:
        loader.load_state_dict(state)
        rest = numbers_of(loader, 4)
    assert len(set(first + rest)) == 8


class AlarmError(Exception):
    """What a signal's handler raises."""


@pytest.mark.slow
@pytest.mark.parametrize("delay_us", range(500, 12_500, 1_500))
def test_an_exception_of_a_handler_while_workers_end_leaves_no_process(delay_us):
    """`no_leaks` sees that none, and no pipe of theirs, is left once the loader is closed."""

    def raises(*_):
        raise AlarmError

    before = signal.signal(signal.SIGALRM, raises)
    try:
        with DataLoader(range(4), batch_size=2, num_workers=1) as loader:
            iterator = iter(loader)
            next(iterator)
            try:
                signal.setitimer(signal.ITIMER_REAL, delay_us / 1e6)
                for _ in iterator:
                    pass
                signal.pause()
            except AlarmError:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


class Numbers(IterableDataset):
    """A stream that is divided among workers."""

    def __iter__(self):
        info = get_worker_info()
        yield from range(info.id, 24, info.num_workers)


@pytest.mark.parametrize("options", [{}, {"seed": 3}])
@pytest.mark.parametrize("way", [{"buffer": "1MB"}, {"persistent_workers": True}, {}])
def test_a_look_at_one_batch_of_a_stream_loses_no_sample(way, options):
    """The first iteration, left after one batch, is begun again: by all workers."""
    with DataLoader(Numbers(), batch_size=2, num_workers=3, **way, **options) as loader:
        next(iter(loader))
        epochs = [sorted(n for batch in loader for n in batch.tolist()) for _ in range(2)]
    assert epochs == [[*range(24)]] * 2
