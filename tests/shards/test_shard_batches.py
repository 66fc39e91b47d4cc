"""Batches of shards: the same for any number of ranks and workers, and after any interruption."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice

import pytest
from written import SAMPLES, hashed, loader_of, texts, write_records, write_tar, write_tars

import forebay
from forebay import OptionError

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
    parts = [[*islice(rank, most)] for rank in ranks]
    for batches in zip(*parts, strict=True):
        hashed([chain(*batches)], found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("world", "workers"), [(2, 1), (3, 0)])
def test_ranks_and_workers_change_no_batch(written, whole, world, workers):
    """One hash for all of them; the ranks are read one after another."""
    ranks, found = ranks_of(written[1], world, num_workers=workers), hashed(())
    with ExitStack() as opened:
        read(map(opened.enter_context, ranks), found)
    assert found.hexdigest() == whole


@pytest.mark.slow
def test_a_run_continues_in_mid_epoch_on_other_ranks(written, whole):
    """Four ranks with a worker, then two, then six without; opened anew."""
    found, state = hashed(()), None
    for world, workers, steps in ((4, 1, 3), (2, 1, 3), (6, 0, None)):
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


# ---- what a state knows of the samples -----------------------------------------------------------


def taken(loader, count=2):
    """Return the state after some batches."""
    for at, _ in enumerate(loader, 1):
        if at == count:
            return loader.state_dict()
    raise AssertionError


@pytest.fixture
def tars(tmp_path):
    """Return a folder of three tars, and how to open it."""
    write_tars(tmp_path, 60, 3)
    return tmp_path, partial(forebay.open_shards, tmp_path, progress=False)


def replace_shard(path, indices, *, as_before=None):
    """Write other samples to a shard, with the same times if they are given."""
    write_tar(path, indices)
    if as_before is not None:
        os.utime(path, ns=(as_before.st_atime_ns, as_before.st_mtime_ns))


@pytest.mark.parametrize("kind", ["window", "exact", "torch", "mixture", "rows"])
def test_a_state_notices_a_shard_with_as_many_other_samples(tars, kind):
    """Whatever reads the shards; between epochs it holds, since nothing of an epoch is left."""

    def loader():
        dataset = tars[1](window=30_000 if kind == "window" else None)
        if kind == "mixture":
            dataset = forebay.mix({"a": (dataset, 1), "b": (dataset, 2)})
        if kind == "rows":
            dataset = forebay.batch_by_length(dataset, [4] * 60, max_tokens=4)
        usual = {"seed": None, "drop_last": False} if kind == "torch" else {}
        if kind == "rows":
            return loader_of(dataset, None, collate_fn=len, drop_last=False)
        return loader_of(dataset, 10, collate_fn=len, **usual)

    state = taken(loader())
    loader().load_state_dict(state)
    end = taken(loader(), 6) if kind not in ("mixture",) else None
    before = (tars[0] / "train-001.tar").stat()
    replace_shard(tars[0] / "train-001.tar", range(70, 90), as_before=before)
    with pytest.raises(OptionError, match=r"samples of the state are not those of the loader"):
        loader().load_state_dict(state)
    if end is not None and end["batch"] == 0:
        loader().load_state_dict(end)


def test_a_state_says_that_shards_were_written_anew_or_copied(tars):
    """With the same sizes it cannot be known whether their samples are others."""
    state = taken(loader_of(tars[1](), 10))
    os.utime(tars[0] / "train-001.tar", ns=(1, 1))
    with pytest.warns(RuntimeWarning, match="written anew, or copied, since the state was saved"):
        loader_of(tars[1](), 10).load_state_dict(state)


def test_a_state_holds_for_its_samples_after_shards_were_added_behind(tars):
    """The rest of its epoch is that of the samples that were there; one in between is an error."""
    with loader_of(tars[1](), 10) as loader:
        whole = [*map(tuple, loader)]
    state = taken(loader_of(tars[1](), 10))
    write_tar(tars[0] / "train-003.tar", range(60, 80))
    later = loader_of(tars[1](), 10)
    with pytest.raises(OptionError, match="the state has 60 samples, the loader has 80 samples"):
        later.load_state_dict(state)
    later.load_state_dict(state, strict=False)
    assert [*map(tuple, later)] == whole[2:]
    (tars[0] / "train-003.tar").rename(tars[0] / "train-0005.tar")
    with pytest.raises(OptionError, match="files of the dataset were replaced, added in between"):
        loader_of(tars[1](), 10).load_state_dict(state, strict=False)
