"""`forebay.cache`: made once, opened ever after; what changed or is damaged is noticed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from cached import Asked, Deadly, Made, Pictures, Point
from click.testing import CliRunner
from same import assert_same

import forebay
from forebay.cli import cli
from forebay.ledger.lock import LOCK_NAME, FolderLock
from forebay.ledger.records import Counts
from forebay.observe.progress import Progress
from forebay.runs.ranges import read_run_state
from forebay.runs.source_code import load_work
from kit.leaks import no_leaks

# Runs that start new interpreters have tests of their own.
pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def make(dataset, folder, **options):
    """Make or open a cache in this process."""
    return forebay.cache(dataset, folder, num_workers=0, progress=False, **options)


def shards(folder):
    return sorted(path.name for path in folder.glob("*.arrow"))


@pytest.fixture
def pictures(tmp_path):
    """A finished cache of 40 pictures in 40 shards, and its folder."""
    return make(Pictures(), tmp_path / "cache"), tmp_path / "cache"


def test_a_finished_cache_is_opened_without_asking_for_a_sample(tmp_path):
    """Not even the first; and no file of it is written to, nor locked."""
    make(Asked(), tmp_path)
    Asked.asked.clear()
    with contextlib.closing(FolderLock(tmp_path / ".forebay" / LOCK_NAME, "another")):
        seen = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        cached = make(Asked(), tmp_path)
        now = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert Asked.asked == [] and now == seen
    assert_same(cached[39], Asked()[39])


def test_every_sample_is_made_once(tmp_path):
    """Besides three that are looked at before, to decide how to cut."""
    Asked.asked.clear()
    make(Asked(), tmp_path)
    assert sorted(Asked.asked) == sorted([*range(40), 0, 20, 39])


def test_indices_are_those_of_a_sequence(pictures):
    """Negative ones count from the end; others raise, so that iterating ends."""
    cached, _ = pictures
    assert len(cached) == 40 and len(list(cached)) == 40
    assert cached[-1]["label"] == 39 and cached[-40]["label"] == 0
    for index in (40, -41):
        with pytest.raises(IndexError, match=f"there is no sample {index}: there are 40"):
            cached[index]
    with pytest.raises(IndexError):
        cached.__getitems__([0, 40])
    chosen = torch.utils.data.Subset(cached, torch.tensor([3, 39, -40]))
    assert [sample["label"] for sample in chosen.__getitems__([0, 1, 2])] == [3, 39, 0]
    for index in (1.0, "1", slice(1)):
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            cached[index]


def test_one_sample_is_a_cache_and_none_is_not(tmp_path):
    """An empty dataset is more often a wrong path than a wish."""
    assert make(Pictures(1), tmp_path / "one")[0]["name"] == "picture 0"
    with pytest.raises(forebay.InputError, match="the dataset has 0 samples"):
        make(Pictures(0), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_sample_larger_than_a_shard_is_a_shard(tmp_path):
    """And small ones are cut by their bytes, as they were looked at first."""
    cached = make(Made(lambda i: torch.full((5000 if i == 1 else 10,), i), 300), tmp_path)
    assert len(shards(tmp_path)) == 100
    assert cached[1].shape == (5000,) and cached[299].tolist() == [299] * 10
    small = make(Made(torch.tensor, 1000), tmp_path / "b", shard_bytes=32)
    assert len(shards(tmp_path / "b")) == 250 and small[999] == 999


def test_what_changed_is_noticed(pictures):
    """A parameter: the message shows it, and says what to do. Nothing is lost."""
    _, folder = pictures
    with pytest.raises(forebay.ChangedError, match="parameter shift: 0 -> 1") as caught:
        make(Pictures(shift=1), folder)
    assert "accept_changes=True" in str(caught.value) and "redo='*'" in str(caught.value)
    assert "if every sample has the name or index that it had" in str(caught.value)
    assert forebay.open_cache(folder)[5]["image"].max() == 5
    assert make(Pictures(shift=1), folder, redo="*")[5]["image"].max() == 6


def test_a_version_is_the_users_word_for_what_is_the_same(tmp_path):
    """While it stays, nothing is compared; with a new one all shards are made again."""
    make(Pictures(), tmp_path, version="1")
    assert make(Pictures(shift=1), tmp_path, version="1")[5]["image"].max() == 5
    assert make(Pictures(shift=1), tmp_path, version="2")[5]["image"].max() == 6
    assert make(Pictures(shift=1), tmp_path)[5]["image"].max() == 6


def test_an_accepted_change_is_remembered(tmp_path):
    """What was accepted once needs no word later, and is what is made of the rest."""
    make(Pictures(), tmp_path)
    assert make(Pictures(shift=1), tmp_path, accept_changes=True)[5]["image"].max() == 5
    (tmp_path / "shard-00003.arrow").unlink()
    cached = make(Pictures(shift=1), tmp_path)
    assert [cached[at]["image"].max() for at in (2, 3)] == [2, 4]


class Growing(Pictures):
    """Its length is no attribute: it looks at the disk, say."""

    length = 300

    def __len__(self):
        return Growing.length


@pytest.mark.slow
def test_another_length_is_noticed(tmp_path, monkeypatch):
    """Where nothing else shows it; if changes are accepted, what is new is added."""
    make(Growing(), tmp_path)
    monkeypatch.setattr(Growing, "length", 302)
    with pytest.raises(forebay.ChangedError, match=r"parameter len\(\): 300 -> 302"):
        make(Growing(), tmp_path)
    cached = make(Growing(), tmp_path, accept_changes=True)
    assert [one["label"] for one in cached] == list(range(302))
    monkeypatch.setattr(Growing, "length", 299)
    cached = make(Growing(), tmp_path, accept_changes=True)
    assert [one["label"] for one in cached] == list(range(299))
    assert len(shards(tmp_path)) == 100


def test_failing_samples_are_all_named(tmp_path):
    """Nothing half is returned; what is done stays, and the rest is made when it is mended."""
    bad = {3, 4, 250}

    def fragile(index):
        if index in bad:
            raise ValueError(f"bad {index}")
        return index

    with pytest.raises(forebay.FailuresError) as caught:
        make(Made(fragile, 300), tmp_path)
    text = str(caught.value)
    assert text.startswith("3 of 300 samples could not be cached: 3, 4, 250\n")
    assert "sample 250: ValueError: bad 250" in text and "98 of 100 shards" in text
    assert "If you leave them out of the dataset, other samples get their indices" in text
    assert "in fragile" in text  # the user's own lines
    with pytest.raises(forebay.InputError, match="no finished cache"):
        forebay.open_cache(tmp_path)
    kept = {name: (tmp_path / name).stat().st_ino for name in shards(tmp_path)}
    assert len(kept) == 98
    with pytest.raises(forebay.FailuresError) as caught:  # all that this call does fails
        make(Made(fragile, 300), tmp_path)
    assert str(caught.value).startswith("3 of 300 samples could not be cached: 3, 4, 250\n")
    bad.clear()
    cached = make(Made(fragile, 300), tmp_path, accept_changes=True)
    assert list(cached) == list(range(300))
    assert kept.items() <= {n: (tmp_path / n).stat().st_ino for n in shards(tmp_path)}.items()


@pytest.mark.slow
def test_samples_that_kill_or_hang_are_named(tmp_path):
    """The worker left behind which sample it was at."""
    with pytest.raises(forebay.FailuresError) as caught:
        forebay.cache(Deadly(10), tmp_path, num_workers=2, timeout=3, retries=0, progress=False)
    text = str(caught.value)
    assert text.startswith("2 of 10 samples could not be cached: 3, 7\n"), text
    assert "sample 3: WorkerDiedError: the worker was killed by signal: Killed (SIGKILL" in text
    assert "sample 7: SampleTimeoutError: ran past timeout=3 s" in text


def test_a_missing_shard_is_an_error_that_cache_makes_good(pictures):
    """It is named, and only it is made again if the dataset is there."""
    _, folder = pictures
    other = (folder / "shard-00004.arrow").stat().st_ino
    (folder / "shard-00003.arrow").unlink()
    with pytest.raises(forebay.InputError, match=r"lacks shard-00003\.arrow: 1 of its 41 files"):
        forebay.open_cache(folder)
    assert_same(make(Pictures(), folder)[3], Pictures()[3])
    assert (folder / "shard-00004.arrow").stat().st_ino == other


def test_a_link_to_a_shard_that_is_gone_is_an_error_that_says_what_to_do(pictures):
    """As on a disk that is not mounted; and following the advice mends it."""
    _, folder = pictures
    (folder / "shard-00003.arrow").unlink()
    (folder / "shard-00003.arrow").symlink_to("nowhere")
    with pytest.raises(forebay.InputError, match=r"lacks shard-00003\.arrow: 1 of its 41 files"):
        forebay.open_cache(folder)
    with pytest.raises(forebay.InputError, match=r"shard-00003\.arrow' has 7 .*\n.*Remove it"):
        make(Pictures(), folder)
    (folder / "shard-00003.arrow").unlink()
    assert_same(make(Pictures(), folder)[3], Pictures()[3])


def damage_torn(path):
    os.truncate(path, path.stat().st_size // 2)


def damage_longer(path):
    path.write_bytes(path.read_bytes() + b"more")


@pytest.mark.parametrize("damage", [damage_torn, damage_longer])
def test_a_torn_shard_is_an_error_that_says_what_to_do(pictures, damage):
    """Whatever opens it; and following the advice mends it."""
    _, folder = pictures
    damage(folder / "shard-00003.arrow")
    for call in (lambda: forebay.open_cache(folder), lambda: make(Pictures(), folder)):
        with pytest.raises(forebay.InputError, match=r"shard-00003\.arrow' has .* were written"):
            call()
    (folder / "shard-00003.arrow").unlink()
    assert_same(make(Pictures(), folder)[3], Pictures()[3])


def test_a_shard_of_another_cache_is_an_error(pictures):
    """Nothing can be appended to a cache."""
    _, folder = pictures
    (folder / "shard-00040.arrow").write_bytes((folder / "shard-00000.arrow").read_bytes())
    with pytest.raises(
        forebay.InputError, match=r"shard-00040\.arrow' does not belong to this cache"
    ):
        forebay.open_cache(folder)


def test_swapped_shards_of_one_size_are_an_error_that_says_which(pictures):
    """Every sample is the one of its index, or there is none."""
    cached, folder = pictures
    one, other = folder / "shard-00003.arrow", folder / "shard-00004.arrow"
    assert one.stat().st_size == other.stat().st_size
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)
    for each in (cached, forebay.open_cache(folder), make(Pictures(), folder)):
        words = "it holds 1 sample, starting at sample 4, instead of 1, starting at sample 3"
        with pytest.raises(forebay.InputError, match=words):
            each[3]
    for path in (one, other):
        path.unlink()
    assert_same(make(Pictures(), folder)[3], Pictures()[3])


def test_a_shard_of_samples_that_are_built_otherwise_is_an_error(pictures, tmp_path):
    """Though its place is right."""
    cached, folder = pictures
    make(Made(lambda index: {"label": index}, 40), tmp_path / "other")
    (tmp_path / "other" / "shard-00003.arrow").replace(folder / "shard-00003.arrow")
    with pytest.raises(forebay.InputError, match="different structure from those of this cache"):
        cached[3]


@pytest.mark.parametrize("content", [b"", b"nothing of Arrow's", b"ARROW1\0\0" + b"\xff" * 500])
def test_a_shard_that_rots_while_open_is_an_error(pictures, content):
    """With its name, at the first sample that is asked of it."""
    cached, folder = pictures
    (folder / "shard-00003.arrow").write_bytes(content)
    assert cached[2]["label"] == 2
    with pytest.raises(forebay.InputError, match=r"shard-00003\.arrow' cannot be read"):
        cached[3]
    (folder / "shard-00004.arrow").unlink()
    with pytest.raises(forebay.InputError, match=r"shard-00004\.arrow' was removed after"):
        cached[4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.pop("sizes"),
        lambda told: told["plan"].update(per_shard=0),
        lambda told: told["plan"]["columns"][0].update(kind="code"),
        lambda told: told["plan"]["columns"][0].update(dtype="ones"),
        lambda told: told["plan"]["structure"].update(kind="type"),
        lambda told: told.update(format=99),
        lambda told: told["plan"].update(samples=10**15, per_shard=1),
        lambda told: told["plan"].update(samples=10**30, per_shard=10**30),
        lambda told: told["plan"].update(samples=float("inf")),
        lambda told: told["plan"].update(per_shard=-1),
        lambda told: told.update(sizes=[float("nan")] * 40),
        lambda told: told.update(sizes="much"),
        lambda told: told.update(plan=[]),
        lambda told: told["plan"]["columns"][0].update(shape=[-1, 4]),
        lambda told: told["plan"]["columns"][0].update(shape=[10**30]),
        lambda told: told["plan"]["structure"].update(parts=7),
        lambda told: told["plan"]["structure"]["keys"].append("more"),
        lambda told: told["plan"]["structure"].update(kind="list"),
        lambda told: told["plan"]["structure"]["keys"].__setitem__(0, ["a"]),
        lambda told: told["plan"]["columns"].pop(),
    ],
)
def test_a_damaged_index_is_an_error(pictures, change):
    """No name in it is looked up anywhere but among those that a cache knows."""
    _, folder = pictures
    path = folder / ".forebay" / "cache.json"
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))
    with pytest.raises(forebay.InputError, match=r"cache\.json' (is damaged|has format 99)"):
        forebay.open_cache(folder)
    for content in (b"{", b"[]", b"\xff", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(forebay.InputError, match="is damaged"):
            forebay.open_cache(folder)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(forebay.InputError, match="is not a regular file"):
        forebay.open_cache(folder)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(forebay.InputError, match=r"it has more than 67,108,864 bytes"):
        forebay.open_cache(folder)


class Counted(torch.utils.data.IterableDataset):
    """Has a length, and torch's `__getitem__`, which always raises."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (iter(()), {}, "needs a map-style Dataset"),
        (Counted(), {}, "needs a map-style Dataset, .* got Counted"),
        ("images", {}, r"got str\n.*With load="),
        (Pictures(), {"location": "memory://cache"}, "in the memory of this process"),
        (Pictures(), {"location": None}, "None names no folder"),
        (Pictures(), {"location": b"cache"}, "b'cache' names no folder"),
        (Pictures(), {"location": "a\0b"}, "names no folder"),
        (Pictures(), {"shard_bytes": 0}, "shard_bytes=0"),
        (Pictures(), {"backend": "grid"}, "backend='grid'"),
    ],
)
def test_impossible_calls_start_nothing(dataset, options, words, tmp_path):
    """The message names the argument."""
    arguments = {"location": tmp_path / "cache"} | options
    with pytest.raises(forebay.OptionError, match=words):
        forebay.cache(dataset, **arguments)
    assert not (tmp_path / "cache").exists()


