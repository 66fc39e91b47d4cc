"""Pipes and huge files where forebay expects a small file: nothing waits, nothing reads it all."""

from __future__ import annotations

import json
import os
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from doctored import run

import forebay
from forebay.base.file_stores import Store
from forebay.base.files import open_regular, read_regular
from forebay.caching.arrow_messages import record_batches
from forebay.errors import InputError, LedgerError
from forebay.ledger import lock as lock_module
from forebay.ledger.lock import find_holder
from forebay.ledger.snapshot import read_snapshot
from forebay.outputs.ledger_copy import RUN, read_run

# What hung, must not hang the suite.
pytestmark = pytest.mark.timeout(120)
HUGE = 256 << 20
MOST = 8 << 20


def pipe(path: Path) -> Path:
    """Put a pipe in the place of a file."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def huge(path: Path) -> Path:
    """Put a file that is all hole in the place of a file."""
    with path.open("wb") as file:
        file.truncate(HUGE)
    return path


@contextmanager
def little_memory():
    """Fail if the block allocates as much as a huge file has."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()


class Zeros:
    """Samples of 8 MiB that compress well."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"zeros": torch.zeros(2 << 20), "number": index}


@pytest.fixture
def cached(tmp_path):
    """A cache of zeros, in a few shards."""
    forebay.cache(Zeros(), tmp_path / "cache", num_workers=0, progress=False)
    return tmp_path / "cache"


def test_only_regular_files_are_opened(tmp_path):
    """Neither a pipe nor a device; a link only where it may be one."""
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"12345"
    for path in (pipe(tmp_path / "pipe"), Path("/dev/zero")):
        with pytest.raises(OSError, match="it is not a regular file"):
            open_regular(path)
    with pytest.raises(OSError, match="symbolic links"):
        open_regular(tmp_path / "link", follows=False)
    assert read_regular(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        read_regular(tmp_path / "file", 4)


@pytest.mark.parametrize("name", ["shard-00000.arrow", ".forebay/cache.json"])
def test_a_pipe_in_a_cache_is_an_error(cached, name):
    """Whoever opens the cache or reads a sample is told which file it is."""
    pipe(cached / name)
    with pytest.raises(InputError, match=r"(?s)cannot be read|instead of the .* were written"):
        forebay.open_cache(cached)[0]


def test_a_pipe_in_the_place_of_a_shard_of_no_bytes_is_an_error(cached):
    """The index may say that it has none, as the pipe does."""
    dataset = forebay.open_cache(cached)
    pipe(cached / "shard-00000.arrow")
    with pytest.raises(InputError, match="it is not a regular file"):
        dataset[0]


def test_a_pipe_in_the_place_of_an_output_is_an_error(inputs, output):
    """One that a table names."""
    pipe(output / "sub" / "a")
    with pytest.raises(OSError, match="is not a regular file"):
        forebay.open_output(output / "sub" / "a")


@pytest.mark.parametrize("name", ["lock", "lock.9", "ledger.sqlite"])
def test_status_waits_for_no_pipe(output, name):
    """It reads what it can, or says what it cannot."""
    pipe(output / ".forebay" / name)
    if name == "ledger.sqlite":
        with pytest.raises(LedgerError, match="holds no ledger"):
            read_snapshot(output / ".forebay")
    else:
        assert read_snapshot(output / ".forebay").counts.total == 3


def test_a_huge_record_of_a_driver_is_not_read(inputs, output, monkeypatch):
    """Neither by `forebay status` nor by the next run, which looks at it again and again."""
    monkeypatch.setattr(lock_module, "STALE_S", 0.2)
    monkeypatch.setattr(lock_module, "BEAT_S", 0.02)
    huge(output / ".forebay" / "lock.9")
    with little_memory():
        assert find_holder(output / ".forebay" / "lock") is None
        report = run(inputs, output)
    assert (report.done, report.failed) == (2, 1)
    assert (output / ".forebay" / "lock.10").exists()


def test_a_huge_journal_is_not_copied(output):
    """A journal has each page of the ledger once, at most."""
    huge(output / ".forebay" / "ledger.sqlite-journal")
    with pytest.raises(LedgerError, match="its journal has 268,435,456 bytes"):
        read_snapshot(output / ".forebay")


def test_a_huge_index_of_a_cache_is_not_read(cached):
    """It is an error that says so."""
    huge(cached / ".forebay" / "cache.json")
    with little_memory(), pytest.raises(InputError, match="it has more than 67,108,864 bytes"):
        forebay.open_cache(cached)


def test_a_huge_record_of_a_bucket_is_not_read():
    """It counts as damaged, as one that is truncated."""
    store = Store("memory://huge-record")
    store.write(RUN, bytes(2 * MOST))
    with little_memory():
        assert read_run(store) is None


def test_a_compressed_shard_is_refused_before_it_is_decompressed(cached):
    """Megabytes of zeros in some kilobytes."""
    path = cached / "shard-00000.arrow"
    with pa.OSFile(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as file:
        with pa.ipc.new_file(file, table.schema, options=options) as writer:
            writer.write_table(table)
    del table
    assert path.stat().st_size < 1 << 20
    index = cached / ".forebay" / "cache.json"
    found = json.loads(index.read_text())
    found["sizes"][0] = path.stat().st_size
    index.write_text(json.dumps(found))
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(InputError, match="its columns are compressed"):
            forebay.open_cache(cached)[0]
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 1 << 20


def test_dictionaries_are_refused_before_they_are_read():
    """Arrow reads them with the first batch, and they may be compressed, too."""
    plain = pa.table({"word": ["a", "b"]})
    for table, words in (
        (plain, None),
        (plain.slice(0, 0), None),
        (encoded(plain), "dictionaries"),
    ):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        data = memoryview(sink.getvalue())
        if words is None:
            record_batches(data, is_compressed=False)
        else:
            with pytest.raises(ValueError, match=words):
                record_batches(data, is_compressed=False)


def encoded(table):
    return table.set_column(0, "word", table["word"].dictionary_encode())
