"""Parquet files as shards: rows as `from_table` has them, of the bytes of some columns."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from pyarrow import parquet
from tables import ROWS, many_types, parquet_bytes

import forebay
from forebay import InputError
from forebay.shards import apart, arrow_rows
from forebay.shards import parquet as parquet_format
from forebay.shards.parquet import ParquetShards
from kit.shard_reading import BytesShard, ReadShard

TABLE = many_types()
NUMBERS = pa.table({"x": range(1000), "y": [str(at) for at in range(1000)]})


def read(data, columns=None):
    return ReadShard(ParquetShards(), BytesShard(data, "a.parquet"), columns)


def rows_of_table(table, path):
    parquet.write_table(table, path)
    found = forebay.from_table(path)
    return [found[at] for at in range(len(found))]


@pytest.mark.parametrize("options", [
    {"row_group_size": 7},
    {"row_group_size": 1000},
    {"row_group_size": 13, "store_schema": False},
    {"row_group_size": 13, "data_page_version": "2.0", "use_dictionary": False},
    {"row_group_size": 50, "write_page_index": True, "data_page_size": 100},
    {"row_group_size": 30, "use_byte_stream_split": ["float32"], "use_dictionary": False},
    {"row_group_size": 30, "version": "1.0", "coerce_timestamps": "ms",
     "allow_truncated_timestamps": True},
], ids=["small groups", "one group", "without Arrow's schema", "pages 2", "small pages", "split",
        "version 1"])  # fmt: skip
def test_rows_are_those_of_from_table(options, tmp_path):
    """Whatever the file looks like: all types, missing values, in order and at random."""
    data = parquet_bytes(TABLE, **options)
    expected = rows_of_table(parquet.read_table(pa.BufferReader(data)), tmp_path / "a.parquet")
    shard = read(data)
    assert len(shard) == ROWS
    assert shard.read(range(ROWS)) == expected
    order = [59, 0, 7, 8, 30, 7, 13, 12, 14, 29, 1]
    assert shard.read(order) == [expected[at] for at in order]


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
def test_every_codec_of_pyarrow_is_read(codec):
    """Chunks are decompressed by pyarrow, whatever it wrote them with."""
    shard = read(parquet_bytes(NUMBERS, compression=codec, row_group_size=300))
    assert shard.read(range(1000)) == NUMBERS.to_pylist()


@pytest.mark.parametrize(
    "encoding", ["DELTA_BINARY_PACKED", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"]
)
def test_every_encoding_of_strings_and_numbers_is_read(encoding):
    """Encodings that others write by default are read, too."""
    column, name = (NUMBERS["x"], "x") if "BINARY" in encoding else (NUMBERS["y"], "y")
    table = pa.table({name: column})
    data = parquet_bytes(table, use_dictionary=False, column_encoding={name: encoding})
    assert read(data).read(range(1000)) == table.to_pylist()


@pytest.mark.parametrize("columns", [["text"], ["a"], ["a.b"], ["struct", "int64"], ["map", "a"]])
def test_only_the_chunks_of_the_columns_are_fetched(columns):
    """Names with dots do not mix, and the bytes are those that the footer gives these columns."""
    data = parquet_bytes(TABLE, row_group_size=25)
    shard = read(data, columns)
    expected = TABLE.select(columns).to_pylist()
    assert shard.read(range(ROWS)) == expected
    assert [*shard.read([1])[0]] == columns
    groups = map(parquet.read_metadata(pa.BufferReader(data)).row_group, range(3))
    chunks = [group.column(at) for group in groups for at in range(group.num_columns)]
    if not any(each.startswith("a") for each in columns):
        sizes = [
            each.total_compressed_size
            for each in chunks
            if each.path_in_schema.partition(".")[0] in columns
        ]
        assert shard.fetched == sum(sizes)
    assert shard.fetched < len(data) / 4


def test_the_footer_alone_is_read_for_the_index():
    """Indexing reads the footer, its length, and nothing else."""
    data = parquet_bytes(NUMBERS, row_group_size=10)
    shard = BytesShard(data)
    assert ParquetShards().find(shard).rows.tolist() == [10] * 100
    assert shard.was_read == 16 + struct.unpack("<I", data[-8:-4])[0]


def test_row_groups_without_rows_are_no_blocks():
    """Some writers leave empty row groups, whose chunks have no bytes."""
    out = pa.BufferOutputStream()
    with parquet.ParquetWriter(out, NUMBERS.schema) as writer:
        for rows in (NUMBERS[:10], NUMBERS[:0], NUMBERS[10:20]):
            writer.write_table(rows)
    shard = read(out.getvalue().to_pybytes())
    assert shard.read(range(20)) == NUMBERS[:20].to_pylist()
    assert len(read(parquet_bytes(NUMBERS[:0]))) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], "it does not end as a Parquet file"),
        (lambda data: data[: len(data) // 2], "it does not end as a Parquet file"),
        (lambda data: data[:-4] + b"PARE", "its footer is encrypted"),
        (lambda data: data[:-8] + b"\xff\xff\xff\x7f" + data[-4:], "it does not end as a Parquet"),
        (lambda data: data[:-8] + b"\x10\0\0\0" + data[-4:], "its footer cannot be read"),
        (lambda data: data[:4] + data[-100:], "cannot be read|does not end"),
        (lambda data: b"PAR1PAR1", "8 bytes are no Parquet file"),
    ],
)
def test_a_damaged_file_is_named(change, words):
    """What is no Parquet file, or has a damaged footer, is an error that names it."""
    with pytest.raises(InputError, match=rf"a\.parquet: .*({words})"):
        read(change(parquet_bytes(NUMBERS)))


def test_a_file_with_missing_chunks_is_refused():
    """Chunks that the footer places behind the file's data are not believed."""
    data = parquet_bytes(NUMBERS, row_group_size=100)
    footer = struct.unpack("<I", data[-8:-4])[0] + 8
    with pytest.raises(InputError, match=r"of row group . lies outside of the file"):
        read(data[:400] + data[-footer:])


