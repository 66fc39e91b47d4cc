"""A cache in a bucket, read there: the same batches, whatever is on disk, breaks or dies."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cached import Made
from reading import (
    SAMPLES,
    URL,
    ask,
    await_no_fetcher,
    equal,
    fetchers,
    sample,
    texts,
)

import forebay
from forebay import windows
from forebay.caching import bucket_reader
from forebay.caching import lookahead as lookahead_module
from forebay.caching.fetcher_process import Place
from forebay.caching.link import Link
from forebay.observe.measurements import Fetched
from forebay.windows import InOrder
from kit.range_faults import Fault
from kit.range_server import RangeServer


def ranks_of(dataset, world, **arguments):
    """Return the loader of each rank; their batches together have 48 samples."""
    return [
        forebay.DataLoader(
            dataset,
            48 // world,
            shuffle=True,
            seed=3,
            collate_fn=texts,
            world_size=world,
            rank=rank,
            **arguments,
        )
        for rank in range(world)
    ]


# ---- samples -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", ["one by one", "batches", "backwards"])
def test_samples_are_those_of_the_files(endpoint, local, way, monkeypatch):
    """By whole blocks or by parts of them, small as they are; they own their memory."""
    monkeypatch.setattr(bucket_reader, "SMALL_BYTES", 0)
    cached = forebay.open_cache(URL)
    order = [*range(SAMPLES)]
    random.Random(1).shuffle(order)
    if way == "one by one":
        assert all(equal(cached[index], local[index]) for index in order[:60])
    elif way == "batches":
        for first in range(0, 300, 50):
            some = order[first : first + 50]
            found = cached.__getitems__(some)
            assert all(equal(*each) for each in zip(found, local.__getitems__(some), strict=True))
    else:
        assert all(equal(cached[at], local[at]) for at in range(SAMPLES)[::-1])
    one = cached[0]["image"]
    one += 1
    assert equal(cached[0], local[0])


@pytest.mark.slow
def test_a_small_block_is_fetched_whole(endpoint, root):
    """Its parts would be more; in order, each block is fetched once."""
    cached = forebay.open_cache(URL)
    cached[500]  # after the fetcher has read the index
    endpoint.set()
    cached[100]
    at = int(cached._source.blocks.first.searchsorted(100, "right")) - 1
    sizes = sum(path.stat().st_size for path in (root / "bucket" / "cache").glob("shard-*"))
    assert endpoint.counters()["bytes"] == cached._source.blocks.length[at]  # less than its parts
    endpoint.set()
    assert len(list(cached)) == SAMPLES
    assert endpoint.counters()["bytes"] <= sizes


@pytest.mark.parametrize("byte", [0, 255])
def test_memory_that_is_overwritten_is_no_error_of_its_own(endpoint, monkeypatch, byte):
    """Its numbers lead nowhere: that is an InputError, unless the block has gone meanwhile."""
    cached = forebay.open_cache(URL)
    cached[500]
    monkeypatch.setattr(bucket_reader.Shared, "bytes_of", lambda *_: np.full(4096, byte, np.uint8))
    with pytest.raises(forebay.InputError, match="cannot be read as a block of this cache"):
        cached[100]


def large(index):
    """Return a sample of which forty fill a block."""
    return torch.full((100_000,), index, dtype=torch.uint8)


def test_a_large_block_is_not_fetched_for_a_few_samples(endpoint, root, monkeypatch):
    """Their own bytes are enough; the sample that follows the last one fetches the block."""
    monkeypatch.setattr("forebay.runs.cache.LEAST_SHARDS", 1)
    forebay.cache(Made(large, 40), root / "bucket" / "large", num_workers=0, progress=False)
    cached = forebay.open_cache("s3://bucket/large")
    size = int(cached._source.blocks.length[0])
    assert size > 40 * 100_000

    def fetched(indices):
        endpoint.set()
        assert [int(each[0]) for each in cached.__getitems__(indices)] == indices
        return endpoint.counters()["bytes"]

    fetched([39])  # the index is read, and the block's head
    assert fetched([7]) < 101_000
    assert fetched([30, 3]) < 202_000
    assert fetched([31]) == size  # the next one


@pytest.mark.slow
def test_a_transform_gets_samples_that_it_may_change(endpoint, local):
    """As of files."""

    def negate(each):
        each["image"] ^= 255
        return each

    cached = forebay.open_cache(URL, transform=negate)
    for _ in range(2):
        assert torch.equal(cached[5]["image"], local[5]["image"] ^ 255)


# ---- batches -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "most"),
    [
        (4, 1.03),
        *(pytest.param(each, 1.03, marks=pytest.mark.thorough) for each in (1, 2, 8)),
        pytest.param(3, 1.3, marks=pytest.mark.thorough),
    ],
)
def test_each_byte_is_fetched_once_by_the_ranks_of_a_node(endpoint, root, monkeypatch, world, most):
    """Each has a process of its own that fetches; 3 ranks share some of the 16 lanes."""
    monkeypatch.setattr(
        lookahead_module, "MOST_EPOCHS", 2
    )  # the next epoch comes after the last batch
    ranks = []
    for rank in range(world):
        monkeypatch.setenv("AWS_RANK", f"{rank}")  # as in a process of its own
        cached = forebay.open_cache(URL, window="700KB")
        cached[0]
        ranks.append(ranks_of(cached, world)[rank])
    endpoint.set()
    batches = zip(*ranks, strict=True)
    for _ in range(SAMPLES // 48):
        next(batches)
    fetched = endpoint.counters()["bytes"]
    assert len(fetchers()) == world
    for rank in ranks:
        rank.close()
    sizes = sum(path.stat().st_size for path in (root / "bucket" / "cache").glob("shard-*"))
    assert sizes / 2 < fetched <= most * sizes


@pytest.mark.slow
@pytest.mark.parametrize("persistent_workers", [None, False, True])
def test_what_is_fetched_ahead_is_kept_between_epochs(endpoint, monkeypatch, persistent_workers):
    """The loader has one connection for it as long as it lives, workers or not."""
    made = []
    for module in (bucket_reader, lookahead_module):
        monkeypatch.setattr(module, "Link", lambda of: made.append(of.place) or Link(of))
    cached = forebay.open_cache(URL, window="150KB")
    cached[0]
    options = {} if persistent_workers is None else {"persistent_workers": persistent_workers}
    workers = 0 if persistent_workers is None else 1
    assert len({*ask(cached, epochs=3, num_workers=workers, **options)}) == 3
    assert len(made) == 2


@pytest.mark.slow
def test_a_state_of_another_window_is_refused_within_an_epoch(endpoint):
    """Samples would be lost and repeated."""
    one, other = (forebay.open_cache(URL, window=size) for size in ("150KB", "60KB"))
    with forebay.DataLoader(one, 24, shuffle=True, seed=3, collate_fn=texts) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with forebay.DataLoader(other, 24, shuffle=True, seed=3, collate_fn=texts) as loader:
        with pytest.raises(forebay.OptionError, match="window"):
            loader.load_state_dict(state)


class Quiet:
    """A connection to nobody, which notes what is held."""

    descriptors = ()

    def __init__(self):
        self.held = Counter()

    def post(self, op, blocks=(), **_):
        """Count a block once for each time that it is held."""
        self.held.update({"hold": blocks}.get(op, ()))
        self.held.subtract({"release": blocks}.get(op, ()))

    def heard(self):
        """Return that nothing came."""
        return {}

    def close(self):
        """Do nothing."""


def lookahead(monkeypatch, connect):
    """Return the lookahead of a loader that reads ten blocks of 100 bytes in order, two at once."""
    monkeypatch.setattr(lookahead_module, "Link", lambda process: connect())
    monkeypatch.setattr(lookahead_module, "AHEAD_BYTES", 200)
    blocks = SimpleNamespace(nbytes=np.full(10, 100), total_bytes=500)
    reader = SimpleNamespace(blocks=blocks, place=Place(URL), process=None)
    order = InOrder(np.arange(0, 101, 10), 10)
    return lookahead_module.Lookahead(reader, order, range(1), None, Fetched())


def test_windows_are_held_as_far_as_there_is_room(monkeypatch):
    """Those of the next epoch, too; what was jumped over is left out."""
    quiet = Quiet()
    ahead = lookahead(monkeypatch, lambda: quiet)
    for at, wanted in ((0, [0, 1]), (20, [2, 3]), (80, [8, 9]), (90, [0, 9])):
        ahead.reached(0, 0, at)
        assert sorted(+quiet.held) == sorted(wanted)


class Interrupted(Quiet):
    """One in whose message somebody types Ctrl-C."""

    closed = False

    def heard(self):
        raise KeyboardInterrupt

    def close(self):
        self.closed = True


def test_ctrl_c_within_a_message_costs_the_connection(monkeypatch):
    """Its rest would be read as the next one; another connection holds the same blocks."""
    links = [Interrupted(), Quiet()]
    ahead = lookahead(monkeypatch, iter(links).__next__)
    with pytest.raises(KeyboardInterrupt):
        ahead.reached(0, 0, 0)
    assert links[0].closed
    ahead.reached(0, 0, 0)
    assert sorted(+links[1].held) == sorted(+links[0].held) == [0, 1]


def test_a_loader_closes_once_more_and_as_the_interpreter_ends(endpoint, monkeypatch):
    """When modules are gone already; after that it reads again."""
    cached = forebay.open_cache(URL, window="150KB")
    with forebay.DataLoader(cached, 24, shuffle=True, seed=3, collate_fn=texts) as loader:
        next(iter(loader))
        with monkeypatch.context() as patch:
            patch.setattr(windows, "heapq", None)
            loader.close()
            loader.close()
        assert len(next(iter(loader))) == 24


# ---- what may go wrong ---------------------------------------------------------------------------


@pytest.mark.slow
def test_broken_answers_change_no_batch(endpoint):
    """503, resets, short bodies, flipped bits: a tenth of all answers and more."""
    cached = forebay.open_cache(URL, window="150KB")
    whole = ask(cached)
    kinds = "slowdown", "reset", "short", "flip"
    endpoint.set(faults=[Fault(kind, share=0.05, keys="*/shard-*") for kind in kinds])
    assert ask(cached, num_workers=2, buffer="1MB") == whole
    assert {*endpoint.counters()["faults"]} == {*kinds}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["fetcher", "worker"])
def test_a_kill_costs_no_batch(endpoint, tmp_path, who):
    """The fetcher is started again by whoever needs it; what is on disk is adopted.

    So few batches are made ahead that none is under way at two of the kills.
    """
    cached = forebay.open_cache(URL, disk="200KB", directory=tmp_path, window="150KB")
    whole = ask(cached)[0]
    arguments = {"shuffle": True, "seed": 3, "collate_fn": texts, "num_workers": 2}
    with forebay.DataLoader(
        cached, 24, buffer=forebay.Buffer(max_batches=3), **arguments
    ) as loader:
        found = hashlib.sha256()
        for number, batch in enumerate(loader):
            if number in (2, 9, 16):
                pool = loader._loader_progress.pipeline.feed.pool
                victims = fetchers() if who == "fetcher" else [*pool.pids.values()][:1]
                for pid in victims:
                    with suppress(ProcessLookupError):  # another one replaces it just now
                        os.kill(pid, signal.SIGKILL)
            for each in batch:
                found.update(each)
        assert found.hexdigest() == whole


@pytest.mark.slow
def test_a_trainer_that_is_killed_leaves_nothing(endpoint, tmp_path):
    """No process, not even one that was stopped; and its disk is adopted by the next."""
    program = f"""
        import forebay
        if __name__ == "__main__":
            cached = forebay.open_cache({URL!r}, disk="50MB", directory={str(tmp_path)!r})
            loader = forebay.DataLoader(cached, 24, shuffle=True, seed=3, num_workers=2,
                                        collate_fn=list, buffer="1MB")
            fetched = None
            while not fetched or fetched.on_disk < fetched.total:  # they are written meanwhile
                for batch in loader:
                    pass
                fetched = loader._loader_progress.trace.fetched
            print("read", flush=True)
            next(iter(loader))
            input()
    """
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(program))
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"read\n"
        (fetcher,) = fetchers()
        os.kill(fetcher, signal.SIGSTOP)
        process.kill()
    await_no_fetcher()
    endpoint.set()
    cached = forebay.open_cache(URL, disk="50MB", directory=tmp_path)
    assert len(list(cached)) == SAMPLES
    assert not [key for key in endpoint.counters()["bytes_by_key"] if "shard" in key]


ERRORS = [
    ({"faults": [Fault("missing", keys="*/cache.json")]}, "there is no such object"),
    ({"faults": [Fault("denied")]}, "denied: .*credentials"),
    ({"faults": [Fault("missing", keys="*/shard-00003*")]}, "shard-00003.arrow, bytes .*missing"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "words"), ERRORS)
def test_what_cannot_be_read_is_an_error_with_its_key(endpoint, settings, words):
    """Early, and never with credentials."""
    endpoint.set(**settings)
    with pytest.raises(forebay.InputError, match=f"(?s){words}") as raised:
        [*forebay.open_cache("s3://bucket/cache")]
    assert "Call" in str(raised.value) or "Check" in str(raised.value)


@pytest.mark.slow
def test_expired_credentials_are_renewed_once(endpoint):
    """The next try has new ones."""
    cached = forebay.open_cache(URL)
    endpoint.set(faults=[Fault("expired", count=1, keys="*/shard-*")])
    assert len(list(cached)) == SAMPLES
    assert endpoint.counters()["faults"] == {"expired": 1}


@pytest.fixture
def copied(root, tmp_path, endpoint, monkeypatch):
    """Serve a copy of the cache that a test may change."""
    subprocess.run(["cp", "-r", root / "bucket", tmp_path / "bucket"], check=True)
    with RangeServer(tmp_path) as other:
        for name, value in other.environment.items():
            monkeypatch.setenv(name, value)
        yield tmp_path / "bucket" / "cache"
        gc.collect()
        await_no_fetcher()


@pytest.mark.slow
def test_a_damaged_shard_is_an_error_that_names_the_bytes_and_both_checksums(copied):
    """After a second try."""
    shard = copied / "shard-00002.arrow"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(forebay.InputError) as raised:
        [*forebay.open_cache(URL)]
    first = str(raised.value).splitlines()[0]
    assert "shard-00002.arrow: bytes" in first
    assert "have the checksum" in first


@pytest.mark.slow
def test_a_cache_that_was_written_anew_is_never_mixed_with_the_old_one(
    copied, tmp_path, monkeypatch
):
    """A job that reads the old one ends with an error."""
    monkeypatch.setattr("forebay.runs.cache.LEAST_SHARDS", 8)
    cached = forebay.open_cache(URL)
    cached[0]
    other = Made(lambda index: sample(index + 1), SAMPLES)
    forebay.cache(other, tmp_path / "new", num_workers=0, progress=False)
    for path in copied.glob("shard-*"):
        path.unlink()
    subprocess.run(["cp", "-rT", tmp_path / "new", copied], check=True)
    with pytest.raises(forebay.ChangedError, match="written anew"):
        list(cached)


@pytest.mark.slow
@pytest.mark.parametrize("left", [0.5, 0.0001], ids=["half", "nearly nothing"])
def test_an_object_that_is_shorter_than_it_was_has_changed(copied, left):
    """Where a range ends beyond it, and where a range begins there; the message has both ends."""
    shard = copied / "shard-00002.arrow"
    os.truncate(shard, max(int(shard.stat().st_size * left), 1))
    with pytest.raises(forebay.ChangedError) as raised:
        [*forebay.open_cache(URL)]
    first = str(raised.value).splitlines()[0]
    assert "shard-00002.arrow: the object ends before bytes" in first


@pytest.mark.slow
def test_the_index_may_be_anybodys(copied):
    """Damaged or hostile: an error, and no process that stays."""
    blocks = copied / ".forebay" / "blocks.bin"
    blocks.write_bytes(bytes(len(blocks.read_bytes())))
    with pytest.raises(forebay.InputError, match="damaged"):
        forebay.open_cache(URL)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"disk": "1GB"}, {"directory": "x"}, {"window": "all"}])
def test_settings_that_do_not_fit_are_refused(endpoint, given):
    """Before anything is fetched."""
    with pytest.raises(forebay.OptionError):
        forebay.open_cache(URL, **given)
    assert endpoint.counters()["requests"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("is_read", [False, True])
def test_samples_can_be_made_a_second_time(endpoint, is_read):
    """By check(): a fork of the trainer reaches the fetcher."""
    cached = forebay.open_cache(URL)
    if is_read:  # the trainer has a connection
        assert cached[0]["name"] == "sample 0"
    with forebay.DataLoader(cached, 8, seed=0, num_workers=1, collate_fn=texts) as loader:
        found = loader.check()
    assert found, str(found)
    assert found.samples > 1


@pytest.mark.slow
def test_what_it_is_is_shown(endpoint):
    """In the repr, with the order that a loader has."""
    cached = forebay.open_cache(URL, window="150KB")
    assert repr(cached).startswith("<CachedDataset 's3://bucket/cache': 600 samples in 8 shards")
    assert "150 kB" in repr(cached)
    assert Counter(type(value).__name__ for value in cached[0].values())["Tensor"] == 3
