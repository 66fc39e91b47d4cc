"""Tars: samples as WebDataset groups them, and tars that are damaged or odd."""

from __future__ import annotations

import gzip
import os
import pickle
import re
import tarfile
import warnings
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from written import add, sample, write_tar, write_tars

import forebay
from forebay.shards import compression
from forebay.shards import format as shard_format


def opened(location, **options):
    """Open shards without a bar."""
    return forebay.open_shards(location, progress=False, **options)


def grouped(path):
    """Return the samples of a tar by the standard library, grouped by WebDataset's rules."""
    samples = []
    with tarfile.open(path) as tar:
        for member in tar:
            named = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", member.name)
            if not member.isreg() or named is None or re.match(r"__[^/]*__($|/)", member.name):
                continue
            key, extension = named[1], named[2].lower()
            if not samples or samples[-1]["__key__"] != key:
                samples.append({"__key__": key})
            samples[-1][extension] = tar.extractfile(member).read()
    return samples


def test_samples_are_members_with_one_key_in_order(tmp_path):
    """At any index, in batches, after pickling, and through a transform."""
    write_tars(tmp_path, 100, 3)
    samples = opened(tmp_path)
    assert repr(samples) == f"<ShardDataset {str(tmp_path)!r}: 100 samples in 3 shards>"
    assert [*samples] == [sample(at) for at in range(100)]
    assert samples[-1] == sample(99)
    assert samples.__getitems__([70, 3, 3, 99]) == [sample(at) for at in (70, 3, 3, 99)]
    assert pickle.loads(pickle.dumps(samples))[42] == sample(42)
    assert opened(tmp_path, transform=len)[1] == 3
    with pytest.raises(IndexError):
        samples[100]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_names_are_read_as_each_kind_of_tar_has_them(tmp_path, form):
    """Long ones, ones with a prefix or of other alphabets; folders, links and metadata left out."""
    path = tmp_path / "a.tar"
    names = ["b.c/d.Seg.PNG", "b.c/d.txt", "e", ".hidden", "f/.g.h", "i.j", f"{'k/' * 60}l.m"]
    names += ["__index__.json", "__meta__/n.o", "p/__q__.r", "s..t", "u."]
    if form != tarfile.USTAR_FORMAT:
        names += [f"{'v' * 300}.w", "ü/ж.x"]
    with tarfile.open(path, "w", format=form) as tar:
        for at, name in enumerate(names):
            add(tar, f"folder{at}", b"", type=tarfile.DIRTYPE)
            add(tar, name, name.encode())
            add(
                tar,
                f"link{at}.y",
                b"",
                type=tarfile.SYMTYPE,
                linkname="z" * (90 if form == tarfile.USTAR_FORMAT else 200),
            )
    assert [*opened(path)] == grouped(path)
    assert len(grouped(path)) >= 7


@pytest.mark.parametrize("name", ["short", "v" * 200])
def test_records_of_times_and_long_sizes_change_no_sample(tmp_path, name):
    """WebDataset writes a PAX header for each member; others fill the field of the size."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for at in range(6):
            for extension in ("jpg", "cls"):
                fields = {"mtime": 1.5 + at, "pax_headers": {"comment": "size is no path"}}
                add(tar, f"{name}{at}.{extension}", bytes(700 * at), **fields)
    assert len([*opened(path)]) == 6 and [*opened(path)] == grouped(path)
    data = bytearray(path.read_bytes())
    for at in range(0, len(data) - 512, 512):
        if data[at + 257 : at + 262] == b"ustar" and data[at + 124 : at + 136].rstrip(b"\0"):
            data[at + 124 : at + 136] = b"0" + bytes(data[at + 124 : at + 135])
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 155] = b"%06o\0" % sum(data[at : at + 512])
    path.write_bytes(data)
    assert len([*opened(path)]) == 6 and [*opened(path)] == grouped(path)


def test_a_key_that_comes_again_later_is_another_sample(tmp_path):
    """As in a stream; an extension that comes twice in one sample is an error."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("a.x", "b.x", "a.x"):
            add(tar, name, b"1")
    assert [each["__key__"] for each in opened(path)] == ["a", "b", "a"]
    with tarfile.open(path, "a") as tar:
        add(tar, "a.X", b"2")
    with pytest.raises(forebay.InputError, match=r"at byte 3,072: sample 'a' has 'x' twice"):
        opened(path)


def test_a_sample_whose_files_lie_apart_is_warned_of(tmp_path, monkeypatch):
    """As in WebDataset each part is a sample; one warning for a folder says how to write it."""
    monkeypatch.setattr(shard_format, "_warned", set())
    for shard in "ab":
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for name in ("1.x", "2.x", "1.y", "2.y"):
                add(tar, name, b"1")
    with pytest.warns(RuntimeWarning, match=r"\.tar: other files lie .* sample '1', and of 1 more"):
        samples = opened(tmp_path)
    parts = [sorted(each) for each in samples]
    assert parts[:4] == [["__key__", "x"]] * 2 + [["__key__", "y"]] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(tmp_path)