def text_of(path):
    return {"text": Path(path).read_text()}


def kind_of(path):
    return {"kind": type(path).__name__}


def number_in(row):
    return {"n": row["n"] * 10}


def in_texts(folder):
    return sorted(map(str, folder.glob("*.txt")))


@pytest.mark.parametrize(
    "named",
    [str, lambda folder: folder / "*.txt", in_texts, lambda folder: iter(in_texts(folder))],
    ids=["folder", "glob", "list", "iterator"],
)
def test_paths_and_a_function_are_a_dataset(named, tmp_path):
    """A file that changed is read again, a new one is added; the others are not read again."""
    folder, read = tmp_path / "in", []
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(name)

    def load(path):
        read.append(Path(path).name)
        return text_of(path)

    cached = make(named(folder), tmp_path / "out", load=load, version="1")
    assert [each["text"] for each in cached] == ["a", "b", "c"]
    (folder / "b.txt").write_text("changed")
    (folder / "d.txt").write_text("d")
    read.clear()
    cached = make(named(folder), tmp_path / "out", load=load, version="1")
    assert [each["text"] for each in cached] == ["a", "changed", "c", "d"]
    assert {*read} == {"b.txt", "d.txt"}


def test_paths_are_loaded_as_they_were_listed(tmp_path):
    """A string for a string."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text("a")
    for at, named in enumerate(([str(tmp_path / "in" / "a")], [tmp_path / "in" / "a"])):
        cached = make(named, tmp_path / str(at), load=kind_of)
        assert cached[0]["kind"] == type(named[0]).__name__


def test_rows_and_a_function_are_a_dataset(tmp_path):
    """Of a file, and of a list."""
    (tmp_path / "t.csv").write_text("n\n1\n2\n")
    for at, named in enumerate((tmp_path / "t.csv", [{"n": 1}, {"n": 2}])):
        assert [each["n"] for each in make(named, tmp_path / str(at), load=number_in)] == [10, 20]


def test_a_function_for_the_samples_of_a_dataset_is_refused(tmp_path):
    """And so is a cache in the folder of its files."""
    with pytest.raises(forebay.OptionError, match="the samples are of a Pictures"):
        make(Pictures(), tmp_path / "cache", load=text_of)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(forebay.OptionError, match="lies in the input folder"):
        make(tmp_path, tmp_path / "cache", load=text_of)


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    """Of forebay, whether it is to be made or opened."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(forebay.OutputError, match="file"):
        make(Pictures(), tmp_path / "file")
    with pytest.raises(forebay.InputError, match="holds no finished cache"):
        forebay.open_cache(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_the_name_of_the_folder_may_be_any_bytes(tmp_path):
    """torch opens only files whose names are UTF-8."""
    folder = tmp_path / os.fsdecode(b"odd\xff\n")
    make(Pictures(), folder)
    assert forebay.open_cache(folder)[39]["label"] == 39


def test_a_named_tuple_is_the_users_own(tmp_path):
    """Where it is loaded, or where the first samples showed it; else it is one like it."""
    local = namedtuple("local", "a b")
    dataset = Made(lambda i: local(i, torch.tensor(i)), 3)
    assert type(make(dataset, tmp_path)[1]) is local
    later = forebay.open_cache(tmp_path)[1]
    assert type(later) is not local and type(later).__name__ == "local"
    assert later == (1, torch.tensor(1)) and later.b == 1
    again = pickle.loads(pickle.dumps(later))
    assert type(again) is type(later) and again._fields == ("a", "b")


@pytest.mark.slow
def test_a_class_is_not_imported_because_a_file_names_it(trainers, tmp_path):
    """Another process gets a class of its own, and its workers that one."""
    make(Pictures(3), tmp_path / "data")
    script = tmp_path / "reads.py"
    script.write_text(
        "import sys, pickle, forebay; cached = forebay.open_cache(sys.argv[1]);"
        "at = cached[1]['at']; assert 'cached' not in sys.modules; print(type(at).__name__, at)"
    )
    done = trainers.run(script, tmp_path / "data", cwd=tmp_path)
    assert done.out == "Point Point(x=1, y=0.5)\n", done.err
    assert type(forebay.open_cache(tmp_path / "data")[1]["at"]) is Point


def test_what_is_random_is_drawn_once_and_for_every_sample(tmp_path):
    """The same numbers for a sample wherever it is made, and not those of its neighbours."""
    one = make(Made(lambda i: torch.rand(3), 20), tmp_path / "one")
    two = forebay.cache(
        Made(lambda i: torch.rand(3), 20), tmp_path / "two", num_workers=0, shard_bytes=60
    )
    assert_same(list(one), list(two))
    assert len({tuple(sample.tolist()) for sample in one}) == 20


def test_the_generators_of_this_process_are_left_alone(tmp_path):
    """Here too, where the work is done in it."""
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    make(Made(lambda i: torch.rand(3), 5), tmp_path)
    assert torch.rand(1) == expected


class Opening(Pictures):
    """Opens a file with its first sample, and can be pickled only before."""

    file = None

    def __getitem__(self, index):
        self.file = self.file or contextlib.ExitStack()
        self.lock = self.lock if hasattr(self, "lock") else iter(())
        return super().__getitem__(index)


def test_the_first_samples_are_taken_from_a_copy(tmp_path):
    """So what they open is neither sent to workers nor part of what the dataset is."""
    dataset = Opening(3)
    with no_leaks():
        forebay.cache(dataset, tmp_path, backend="thread", num_workers=1, progress=False)
    assert vars(Opening(3)).keys() == {"count", "shift"}
    make(Opening(3), tmp_path)


class MuteError(Exception):
    """An exception that cannot be shown."""

    def __str__(self):
        raise LookupError("no message")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "num_workers"),
    [
        (MuteError(), 0),
        (SystemExit(), 0),
        (GeneratorExit("x"), 2),
        pytest.param(MuteError(), 2, marks=pytest.mark.thorough),
        pytest.param(SystemExit(), 2, marks=pytest.mark.thorough),
        pytest.param(GeneratorExit("x"), 0, marks=pytest.mark.thorough),
        pytest.param(MemoryError(), 0, marks=pytest.mark.thorough),
        pytest.param(MemoryError(), 2, marks=pytest.mark.thorough),
    ],
    ids=repr,
)
def test_an_odd_exception_names_its_samples(tmp_path, num_workers, error):
    """Without a message, or one that would end a process."""

    def fragile(index):
        if index in (3, 4):
            raise error
        return index

    with pytest.raises(forebay.FailuresError) as caught:
        forebay.cache(Made(fragile, 50), tmp_path, num_workers=num_workers, progress=False)
    text = str(caught.value)
    assert text.startswith("2 of 50 samples could not be cached: 3, 4\n")
    assert f"sample 3: {type(error).__name__}" in text