def test_columns_with_one_name_are_refused():
    """Of two columns with one name a dict would lose one."""
    table = pa.table([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(InputError, match="2 columns are called 'x'"):
        read(parquet_bytes(table))


@pytest.mark.parametrize(
    "writer", ["parquet-mr", "parquet-mr version 1.2.8", "parquet-mr (build x)"]
)
def test_files_of_writers_without_a_version_are_read(writer):
    """pyarrow reads up to a hundred bytes more of their chunks, whatever these are."""
    data = parquet_bytes(NUMBERS, row_group_size=400, compression="zstd")
    known = parquet.read_metadata(pa.BufferReader(data)).created_by.encode()
    other = writer.encode().ljust(len(known))
    data = data.replace(known, other)
    assert parquet.read_metadata(pa.BufferReader(data)).created_by.startswith("parquet-mr")
    assert read(data).read(range(1000)) == NUMBERS.to_pylist()
    assert read(data, ["y"]).read([999]) == [{"y": "999"}]


def test_a_footer_that_ends_its_process_is_named_and_the_others_are_read(tmp_path, monkeypatch):
    """As some damaged ones end pyarrow's; this process goes on."""
    for name in "abc":
        parquet.write_table(NUMBERS, tmp_path / f"{name}.parquet")
    (tmp_path / "odd.py").write_text(
        "import os\nfrom forebay.shards.parquet import find_row_groups as found\n"
        "def find(data):\n    return os.abort() if b'odd' in data else found(data)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import odd

    monkeypatch.setattr(parquet_format, "find_row_groups", odd.find)
    assert len(forebay.open_shards(tmp_path / "*.parquet", progress=False)) == 3000
    parquet.write_table(NUMBERS.rename_columns(["x", "odd"]), tmp_path / "b.parquet")
    words = r"b\.parquet: its footer ended the process that read it: SIGABRT\n"
    with pytest.raises(InputError, match=words):
        forebay.open_shards(tmp_path / "*.parquet", progress=False)
    with apart.apart():
        for name, rows in (("a", 1000), ("b", 0), ("c", 1000)):
            shard = BytesShard((tmp_path / f"{name}.parquet").read_bytes(), name)
            if rows:
                assert ParquetShards().find(shard).rows.sum() == rows
                continue
            with pytest.raises(InputError, match="b: its footer ended"):
                ParquetShards().find(shard)


def test_decoded_row_groups_stay_within_the_window(tmp_path):
    """Rather than all that were read; and few are decoded again."""
    table = pa.table({"x": range(4000), "y": [f"{at:0100}" for at in range(4000)]})
    options = {"row_group_size": 100, "use_dictionary": False, "compression": "none"}
    parquet.write_table(table, tmp_path / "a.parquet", **options)
    samples = forebay.open_shards(tmp_path, window="120KB", progress=False)
    with forebay.DataLoader(samples, 20, shuffle=True, seed=1, collate_fn=list) as loader:
        found = [each["x"] for batch in loader for each in batch]
    assert sorted(found) == [*range(4000)] != found
    kept = [size for _, size in samples._source._decoded._blocks.values()]
    assert len(kept) > 5
    assert sum(kept) <= 120_000
    assert 40 <= samples.decoded[0] < 60


# ---- bombs ---------------------------------------------------------------------------------------


@pytest.fixture
def small_limits(monkeypatch):
    """Let bombs be small: a block may always take a megabyte, rather than 256 of them."""
    monkeypatch.setattr(arrow_rows, "LEAST_BYTES", 1 << 20)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("codec", ["zstd", "gzip", "brotli"])
def test_a_row_group_that_becomes_too_much_is_refused_before_it_does(codec):
    """The footer says what it becomes, and that is more than its bytes can credibly be."""
    data = parquet_bytes(pa.table({"x": [bytes(5 << 20)]}), compression=codec, use_dictionary=False)
    with pytest.raises(ValueError, match=r"a row group would take 5,24.* or more: one of"):
        read(data).read([0])


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("options", [
    {"use_dictionary": True},
    {"use_dictionary": False, "column_encoding": {"x": "DELTA_BYTE_ARRAY"}},
], ids=["dictionary", "prefixes"])  # fmt: skip
def test_a_value_that_is_given_again_and_again_is_decoded_in_pieces(options, monkeypatch):
    """A tenth of a megabyte in each of 2,000 rows, stored once, is refused after some of them."""
    monkeypatch.setattr(parquet_format, "_ROWS", 16)
    out, taken = pa.BufferOutputStream(), []
    refuse = parquet_format.refuse_claim
    monkeypatch.setattr(
        parquet_format, "refuse_claim", lambda *each: (taken.append(each[1]), refuse(*each))
    )
    table = pa.table({"x": [b"x" * 100_000] * 2000})
    parquet.write_table(table, out, dictionary_pagesize_limit=1 << 30, **options)
    shard = read(out.getvalue().to_pybytes())
    with pytest.raises(ValueError, match="a row group would take"):
        shard.read([0])
    assert max(taken) < 2.5 * arrow_rows.most_bytes(shard.fetched)


def test_a_column_that_one_shard_lacks_names_the_shard(tmp_path):
    """At opening, before any row is read."""
    parquet.write_table(NUMBERS, tmp_path / "a.parquet")
    parquet.write_table(NUMBERS.select(["y"]), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"b\.parquet: no column is called 'x'"):
        forebay.open_shards(tmp_path, columns=["x"], progress=False)
