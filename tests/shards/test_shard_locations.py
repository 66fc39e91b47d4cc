"""What names shards: folders, patterns, lists; and an index that is kept."""

from __future__ import annotations

import os

import pytest
from written import sample, write_tar, write_tars

import forebay
from forebay.shards import sources
from forebay.shards.location import expanded, find_shards, root_of_known


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Return the user's folder for caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


def names(location, form=None):
    """Return the names of shards at a location."""
    return [each.name for each in find_shards(location, form).shards]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("a-{8..10}.tar", ["a-10.tar", "a-8.tar", "a-9.tar"]),
        ("{train,val}-{0..1}", ["train-0", "train-1", "val-0", "val-1"]),
        ("{a,b{c,d}}", ["a", "bc", "bd"]),
        ("plain", ["plain"]),
    ],
)
def test_braces_stand_for_names(pattern, found):
    """As in a shell."""
    assert sorted(expanded(pattern)) == found


def test_a_pattern_of_too_many_names_is_refused():
    """Before memory is taken for them."""
    for pattern in ("{0..99999999999}", "{0..9999}{0..9999}"):
        with pytest.raises(forebay.OptionError, match="more than 10,000,000 shards"):
            expanded(pattern)


def test_shards_are_found_in_folders_by_patterns_and_in_lists(tmp_path):
    """In sorted order, from the folder that the user named; what is no shard is left out."""
    (tmp_path / "b" / ".hidden").mkdir(parents=True)
    for name in ("b/2.tar", "b/10.tar", "a.tar.gz", "b/notes.txt", "b/.hidden/x.tar", "index.json"):
        (tmp_path / name).write_bytes(b"x")
    assert find_shards(tmp_path).root == str(tmp_path)
    assert names(tmp_path) == ["a.tar.gz", "b/10.tar", "b/2.tar"]
    assert names(tmp_path / "*.tar.gz") == ["a.tar.gz"]
    assert names(str(tmp_path / "**" / "*.tar")) == ["b/10.tar", "b/2.tar"]
    assert names(tmp_path / "b/{2,10}.tar") == ["10.tar", "2.tar"]
    assert names([tmp_path / "b/2.tar", tmp_path / "a.tar.gz"]) == ["a.tar.gz", "b/2.tar"]
    assert names(tmp_path / "b/notes.txt", "tar") == ["notes.txt"]


def test_shards_are_found_in_a_bucket(memory):
    """By one listing for each folder, with what changes when they change."""
    for name in ("b/2.tar", "b/10.tar", "a.tar.gz", "b/notes.txt"):
        memory.pipe_file(f"/bucket/d/{name}", name.encode())
    url = "memory://bucket/d"
    assert names(url) == ["a.tar.gz", "b/10.tar", "b/2.tar"]
    assert find_shards(f"{url}/b/*.tar").root == f"{url}/b"
    assert names(f"{url}/b/*.tar") == names(f"{url}/b/{{2,10}}.tar") == ["10.tar", "2.tar"]
    assert names(f"{url}/a.tar.gz") == ["a.tar.gz"]
    before = find_shards(f"{url}/b/2.tar").shards[0]
    memory.pipe_file("/bucket/d/b/2.tar", b"other!!")
    after = find_shards(f"{url}/b/2.tar").shards[0]
    assert before.size == after.size == 7 and before.tag != after.tag
    with pytest.raises(forebay.InputError, match=r"memory://bucket/d/b/3.tar'.*no such object"):
        names([f"{url}/b/2.tar", f"{url}/b/3.tar"])