@pytest.mark.parametrize("error", [MuteError(), SystemExit()], ids=repr)
def test_an_odd_exception_in_every_sample_starts_nothing(tmp_path, error):
    """The samples that are looked at first raise in this process."""

    def fragile(index):
        raise error

    with pytest.raises(forebay.FailuresError, match="first samples that were tried all failed"):
        make(Made(fragile, 50), tmp_path)


def test_what_one_sees_of_a_cache_is_counted_in_samples(tmp_path, monkeypatch):
    """Progress, status and failures; not in shards."""
    shown = []
    update = Progress.update
    monkeypatch.setattr(
        Progress, "update", lambda self, *ended: (shown.append(ended), update(self, *ended))
    )
    bad = {3: ("bad 3",), 250: ()}

    def fragile(index):
        if index in bad:
            raise ValueError(*bad[index])
        return index

    with pytest.raises(forebay.FailuresError):
        make(Made(fragile, 301), tmp_path)
    assert sum(map(sum, shown)) == 301
    with read_run_state(tmp_path) as (snapshot, failures):
        assert (snapshot.counts, snapshot.unit) == (Counts(301, 295, 2), "sample")
        assert [str(one) for one in failures] == [
            "sample 3: ValueError: bad 3",
            "sample 250: ValueError",
        ]