@pytest.mark.parametrize("ending", ["tar.gz", "tgz", "tar.zst", "tar"])
def test_a_compressed_tar_is_one_block(tmp_path, ending):
    """By its name or by its first bytes."""
    write_tar(tmp_path / "plain", range(30))
    plain = (tmp_path / "plain").read_bytes()
    packed = pa.Codec("zstd").compress(plain, asbytes=True) if "zst" in ending else None
    packed = packed or gzip.compress(plain)
    (tmp_path / f"a.{ending}").write_bytes(packed)
    samples = opened(tmp_path / f"a.{ending}")
    assert [*samples] == [sample(at) for at in range(30)]
    assert samples.__getitems__([29, 0]) == [sample(29), sample(0)]
    assert len(samples._source.blocks) == 1 and samples.window == 256_000_000


def test_what_decompresses_to_far_more_is_refused(tmp_path, monkeypatch):
    """With both limits."""
    monkeypatch.setattr(compression, "LEAST_BYTES", 1 << 20)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(bytes(50 << 20)))
    with pytest.raises(forebay.InputError, match=r"a\.tar\.gz.*more than 5,.*100 times.*4,000,000"):
        opened(tmp_path)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(bytes(5000))[:-9])
    with pytest.raises(forebay.InputError, match=r"a\.tar\.gz.*cannot be decompressed as gzip"):
        opened(tmp_path)


def test_a_sparse_member_is_refused_in_words(tmp_path):
    """Its holes are not in the tar."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        add(tar, "a.x", b"1")
        add(tar, "b.x", b"2", type=tarfile.GNUTYPE_SPARSE)
    with pytest.raises(forebay.InputError, match=r"at byte 1,024: a sparse member"):
        opened(path)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, "b.x", b"2", pax_headers={"GNU.sparse.major": "1"})
    with pytest.raises(forebay.InputError, match=r"a sparse member"):
        opened(path)


def test_a_damaged_tar_names_the_byte(tmp_path):
    """Where it ends, and where there is no header."""
    path = tmp_path / "a.tar"
    write_tar(path, range(10))
    whole = path.read_bytes()
    path.write_bytes(whole[:900])
    with pytest.raises(forebay.InputError, match=r"a\.tar.*at byte 0: a member of [\d,]+ bytes"):
        opened(path)
    second = 512 + -(-len(sample(0)["jpg"]) // 512) * 512
    path.write_bytes(whole[:second] + b"x" + whole[second + 1 :])
    with pytest.raises(forebay.InputError, match=rf"at byte {second:,}: there is no header"):
        opened(path)
    path.write_bytes(b"")
    with pytest.raises(forebay.InputError, match=r"a\.tar.* is empty"):
        opened(path)


@given(st.integers(0, 40_000), st.binary(min_size=1, max_size=20))
def test_any_bytes_are_an_error_or_samples(tmp_path_factory, at, data):
    """Never another exception, and never memory for what a header only says."""
    path = tmp_path_factory.mktemp("forged") / "a.tar"
    write_tar(path, range(12))
    whole = path.read_bytes()
    at %= len(whole)
    path.write_bytes(whole[:at] + data + whole[at + len(data) :])
    with suppress(forebay.InputError):
        assert all(isinstance(each["__key__"], str) for each in opened(path))


def test_a_name_is_no_path(tmp_path):
    """Names that lead elsewhere are keys, and nothing is written."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        add(tar, "../../etc/passwd.x", b"1")
        add(tar, "/root/y.z", b"2")
    before = sorted(os.listdir(tmp_path))
    assert [each["__key__"] for each in opened(path)] == ["../../etc/passwd", "/root/y"]
    assert sorted(os.listdir(tmp_path)) == before


class Numbers(shard_format.ShardFormat):
    """Shards of 8-byte numbers, as somebody's own format."""

    name, suffixes = "numbers", (".numbers",)

    def matches(self, head):
        """Return that nothing is certain."""
        return False

    def find(self, shard):
        """Return one block of all."""
        starts = np.arange(0, shard.size, 8)
        at = np.array([[0, 0, shard.size]])
        return shard_format.FoundBlocks(np.array([len(starts)]), at, starts=starts)

    def decoder(self, info, columns):
        """Return what reads a number."""
        return _Number()


class _Number(shard_format.BlockDecoder):
    def sample(self, data):
        """Return it."""
        return int.from_bytes(data, "little")


def test_a_format_from_outside_can_be_registered(tmp_path, monkeypatch):
    """By a class with three methods; whoever gets a dataset gets it, too."""
    monkeypatch.setattr(shard_format, "_registered", dict(shard_format._registered))
    (tmp_path / "a.numbers").write_bytes(b"".join(at.to_bytes(8, "little") for at in range(50)))
    with pytest.raises(forebay.InputError, match="no shards"):
        opened(tmp_path)
    forebay.register_format(Numbers())
    samples = opened(tmp_path)
    assert [*samples] == [*range(50)]
    sent = pickle.dumps(samples)
    shard_format._registered.clear()  # as in a worker that is a new interpreter
    assert [*pickle.loads(sent)] == [*range(50)]
