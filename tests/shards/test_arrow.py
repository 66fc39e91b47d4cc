"""Arrow files and streams as shards: rows as `from_table` has them, from single batches."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from tables import ROWS, arrow_bytes, many_types

import forebay
from forebay import InputError
from forebay.shards import arrow_rows
from forebay.shards.arrow import ArrowShards
from kit.shard_reading import BytesShard, ReadShard

TABLE = many_types()
NUMBERS = pa.table({"x": range(1000), "y": [str(at) for at in range(1000)]})
LAYOUTS = {"stream": True, "file": False}


def read(data, columns=None, name="data-00000-of-00001.arrow"):
    return ReadShard(ArrowShards(), BytesShard(data, name), columns)


@pytest.mark.parametrize("is_stream", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("dropped", [[], ["category"]], ids=["dictionaries", "none"])
def test_rows_are_those_of_from_table(is_stream, compression, dropped):
    """All types, missing values, dictionaries, compressed or not, in order and at random."""
    table = TABLE.drop_columns(dropped)
    expected = forebay.from_table(table)
    expected = [expected[at] for at in range(ROWS)]
    data = arrow_bytes(table, 13, is_stream=is_stream, compression=compression)
    shard = read(data)
    assert len(shard) == ROWS
    assert shard.read(range(ROWS)) == expected
    order = [59, 0, 7, 8, 30, 7, 13, 12, 14, 29, 1]
    assert shard.read(order) == [expected[at] for at in order]
    columns = ["struct", "a.b", "text"]
    (found,) = read(data, columns).read([44])
    assert [*found.items()] == [(name, expected[44][name]) for name in columns]


def test_types_that_only_arrow_has_are_read():
    """Views, large lists, runs and unions come out as pyarrow has them."""
    table = pa.table(
        {
            "view": pa.array(["a", None, "a string that is longer than a view"], pa.string_view()),
            "large": pa.array([[1], None, []], pa.large_list(pa.int16())),
            "half": pa.array([1.5, None, 2.5], pa.float16()),
            "list view": pa.array([[1], [2, 3], None], pa.list_view(pa.int8())),
            "runs": pa.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"]),
        }
    )
    for compression in (None, "zstd"):
        shard = read(arrow_bytes(table, 3, is_stream=True, compression=compression))
        assert shard.read([2, 0, 1]) == [table.to_pylist()[at] for at in (2, 0, 1)]


@pytest.mark.parametrize("is_stream", LAYOUTS.values(), ids=LAYOUTS)
def test_only_metadata_is_read_for_the_index(is_stream):
    """Of a megabyte, a few kilobytes are read: a message says how long it is."""
    table = pa.table({"x": [bytes(10_000)] * 100})
    shard = BytesShard(arrow_bytes(table, 10, is_stream=is_stream))
    assert ArrowShards().find(shard).rows.tolist() == [10] * 10
    assert shard.was_read < 10_000


@pytest.mark.parametrize("deltas", [False, True])
def test_dictionaries_may_change_within_a_stream(deltas):
    """A batch has the entries that the stream had given before it, replaced ones or more."""
    values = (["a", "b"], ["a", "b", "c"], ["d", None], ["d"], ["e"])
    batches = [pa.record_batch({"x": pa.array(each).dictionary_encode()}) for each in values]
    out = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=deltas)
    with pa.ipc.new_stream(out, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    shard = read(out.getvalue().to_pybytes())
    expected = [{"x": each} for some in values for each in some]
    assert shard.read(range(9)) == expected
    assert shard.read([8, 2, 6]) == [expected[at] for at in (8, 2, 6)]


def test_the_indices_of_a_dataset_of_hugging_face_are_refused():
    """A shuffled dataset's indices are no samples; the error says how to save the rows."""
    data = arrow_bytes(pa.table({"indices": pa.array([2, 0, 1], pa.uint64())}), 3, is_stream=True)
    with pytest.raises(InputError, match=r"flatten_indices\(\)\.save_to_disk"):
        read(data, name="dataset/indices.arrow")
    assert read(data).read([0]) == [{"indices": 2}]