@pytest.mark.slow
def test_failed_samples_of_a_cache_are_retried_from_the_shell(tmp_path):
    """`forebay retry` finishes what the same call would."""
    script = tmp_path / "data.py"
    script.write_text(
        "from pathlib import Path\n"
        "class Data:\n"
        "    def __len__(self): return 10\n"
        "    def __getitem__(self, index):\n"
        f"        if index == 3: Path({str(tmp_path / 'good')!r}).read_text()\n"
        "        return index\n"
        "data = Data()\n"
    )
    command = ["retry", tmp_path / "cache", f"{script}:data", "--num-workers", 0, "--quiet"]
    command = [str(word) for word in command]
    data = load_work(f"{script}:data")
    with pytest.raises(forebay.FailuresError, match="1 of 10 samples could not be cached: 3"):
        forebay.cache(data, tmp_path / "cache", num_workers=0, progress=False)
    (tmp_path / "good").touch()
    with pytest.raises(forebay.OptionError, match=r"retry .*/cache DATASET"):
        CliRunner().invoke(cli, command[:2], standalone_mode=False, catch_exceptions=False)
    done = CliRunner().invoke(cli, command, standalone_mode=False, catch_exceptions=False)
    assert (done.return_value, "10 samples in 10 shards" in done.output) == (0, True)
    assert list(forebay.open_cache(tmp_path / "cache")) == list(range(10))
