"""Shards in a bucket, read there: the same batches as of files, whatever breaks or dies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
from contextlib import suppress
from itertools import chain

import numpy as np
import pyarrow as pa
import pytest
import s3fs
from pyarrow import parquet
from reading import await_fetcher, await_no_fetcher, fetchers
from written import SAMPLES, close_connections, hashed, loader_of, sample, use, write_tar

import forebay
from buckets import PATIENCE_S
from forebay.base import machine
from forebay.caching import bucket_reader
from forebay.show import top
from kit.range_faults import Fault
from kit.range_server import RangeServer

URL = "s3://bucket/tars"
FAULTS = "slowdown", "reset", "short", "flip", "stall"

pytestmark = pytest.mark.slow


def opened(location=URL, **options):
    """Open shards without a bar."""
    return forebay.open_shards(location, progress=False, **{"window": "200KB"} | options)


def ask(dataset, epochs=1, **arguments):
    """Return the hash of each epoch of a loader."""
    with loader_of(dataset, 48, **arguments) as loader:
        return [hashed(loader).hexdigest() for _ in range(epochs)]


@pytest.fixture(scope="module")
def whole(root):
    """Return the hashes of two epochs of the files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.shards.format.BLOCK_BYTES", 20_000)
        return ask(opened(root / "bucket" / "tars"), epochs=2)


def test_samples_are_those_of_the_files(endpoint, monkeypatch):
    """By whole blocks, or by a stretch for each sample."""
    monkeypatch.setattr(bucket_reader, "SMALL_BYTES", 0)
    samples = opened()
    assert repr(samples) == f"<ShardDataset {URL!r}: 400 samples in 5 shards, shuffled by 200 kB>"
    order = np.random.default_rng(0).permutation(SAMPLES).tolist()
    assert all(samples[at] == sample(at) for at in order[:50])
    assert samples.__getitems__(order[50:100]) == [sample(at) for at in order[50:100]]
    endpoint.set()
    one = samples[7]
    assert one == sample(7) and endpoint.counters()["bytes"] < 6_000
    assert [*samples] == [sample(at) for at in range(SAMPLES)]