def test_a_shard_of_a_cache_is_refused():
    """Its columns are leaves of samples, which `open_cache` puts together."""
    table = NUMBERS.replace_schema_metadata({"forebay": "{}"})
    with pytest.raises(InputError, match=r"which forebay\.open_cache reads"):
        read(arrow_bytes(table, 100, is_stream=False))


def test_big_endian_numbers_are_refused():
    """Read as they are, they would be other numbers in silence."""
    data = bytearray(arrow_bytes(NUMBERS, 100, is_stream=True))

    def target(at):
        return at + int.from_bytes(data[at : at + 4], "little")

    message = target(8)
    fields = message - int.from_bytes(data[message : message + 4], "little", signed=True)
    header = message + int.from_bytes(data[fields + 8 : fields + 10], "little")
    schema = target(header)
    fields = schema - int.from_bytes(data[schema : schema + 4], "little", signed=True)
    assert data[fields + 4 : fields + 6] == b"\0\0"  # little-endian is not stored
    data[fields + 4] = 4  # now something is there that is not zero
    with pytest.raises(InputError, match=r"arrow: its numbers are big-endian\n  Write it again"):
        read(bytes(data))


def test_a_stream_without_an_end_mark_is_read():
    """Writers may just stop; and there are shards without rows."""
    data = arrow_bytes(NUMBERS, 100, is_stream=True)
    assert data.endswith(b"\xff\xff\xff\xff\0\0\0\0")
    assert read(data[:-8]).read(range(1000)) == NUMBERS.to_pylist()
    assert len(read(arrow_bytes(NUMBERS[:0], 10, is_stream=True))) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:1000], "it does not end as an Arrow file|beyond its end"),
        (lambda data: data[:-300], "it does not end as an Arrow file|beyond its end"),
        (lambda data: data[:20], "it does not end|metadata of"),
        (lambda data: b"FEA1" + data[4:], "it is no Arrow file"),
        (lambda data: b"", "it has no schema"),
    ],
    ids=["beginning", "truncated", "magic", "feather 1", "empty"],
)
@pytest.mark.parametrize("is_stream", LAYOUTS.values(), ids=LAYOUTS)
def test_a_damaged_file_is_named(change, words, is_stream):
    """What is no Arrow file, or ends too early, is an error that names it."""
    with pytest.raises(
        InputError, match=rf"data-0.*arrow: it is no Arrow file: .*({words})|{words}"
    ):
        read(change(arrow_bytes(NUMBERS, 100, is_stream=is_stream)))


# ---- hostile -------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_buffer_that_becomes_too_much_is_refused_before_it_does(codec, monkeypatch):
    """A compressed buffer says what it becomes, and that is more than can be."""
    monkeypatch.setattr(arrow_rows, "LEAST_BYTES", 1 << 20)
    table = pa.table({"x": [bytes(5 << 20)]})
    shard = read(arrow_bytes(table, 1, is_stream=True, compression=codec))
    with pytest.raises(ValueError, match="a record batch would take 5,24"):
        shard.read([0])


def test_offsets_that_lead_out_of_a_column_are_an_error():
    """Nothing outside of a batch's memory is read, whichever rows are."""
    data = bytearray(arrow_bytes(pa.table({"x": ["a", "b", "c", "d", "e"]}), 5, is_stream=True))
    at = data.index(struct.pack("<6i", *range(6)))
    data[at + 8 : at + 12] = struct.pack("<i", 1 << 30)
    shard = read(bytes(data))
    for rows in ([1], [2], [0, 1, 2, 3, 4], [4, 0, 3, 2], [0, 2]):
        with pytest.raises((ValueError, pa.ArrowException), match="ffset"):
            shard.read(rows)
    assert shard.read([0, 4]) == [{"x": "a"}, {"x": "e"}]


def test_bytes_that_are_not_utf_8_are_an_error():
    """A string column holds strings, whatever its bytes are."""
    data = arrow_bytes(pa.table({"x": ["abcdef"]}), 1, is_stream=True)
    shard = read(data.replace(b"abcdef", b"abc\xffef"))
    with pytest.raises((ValueError, pa.ArrowException), match="UTF"):
        shard.read([0])
