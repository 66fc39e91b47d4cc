"""JSON lines as shards: what `json.loads` reads line by line, and refusals with the line."""

from __future__ import annotations

import gzip
import json
import math

import pytest

import forebay
from forebay import InputError
from forebay.shards import json_lines
from forebay.shards.json_lines import JsonLinesShards
from kit.shard_reading import BytesShard, ReadShard

OBJECTS = [
    {"text": "ünïcode \u2028 ☃", "n": at, "nested": {"list": [1, None, {"a": [True]}]}}
    for at in range(20)
]


def lines_of(objects, end="\n"):
    return "".join(json.dumps(each, ensure_ascii=False) + end for each in objects).encode()


def read(data, columns=None):
    return ReadShard(JsonLinesShards(), BytesShard(data, "a.jsonl"), columns)


@pytest.mark.parametrize(
    "data",
    [
        lines_of(OBJECTS),
        lines_of(OBJECTS).rstrip(b"\n"),
        b"\xef\xbb\xbf" + lines_of(OBJECTS),
        lines_of(OBJECTS, "\r\n"),
        b"\n \t\r\n" + lines_of(OBJECTS, "\n\n  \n") + b"  ",
        lines_of(OBJECTS).replace(b"{", b"  {", 1),
    ],
    ids=["plain", "no last newline", "mark", "crlf", "blank lines", "indented"],
)
@pytest.mark.parametrize("block_bytes", [4 << 20, 200, 10], ids=["one block", "some", "one each"])
def test_lines_are_read_as_json_reads_them(data, block_bytes, monkeypatch):
    """The objects are those of `json.loads`, in order and at random, whatever a block holds."""
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", block_bytes)
    shard = read(data)
    assert len(shard) == len(OBJECTS)
    assert shard.read(range(20)) == OBJECTS
    order = [7, 19, 0, 7, 12]
    assert shard.read(order) == [OBJECTS[at] for at in order]


def test_columns_choose_keys_in_their_order():
    """Only these keys are in a sample; one that an object lacks is an error that says so."""
    shard = read(lines_of(OBJECTS), ["n", "text"])
    assert [[*each.items()] for each in shard.read([3])] == [
        [("n", 3), ("text", OBJECTS[3]["text"])]
    ]
    with pytest.raises(ValueError, match=r"no key 'label'; it has .'text', 'n', 'nested'"):
        read(lines_of(OBJECTS), ["label"]).read([0])


def test_an_empty_shard_has_no_samples():
    """A shard of no bytes, or of blank lines alone, is one without samples."""
    assert len(read(b"")) == len(read(b"\n\n \r\n")) == 0