@pytest.mark.parametrize(
    ("disk", "workers"),
    [
        ("300KB", 1),
        (0, 0),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in (("50MB", 2),)),
    ],
)
def test_batches_are_those_of_files_whatever_is_on_disk(endpoint, whole, tmp_path, disk, workers):
    """Also from the disk of an earlier job, of which every block is compared."""
    folder = tmp_path / "kept" if disk else None
    for _ in range(2 if disk else 1):
        samples = opened(disk=disk, directory=folder)
        assert ask(samples, epochs=2, num_workers=workers) == whole
        del samples
        gc.collect()
        await_no_fetcher()
        for path in (tmp_path / "kept").glob("*.block"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1  # somebody else wrote there
            path.write_bytes(data)


def test_broken_answers_change_no_batch(endpoint, whole):
    """503, resets, short bodies, flipped bits, answers that hang: one hash."""
    samples = opened()
    faults = [Fault(kind, share=0.05, keys="*/train-*", seconds=0.5) for kind in FAULTS]
    endpoint.set(faults=faults)
    assert ask(samples, num_workers=1) == whole[:1]
    assert {*endpoint.counters()["faults"]} >= {"slowdown", "reset", "short", "flip"}


@pytest.mark.parametrize("who", ["fetcher", pytest.param("worker", marks=pytest.mark.thorough)])
def test_a_kill_costs_no_batch(endpoint, whole, tmp_path, who):
    """The fetcher is started again by whoever needs it."""
    samples = opened(disk="200KB", directory=tmp_path / "kept")
    buffer = forebay.Buffer(max_batches=3)
    with loader_of(samples, 48, num_workers=1, buffer=buffer) as loader:
        found = hashed(())
        for number, batch in enumerate(loader):
            if number in (1, 4):
                pool = loader._loader_progress.pipeline.feed.pool
                for pid in fetchers() if who == "fetcher" else [*pool.pids.values()]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            hashed([batch], found)
    assert found.hexdigest() == whole[0]


def test_columns_of_tables_in_a_bucket_make_batches(endpoint, root):
    """By windows, and with the bytes of these columns only; lengths too are a column."""
    folder, rng = root / "bucket" / "tables", np.random.default_rng(0)
    folder.mkdir()
    for first in range(0, 2000, 500):
        numbers = np.arange(first, first + 500)
        columns = {"number": numbers, "word": [f"w{each}" for each in numbers]}
        columns |= {"tokens": [[each % 9] * (each % 9 + 1) for each in numbers]}
        columns |= {"other": [rng.bytes(200) for _ in numbers]}
        parquet.write_table(pa.table(columns), folder / f"{first:04}.parquet", row_group_size=50)
    dataset = forebay.from_table("s3://bucket/tables/*.parquet", columns=["number", "word"])
    endpoint.set()
    found: list[int] = []
    with forebay.DataLoader(dataset, batch_size=50, shuffle=True, seed=1) as loader:
        for batch in loader:
            found += (numbers := batch["number"].tolist())
            assert batch["word"] == [f"w{each}" for each in numbers]
    assert sorted(found) == [*range(2000)] != found
    assert dataset[1234]["word"] == "w1234"
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert endpoint.counters()["bytes"] < size / 4
    rows = forebay.pack_sequences(opened("s3://bucket/tables"), "tokens", size=32)
    assert rows.lengths.tolist() == [each % 9 + 1 for each in range(2000)]


def test_blocks_that_arrow_reads_are_held_meanwhile(endpoint, root, monkeypatch):
    """Else another block could be written over the offsets that Arrow follows without a check."""
    folder = root / "bucket" / "held"
    folder.mkdir()
    table = pa.table({"word": [f"w{each}" for each in range(400)]})
    parquet.write_table(table, folder / "0.parquet", row_group_size=20)
    read, were_held = bucket_reader.BucketReader._read_here, []

    def read_here(self, left, found):
        were_held.append({*left} <= {*self._local.held})
        read(self, left, found)

    monkeypatch.setattr(bucket_reader.BucketReader, "_read_here", read_here)
    words = [f"w{each}" for each in np.random.default_rng(0).permutation(400)]
    for dataset in (
        opened("s3://bucket/held"),
        forebay.from_table("s3://bucket/held/*.parquet", columns=["word"]),
    ):
        with forebay.DataLoader(dataset, batch_size=40, shuffle=True, seed=1) as loader:
            batches = [batch["word"] for batch in loader]
        assert sorted(chain.from_iterable(batches)) == sorted(words)
        assert all(dataset[int(word[1:])]["word"] == word for word in words[:60])
    assert were_held
    assert all(were_held)


def test_a_slow_bucket_is_named_as_the_cause(endpoint, tmp_path, monkeypatch):
    """By the diagnosis; the loader and `forebay top` count what was fetched."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for module in (machine, top):  # others may run on this machine
        monkeypatch.setattr(module, "private_folders", lambda: [str(tmp_path / "forebay")])
    samples = opened()
    with loader_of(samples, 8, collate_fn=list) as loader:
        trace, until = loader._loader_progress.trace, time.monotonic() + PATIENCE_S
        while not trace.fetched.requests:  # it is told once in a second
            assert time.monotonic() < until
            list(loader)
        found = loader.statistics()
        assert found.fetched_bytes > 0 and "\nbucket     " in str(found)
        assert trace.fetched.total == samples.blocks.total_bytes
        # As of a bucket that hardly gives anything, whatever this machine does.
        trace.fetched.busy_s, trace.fetched.nbytes = trace.fetched.elapsed_s, 1
        said = loader.diagnose()
        assert said.cause == "storage"
        assert "The bucket gives" in str(said) and "with 0% of the dataset on disk" in str(said)
        assert 'open it with disk="1GB", directory=...' in str(said)
        trace.show(time.perf_counter())
        (view,) = top.live_views()
        assert view.title.startswith("DataLoader(ShardDataset(400)")
        assert view.totals["fetched_bytes"] > 0


@pytest.fixture
def copied(root, tmp_path, endpoint, monkeypatch):
    """Serve a copy of the tars that a test may change."""
    subprocess.run(["cp", "-r", root / "bucket", tmp_path / "bucket"], check=True)
    with RangeServer(tmp_path) as other:
        use(other, monkeypatch)
        yield tmp_path / "bucket" / "tars"
        gc.collect()
        await_no_fetcher()


def test_a_shard_that_changed_is_never_mixed_in(copied):
    """Written again, or cut, while it was read; and one that is damaged names the bytes."""
    samples = opened()
    assert samples[0] == sample(0)
    path = copied / "train-004.tar"
    body = bytearray(path.read_bytes())
    state = path.stat()
    write_tar(path, range(500, 580))
    with pytest.raises(forebay.ChangedError, match=r"train-004\.tar changed after it was indexed"):
        list(samples)
    with pytest.raises(forebay.ChangedError, match=r"index_shards"):
        samples.__getitems__([*range(360, 400)])
    body[-30_000] ^= 1
    with path.open("r+b") as file:  # the same file to the server, by name, time and size
        file.truncate(len(body))
        file.write(body)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(forebay.InputError, match=r"train-004\.tar: bytes .* have the checksum"):
        list(samples)


def test_shards_that_an_index_knows_are_not_listed(copied, tmp_path):
    """The process that fetches has begun; what changed or is gone is said when it is read."""
    index = tmp_path / "index"
    forebay.index_shards(URL, index, num_workers=0, progress=False)
    close_connections()
    for location in (URL, f"{URL}/*.tar", f"{URL}/train-{{000..004}}.tar"):
        samples = opened(location, index=index)
        assert await_fetcher()
        samples.__getitems__([*range(0, SAMPLES, 40)])
        del samples
        gc.collect()
        await_no_fetcher()
    assert not s3fs.S3FileSystem._cache
    with pytest.raises(forebay.InputError, match=r"train-000\.tar is in the index .* not there"):
        opened(f"{URL}/train-{{001..004}}.tar", index=index)
    samples = opened(index=index)
    (copied / "train-004.tar").unlink()
    write_tar(copied / "train-003.tar", range(SAMPLES, SAMPLES + 80))
    assert samples[0] == sample(0)
    with pytest.raises(forebay.ChangedError, match=r"train-003\.tar changed after it was indexed"):
        samples[240]  # this sample alone, of which there is no checksum
    with pytest.raises(forebay.InputError, match=r"train-004\.tar.*missing"):
        samples[SAMPLES - 1]


def test_columns_with_others_between_them_stay_on_disk(endpoint, root, tmp_path):
    """Only their own bytes are written there, so no block is written over another one."""
    folder = root / "bucket" / "between"
    folder.mkdir()
    rng = np.random.default_rng(0)
    columns = {"a": [rng.bytes(3000) for _ in range(400)], "b": [*range(400)]}
    columns |= {"c": [rng.bytes(3000) for _ in range(400)]}
    parquet.write_table(pa.table(columns), folder / "t.parquet", row_group_size=20)
    given = {"columns": ["a", "c"], "disk": "20MB", "directory": tmp_path, "window": "1MB"}
    samples = opened("s3://bucket/between", **given)
    first = [*zip(columns["a"], columns["c"], strict=True)]
    with loader_of(samples, 40, collate_fn=list) as loader:
        for _ in range(3):
            found = [(each["a"], each["c"]) for batch in loader for each in batch]
            assert sorted(found) == sorted(first)
    size = (folder / "t.parquet").stat().st_size
    assert endpoint.counters()["bytes"] < 1.5 * size


def test_what_is_missing_is_named(endpoint):
    """At opening and later, with what to do."""
    with pytest.raises(forebay.InputError, match=r"train-005\.tar.*no such object"):
        opened(f"{URL}/train-{{004..005}}.tar")
    samples = opened()
    endpoint.set(faults=[Fault("missing", keys="*/train-003*")])
    with pytest.raises(forebay.InputError, match=r"train-003\.tar, bytes .*missing"):
        list(samples)


@pytest.mark.parametrize("given", [{"disk": "1GB"}, {"directory": "x"}, {"columns": ["jpg"]}])
def test_settings_that_do_not_fit_are_refused(endpoint, given):
    """In words."""
    with pytest.raises(forebay.OptionError, match=r"disk=|read as a whole"):
        opened(**given)
