"""Batches of shards: the same for any number of ranks and workers, and after any interruption."""

from __future__ import annotations

from functools import partial
from itertools import chain

import pytest
from written import SAMPLES, hashed, loader_of, texts, write_records, write_tars

import forebay

FORMATS = {
    "tar": lambda folder: write_tars(folder, SAMPLES, 5),
    **{
        suffix: partial(write_records, suffix=suffix)
        for suffix in (".parquet", ".jsonl", ".jsonl.gz", ".arrow", ".mds")
    },
}


@pytest.fixture(scope="module", params=FORMATS)
def written(request, tmp_path_factory):
    """Return a folder with shards of a format."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("format", "json_lines"):
            patch.setattr(f"forebay.shards.{module}.BLOCK_BYTES", 20_000)
        FORMATS[request.param](folder)
        yield folder, forebay.open_shards(folder, window="200KB", progress=False)


@pytest.fixture(scope="module")
def whole(written):
    """Return the hash of an epoch read by one process."""
    with loader_of(written[1], 48) as loader:
        return hashed(loader).hexdigest()


def ranks_of(dataset, world, **arguments):
    """Return the loader of each rank; their batches together have 48 samples."""
    return [
        loader_of(dataset, 48 // world, world_size=world, rank=rank, **arguments)
        for rank in range(world)
    ]


def read(ranks, found, most=None):
    """Add the batches of ranks to a hash, rank after rank, at most so many."""
    for at, parts in enumerate(zip(*ranks, strict=True), 1):
        hashed([chain(*parts)], found)
        if at == most:
            break


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("world", "workers"),
    [
        *((2, 1), (3, 0)),
        *(
            pytest.param(*pair, marks=pytest.mark.thorough)
            for pair in ((1, 1), (1, 3), (2, 3), (3, 1), (4, 0), (4, 1), (4, 3))
        ),
    ],
)
def test_ranks_and_workers_change_no_batch(written, whole, world, workers):
    """One hash for all of them."""
    ranks, found = ranks_of(written[1], world, num_workers=workers), hashed(())
    read(ranks, found)
    for rank in ranks:
        rank.close()
    assert found.hexdigest() == whole


@pytest.mark.slow
def test_a_run_continues_in_mid_epoch_on_other_ranks(written, whole):
    """Four ranks with two workers, then two without; the shards are opened anew."""
    found, state = hashed(()), None
    for world, workers, steps in ((4, 1, 3), (2, 0, None)):
        dataset = forebay.open_shards(written[0], window="200KB", progress=False)
        ranks = ranks_of(dataset, world, num_workers=workers)
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        read(ranks, found, steps)
        state = ranks[0].state_dict()
        for rank in ranks:
            rank.close()
    assert found.hexdigest() == whole


def test_an_epoch_has_every_sample_once_in_another_order(written):
    """By windows."""
    with loader_of(written[1], 24, drop_last=False) as loader:
        one, other = ([each for batch in loader for each in batch] for _ in range(2))
    assert one != other
    assert sorted(one) == sorted(other) == sorted(texts(written[1]))