def test_numbers_are_those_of_python():
    """Large integers are exact, NaN and the infinities are floats, the last of two keys counts."""
    data = b'{"a": 123456789012345678901234567890, "b": NaN, "c": -Infinity, "d": 1, "d": 2}'
    (found,) = read(data).read([0])
    assert found["a"] == 123456789012345678901234567890
    assert math.isnan(found["b"])
    assert found["c"] == -math.inf
    assert found["d"] == 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a": 1}\n\n[1]\n', r"a\.jsonl, line 3: it holds b'\[1\]' instead of a JSON object"),
        (b'{"a": 1}\n"b"', r"a\.jsonl, line 2: it holds b'\"b\"'"),
        (b'{\n  "a": 1\n}\n', "a.jsonl, line 2: it holds"),
        ('{"a": 1}\n'.encode("utf-16"), "line 1: it is UTF-16, not UTF-8"),
        (b'{"a": 1}\n\x00\x00\n', "line 2: it holds"),
    ],
    ids=["list", "string", "an object of several lines", "utf-16", "zeros"],
)
def test_a_line_without_an_object_is_named(data, words):
    """Indexing says which line begins with something else than an object."""
    with pytest.raises(InputError, match=words):
        read(data)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"a": }', "not JSON at character 6 of the line: Expecting value"),
        (b'{"a": "\xff"}', r"byte 7 of the line \(0xff\) is not UTF-8"),
        (b'{"a": ' + b"[" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "4300 digits"),
        (b'{"a": 1} {"b": 2}', "not JSON at character 9 of the line: Extra data"),
    ],
    ids=["json", "utf-8", "nesting", "digits", "two objects"],
)
def test_a_damaged_line_fails_alone(line, words):
    """Other samples of the block are read, and this one fails in words."""
    shard = read(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    assert shard.read([0, 2]) == [{"a": 1}, {"a": 2}]
    with pytest.raises(ValueError, match=words):
        shard.read([1])


@pytest.mark.parametrize("end", [b"", b".gz"])
def test_a_damaged_line_is_named_by_its_number(end, tmp_path):
    """Blank lines count, as in an editor, and in a compressed shard too."""
    data = b'{"a": 1}\n\n\n{"a": 2}\n \n{"a": 3]\n\n{"a": 4}\n{"a": }\n'
    path = tmp_path / f"a.jsonl{end.decode()}"
    path.write_bytes(gzip.compress(data) if end else data)
    samples = forebay.open_shards(path, progress=False)
    assert [samples[at]["a"] for at in (0, 1, 3)] == [1, 2, 4]
    for at, line in ((2, 6), (4, 9)):
        with pytest.raises(
            InputError, match=rf"{path.name}: line {line} cannot be read as .* JSON"
        ):
            samples[at]
        with pytest.raises(
            InputError, match=rf"{path.name}: line {line} cannot be read as .* JSON"
        ):
            samples.__getitems__([0, at])


def test_a_line_that_never_ends_is_refused(monkeypatch):
    """A missing newline does not take the memory of the whole shard."""
    monkeypatch.setattr(json_lines, "_MOST_LINE_BYTES", 1000)
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 100)
    data = BytesShard(b'{"a": 1}\n{"b": "' + b"x" * 10_000, "a.jsonl")
    with pytest.raises(InputError, match=r"a\.jsonl, line 2: it has more than 1"):
        JsonLinesShards().find(data)
    assert data.was_read < 5000


def test_json_is_known_by_its_first_line():
    """A shard begins with an object on one line, or with a part of a longer one."""
    form = JsonLinesShards()
    assert form.matches(lines_of(OBJECTS)[:512])
    assert form.matches(b'\xef\xbb\xbf\n{"text": "' + b"a" * 500)
    assert not form.matches(b"[1, 2]\n")
    assert not form.matches(b'{\n  "a": 1\n}')
    assert not form.matches(b"PAR1")


def test_a_file_of_no_bytes_has_no_samples(tmp_path, memory):
    """A job whose part of the lines was empty wrote it; local, and in a bucket."""
    (tmp_path / "a.jsonl").write_bytes(lines_of(OBJECTS))
    (tmp_path / "b.jsonl").write_bytes(b"")
    samples = forebay.open_shards(tmp_path, progress=False)
    assert [*samples] == OBJECTS
    for name in ("a.jsonl", "b.jsonl"):
        memory.pipe_file(f"/bucket/d/{name}", (tmp_path / name).read_bytes())
    assert len(forebay.open_shards("memory://bucket/d", progress=False)) == len(OBJECTS)


def test_a_key_that_a_line_does_not_have_is_no_damage(tmp_path):
    """The error names file and line, and what to do."""
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n\n{"b": 2}\n')
    samples = forebay.open_shards(tmp_path, columns=["a"], progress=False)
    with pytest.raises(InputError, match=r"a\.jsonl: line 3: the object has no key 'a'") as caught:
        samples[1]
    assert "leave columns= out" in str(caught.value) and "damaged" not in str(caught.value)


@pytest.mark.parametrize("read_one", [lambda it: it[1], lambda it: it.__getitems__([0, 1])])
def test_an_error_of_the_transform_names_shard_and_sample(tmp_path, read_one):
    """As a note, since the exception is the user's."""
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n\n{"b": 2}\n')
    samples = forebay.open_shards(tmp_path, transform=lambda it: it["a"], progress=False)
    assert samples[0] == 1
    with pytest.raises(KeyError) as caught:
        read_one(samples)
    assert caught.value.__notes__ == [
        "forebay: transform= raised it for sample 1 (line 3 of a.jsonl)"
    ]
