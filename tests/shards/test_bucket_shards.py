"""Shards in a bucket, read there: the same batches as of files, whatever breaks or dies."""

from __future__ import annotations

import gc
import subprocess
import time

import numpy as np
import pyarrow as pa
import pytest
import s3fs
from pyarrow import parquet
from reading import await_fetcher, await_no_fetcher
from written import SAMPLES, close_connections, hashed, loader_of, sample, use, write_tar

import forebay
from buckets import PATIENCE_S
from forebay.base import machine
from forebay.caching import bucket_reader
from forebay.show import top
from kit.range_faults import Fault
from kit.range_server import RangeServer

URL = "s3://bucket/tars"

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
