"""Every epoch of a stream is whole, and a resume is the rest of its epoch and then the next one."""

from __future__ import annotations

import json

import pytest
from stream_kinds import COUNT, KINDS, NEED_SEED, seed_worker, set_epoch

from forebay import DataLoader

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WAYS = {
    "here": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "buffer": {"num_workers": 2, "buffer": "1MB"},
}
EPOCHS = 3


def loader_of(kind, way, seed):
    """A loader of a kind of streams: eight batches, or six."""
    init = {"worker_init_fn": seed_worker} if kind == "seed_worker" else {}
    return DataLoader(KINDS[kind](), batch_size=3, seed=seed, **init, **WAYS[way])


def epoch_of(loader, epoch, most=None):
    """Return samples of an epoch, or of the rest of one, and the state after so many batches."""
    set_epoch(loader.dataset, epoch)
    found, state = [], None
    iterator = iter(loader)
    for number, batch in enumerate(iterator, 1):
        found += batch.tolist()
        if number == most:
            state = json.loads(json.dumps(loader.state_dict()))
            break
    return found, state


def run(kind, way, seed, cuts):
    """Compare whole epochs, and what a resume gives after each cut."""
    with loader_of(kind, way, seed) as loader:
        expected = [epoch_of(loader, epoch)[0] for epoch in range(EPOCHS + 1)]
    whole = [sorted(number for number, _ in epoch) for epoch in expected]
    assert kind == "onward" or whole == [list(range(COUNT))] * (EPOCHS + 1)
    for epoch, batches in cuts:
        with loader_of(kind, way, seed) as loader:
            for before in range(epoch):
                epoch_of(loader, before)
            first, state = epoch_of(loader, epoch, batches)
        with loader_of(kind, way, seed) as loader:
            set_epoch(loader.dataset, epoch)
            loader.load_state_dict(state)
            rest = [epoch_of(loader, each)[0] for each in range(loader.epoch, EPOCHS + 1)]
        if loader.epoch > EPOCHS + 1 or batches >= 8:
            continue
        assert [first + rest[0], *rest[1:]] == expected[epoch:], (epoch, batches)


# Every kind, way and seed once or more.
DAILY = [
    *(("chain", "buffer", 0), ("sticky set_epoch", "buffer", None), ("sticky", "here", 0)),
    *(("global order", "workers", 0), ("drawing", "persistent", 0), ("seed_worker", "buffer", 0)),
]
CASES = [
    pytest.param(kind, way, seed, marks=() if (kind, way, seed) in DAILY else pytest.mark.full)
    for kind in KINDS
    for way in WAYS
    for seed in (0, None)
    if seed == 0 or kind not in NEED_SEED
]


@pytest.mark.parametrize(("kind", "way", "seed"), CASES)
def test_every_epoch_is_whole_and_every_resume_is_the_rest(kind, way, seed):
    """Of kinds of streams, states and generators; cut in three epochs."""
    run(kind, way, seed, [(0, 2), (1, 3), (2, 5)])
