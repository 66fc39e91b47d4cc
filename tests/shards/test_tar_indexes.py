"""Indexes that DALI and Energon leave beside a tar in a bucket: used where they agree."""

from __future__ import annotations

import tarfile
import warnings

import numpy as np
import pytest
from written import add, members, write_tar

import forebay
from forebay.shards import format as shard_format
from forebay.shards import indexing

COUNT = 40
METADATA = "__meta__/a.json"


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch):
    monkeypatch.setattr(shard_format, "_warned", set())


@pytest.fixture
def read(monkeypatch):
    """Return how many bytes of tars were read."""
    counts = []
    tried = indexing._tried

    def counted(*given):
        counts.append(given[3])
        return tried(*given)

    monkeypatch.setattr(indexing, "_tried", counted)
    monkeypatch.setattr(indexing, "_LEAST_BYTES", 512)
    return counts


def layout(data):
    """Return each sample's files, as name, offset and size; and where its headers begin."""
    found, begins = {}, {}
    with tarfile.open(fileobj=data) as tar:
        for each in tar:
            if each.isreg() and not each.name.startswith("__"):
                key = each.name.partition(".")[0]
                found.setdefault(key, []).append((each.name, each.offset_data, each.size))
                begins.setdefault(key, each.offset)
        end = tar.offset
    return found, [*begins.values(), end]


def dali(found):
    """Return an index as `wds2idx` writes it, for which metadata is a sample."""
    lines = [f"json 512 2 {METADATA}"]
    for files in found.values():
        words = [f"{name.partition('.')[2]} {offset} {size} {name}" for name, offset, size in files]
        lines.append(" ".join(words))
    return "\n".join([f"v1.2 {len(lines)}", *lines, ""]).encode()


def written(folder):
    """Return a tar with folders and metadata in it, and where its samples are."""
    path = folder / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        add(tar, METADATA, b"{}")
        for index in range(COUNT):
            add(tar, f"part{index % 3}", b"", type=tarfile.DIRTYPE)
            for extension, data in members(index).items():
                add(tar, f"part/{index:06}{'x' * 120 * (index % 5 == 0)}.{extension}", data)
    with path.open("rb") as file:
        return path.read_bytes(), *layout(file)


def opened(memory, data, beside):
    """Open a tar in a bucket with other objects beside it."""
    for name, content in {"train-0.v2.tar": data, **beside}.items():
        memory.pipe_file(f"/bucket/tars/{name}", content)
    return forebay.open_shards("memory://bucket/tars/train-0.v2.tar", progress=False)


@pytest.mark.parametrize("kind", ["energon", "v1.2"])
def test_an_index_beside_a_tar_saves_reading_it(memory, tmp_path, read, kind):
    """The same samples, of a few kilobytes; no checksums, since their bytes were not read."""
    data, found, places = written(tmp_path)
    beside = {"train-0.idx": dali(found)}
    if kind == "energon":
        beside = {"train-0.v2.tar.idx": np.array(places, "<u8").tobytes()}
    samples = opened(memory, data, beside)
    assert sum(read) < len(data) / 4
    index = samples.blocks.index
    assert (index.crc32 == -1).all()
    whole = forebay.open_shards(tmp_path / "a.tar", progress=False)
    starts, ends = index.starts + np.repeat(index.offset, np.diff(index.first, append=COUNT)), []
    for at in range(COUNT):
        end = int(starts[at + 1]) if at + 1 < COUNT else int(index.offset[-1] + index.length[-1])
        ends.append(samples.blocks.decoder(0).sample(memoryview(data)[int(starts[at]) : end]))
    assert ends == [*whole]


def damages(data, found, places):
    """Yield indexes that are of another tar, or damaged."""
    yield "train-0.v2.tar.idx", np.array([each + 512 for each in places], "<u8").tobytes()
    yield "train-0.v2.tar.idx", np.array(places[:-1], "<u8").tobytes()
    yield "train-0.v2.tar.idx", np.array([*places[:-1], len(data) + 512], "<u8").tobytes()
    yield "train-0.v2.tar.idx", np.array([places[0], places[2], *places[3:]], "<u8").tobytes()
    yield "train-0.v2.tar.idx", np.array([0, 1 << 63], "<u8").tobytes()
    yield "train-0.v2.tar.idx", b"x"
    whole = dali(found)
    yield "train-0.idx", whole[: len(whole) // 2]
    yield "train-0.idx", whole.replace(b"v1.2", b"v9.9")
    yield "train-0.idx", whole.replace(b".cls", b".txt").replace(b"cls ", b"txt ")
    yield "train-0.idx", dali(dict([*found.items()][1:]))
    yield "train-0.idx", b"v1.2 1\njpg 512 99999999999999999999 a.jpg\n"


def test_an_index_that_does_not_agree_is_not_used(memory, tmp_path, read):
    """A warning says so, and the whole tar is read."""
    data, found, places = written(tmp_path)
    for name, content in damages(data, found, places):
        memory.rm("/bucket", recursive=True) if memory.exists("/bucket") else None
        shard_format._warned.clear()
        read.clear()
        with pytest.warns(RuntimeWarning, match=rf"v2\.tar: {name} does not agree with it"):
            samples = opened(memory, data, {name: content})
        assert len(samples) == COUNT and sum(read) >= len(data)


def test_a_stretch_of_two_samples_is_an_error(tmp_path):
    """Of an index that is wrong where it was not compared."""
    write_tar(tmp_path / "a.tar", range(3))
    decoder = forebay.open_shards(tmp_path, progress=False).blocks.decoder(0)
    data = memoryview((tmp_path / "a.tar").read_bytes())
    with pytest.raises(ValueError, match=r"the files of 'part/000000' and 'part/000001'"):
        decoder.sample(data)
    with pytest.raises(ValueError, match="it has no file"):
        decoder.sample(data[:0])


def test_a_local_tar_is_read_by_its_own_headers(tmp_path):
    """There an index saves nothing, whatever it says."""
    write_tar(tmp_path / "a.tar", range(3))
    (tmp_path / "a.tar.idx").write_bytes(b"x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(forebay.open_shards(tmp_path, progress=False)) == 3