@pytest.mark.parametrize(
    ("location", "found"),
    [
        ("s3://b/d", "s3://b/d"),
        ("s3://b/d/", "s3://b/d"),
        ("s3://b/d/{0..1}.tar", "s3://b/d"),
        (["s3://b/d/1.tar", "s3://b/d/0.tar"], "s3://b/d"),
        ("s3://b/d/*.tar", "s3://b/d"),
        # These a listing has to tell apart, or say what is wrong with.
        ("s3://b/d/{0..2}.tar", None),
        ("s3://b/d/0.tar", "s3://b/d/0.tar"),
        ("s3://b/d/0*.tar", None),
        ("s3://b/*/*.tar", None),
        ("s3://b/**", None),
        (["s3://b/d", "s3://b/e"], None),
        ("local/d", None),
    ],
)
def test_a_location_that_names_what_an_index_has_is_not_listed(location, found):
    """Where that is certain; a single shard may be a folder."""
    assert root_of_known(location, ["0.tar", "1.tar"]) == found
    assert root_of_known("s3://b/d/0.tar", ["0.tar"]) is None
    assert root_of_known("s3://b/d/*.tar", ["0.tar", "e/1.tar"]) is None


@pytest.mark.parametrize(
    ("location", "error", "words"),
    [
        ("missing.tar", forebay.InputError, "no such file"),
        ("*.tar", forebay.InputError, "there are no shards"),
        *(
            (each, forebay.OptionError, "names no shards")
            for each in ("", None, [], [""], ["a.tar", None])
        ),
        (7, forebay.OptionError, "names no folder"),
        ("zip://a.tar::s3://b/c.zip", forebay.OptionError, "a chain of URLs"),
        (["a.tar", "s3://b/c.tar"], forebay.OptionError, "several kinds of places"),
    ],
)
def test_what_names_no_shards_is_refused(tmp_path, monkeypatch, location, error, words):
    """In words."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        forebay.open_shards(location)


def test_an_index_that_takes_long_is_kept_until_a_shard_changes(tmp_path, caches, monkeypatch):
    """In the user's folder for caches; a short one is not."""
    write_tars(tmp_path, 40, 2)
    forebay.open_shards(tmp_path / "*.tar", progress=False)
    assert not caches.exists()
    monkeypatch.setattr(sources, "KEEP_S", 0.0)
    forebay.open_shards(tmp_path / "*.tar", progress=False)
    assert len([*caches.rglob("*.index")]) == 1
    monkeypatch.setattr(sources, "_indexed", None)  # nothing is indexed
    assert forebay.open_shards(tmp_path / "*.tar", progress=False)[39] == sample(39)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    write_tar(tmp_path / "train-001.tar", range(50, 60))
    assert len(forebay.open_shards(tmp_path / "*.tar", progress=False)) == 30


def test_of_a_location_one_index_is_kept_and_none_that_was_not_used_for_long(
    tmp_path, caches, monkeypatch
):
    """What was kept before a shard changed is of no use; other locations have their own."""
    monkeypatch.setattr(sources, "KEEP_S", 0.0)
    write_tars(tmp_path, 40, 2)
    for names in ("*.tar", "train-000.tar", "*.tar"):
        forebay.open_shards(tmp_path / names, progress=False)
    kept = {*caches.rglob("*.index")}
    assert len(kept) == 2
    for count in (30, 20):
        write_tar(tmp_path / "train-001.tar", range(count))
        forebay.open_shards(tmp_path / "*.tar", progress=False)
        write_tar(tmp_path / f"train-{count:03}.tar", range(3))
    now = {*caches.rglob("*.index")}
    assert len(now) == 2
    (other,) = now & kept
    os.utime(other, (0, 0))
    forebay.open_shards(tmp_path / "*.tar", progress=False)
    (last,) = caches.rglob("*.index")
    assert last not in now


def test_a_kept_index_may_be_anybodys(tmp_path, caches, monkeypatch):
    """One that is damaged is made again."""
    write_tars(tmp_path, 40, 2)
    monkeypatch.setattr(sources, "KEEP_S", 0.0)
    forebay.open_shards(tmp_path / "*.tar", progress=False)
    (path,) = caches.rglob("*.index")
    whole = path.read_bytes()
    for at in range(0, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            samples = forebay.open_shards(tmp_path / "*.tar", progress=False)
            found = [*samples]
        except (forebay.InputError, forebay.ChangedError):
            continue
        assert len(found) == len(samples)
    path.write_bytes(whole[: len(whole) // 2])
    assert len(forebay.open_shards(tmp_path / "*.tar", progress=False)) == 40


def test_a_shard_that_changed_after_opening_is_never_mixed_in(tmp_path, caches):
    """Another size, or written again."""
    write_tars(tmp_path, 40, 2)
    samples = forebay.open_shards(tmp_path / "*.tar", progress=False)
    path = tmp_path / "train-001.tar"
    os.utime(path, ns=(1, 1))
    assert samples[3] == sample(3)
    with pytest.raises(forebay.ChangedError, match=r"train-001\.tar' changed after it was indexed"):
        samples[39]
    path.unlink()
    with pytest.raises(forebay.InputError, match=r"train-001\.tar' cannot be read"):
        samples[39]


def test_a_folders_other_json_files_and_index_are_no_shards(tmp_path, memory):
    """What tools write beside shards adds no samples; without other shards, .json files count."""
    tars = tmp_path / "tars"
    tars.mkdir()
    write_tars(tars, 40, 2)
    forebay.index_shards(tars, tars / "index", num_workers=1, progress=False)
    for name in ("00000_stats.json", "dataset_infos.json", "train-000.tar.json.gz"):
        (tars / name).write_text('{"count": 20}')
    assert names(tars) == ["train-000.tar", "train-001.tar"]
    assert names(tars, "jsonl") == [
        "00000_stats.json",
        "dataset_infos.json",
        "train-000.tar.json.gz",
    ]
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.json").write_text('{"a": 1}')
    assert names(tmp_path / "lines") == ["a.json"]
    for name in ("a.tar", "a.json", "index/.forebay/ledger", "index/metadata.parquet"):
        memory.pipe_file(f"/bucket/d/{name}", b"x")
    assert names("memory://bucket/d") == ["a.tar"]


def test_a_folder_with_shards_of_several_formats_is_refused(tmp_path):
    """A tar and the table about its samples are not one dataset, unless a list names both."""
    write_tars(tmp_path, 40, 2)
    (tmp_path / "train-000.parquet").write_bytes(b"x")
    with pytest.raises(forebay.InputError, match="several formats: 1 of 'parquet', 2 of 'tar'"):
        forebay.open_shards(tmp_path)
    assert len(forebay.open_shards(tmp_path, format="tar", progress=False)) == 40
    assert len(names([tmp_path / "*.tar", tmp_path / "*.parquet"])) == 3


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    """Its shards are not left out in silence; nor is a link to itself an error of Python's."""
    write_tars(tmp_path, 40, 2)
    (tmp_path / "locked").mkdir()
    scan = os.scandir

    def refuse(path):
        if os.path.basename(path) == "locked":
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    with monkeypatch.context() as patch, pytest.raises(forebay.InputError, match="locked' cannot"):
        patch.setattr(os, "scandir", refuse)
        forebay.open_shards(tmp_path, progress=False)
    (tmp_path / "loop.tar").symlink_to("loop.tar")
    with pytest.raises(forebay.InputError, match=r"loop\.tar' cannot be read: Too many levels"):
        forebay.open_shards(tmp_path, progress=False)


def test_a_file_given_as_the_index_is_no_index(tmp_path):
    """It names a folder."""
    write_tars(tmp_path, 40, 2)
    with pytest.raises(forebay.InputError, match="there is no index"):
        forebay.open_shards(tmp_path, index=tmp_path / "train-000.tar", progress=False)


def test_a_home_that_cannot_be_read_or_is_unknown_keeps_no_index(tmp_path, monkeypatch):
    """As of a container's user without an entry in the list of users."""
    write_tars(tmp_path, 40, 2)
    monkeypatch.setattr(sources, "KEEP_S", 0.0)
    for error in (RuntimeError("Could not determine home directory."), PermissionError(13, "no")):

        def refuse(error=error):
            raise error

        monkeypatch.setattr(sources, "_cache_folder", refuse)
        assert forebay.open_shards(tmp_path, progress=False)[39] == sample(39)
