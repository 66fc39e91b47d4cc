"""predict and cache on a cluster of two nodes: the rows and the files of a local run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from driving import published
from same import assert_same

import forebay

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

SAMPLES, PART = 70, 10


class Drawn:
    """Sample k is drawn at random, with its number, a name, and whether it was drawn on a node."""

    def __init__(self, bad=(), deadly=()):
        self.bad, self.deadly = tuple(bad), tuple(deadly)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"no sample {index}")
        if index in self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        is_far = "RAY_RAYLET_PID" in os.environ
        return {"x": torch.rand(4), "number": index, "name": f"no. {index}", "is_far": is_far}


class Sums:
    """A model that may be made once a process, and leaves a file there for it."""

    def __init__(self, folder):
        node = os.environ.get("RAY_RAYLET_PID", "here")
        Path(folder, f"{node} {os.getpid()}").touch(exist_ok=False)

    def __call__(self, batch):
        return {"total": batch["x"].sum(1), "number": batch["number"]}


def total(batch):
    return batch["x"].sum(1)


def maker_of(folder):
    """Return what makes a model, and remembers in a folder where it did."""
    made = folder / "made"
    made.mkdir()
    path = str(made)
    return made, lambda: Sums(path)


def predicted(model, data, output, **options):
    """Predict quietly on the cluster, unless the options say otherwise."""
    settings = {"batch_size": 3, "part_size": PART, "backend": "ray", "progress": False}
    return forebay.predict(model, data, output, **settings | options)


def rows(output):
    return pq.read_table(output).to_pylist()


class Lengths(torch.nn.Module):
    """A model that is made on the nodes."""

    def forward(self, batch):
        return batch[:, 0]


def length_of(path):
    """Make a sample of a file."""
    text = path.read_text()
    if text == "?":
        raise ValueError("it was read again")
    return torch.tensor([float(len(text)), 0.0])


@pytest.mark.parametrize("verb", ["cache", "predict"])
def test_what_was_made_of_named_samples_is_taken_over_on_a_cluster(tmp_path, verb):
    """A file that comes first, and one that is gone, have none of the others read again."""
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for k in range(20):
        (source / f"{k:02}").write_text("x" * k)

    def run():
        dataset = forebay.from_folder(source, length_of)
        if verb == "cache":
            made = forebay.cache(dataset, out, backend="ray", progress=False)
            return [int(each[0]) for each in made]
        predicted(Lengths, dataset, out)
        return pq.read_table(out)["prediction"].to_pylist()

    assert run() == list(range(20))
    for path in source.iterdir():  # the same size and time
        status = path.stat()
        if path.name == "01":
            path.write_text("?")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    (source / "!").write_text("x" * 100)
    (source / "07").unlink()
    assert run() == [100, *range(7), *range(8, 20)]


# ---- predict ------------------------------------------------------------------------------------


def test_predictions_of_a_cluster_are_those_of_a_local_run(tmp_path):
    """Part by part and byte for byte; the model is made on the nodes, once a worker."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _, make = maker_of(tmp_path / "a")
    predicted(make, Drawn(), tmp_path / "local", backend="process", num_workers=0)
    made, make = maker_of(tmp_path / "b")
    report = predicted(make, Drawn(), tmp_path / "out")
    assert (report.done, report.failed, report.resumed) == (SAMPLES, 0, 0)
    assert published(tmp_path / "out") == published(tmp_path / "local")
    assert [row["index"] for row in rows(tmp_path / "out")] == list(range(SAMPLES))
    names = [path.name for path in made.iterdir()]
    assert 1 <= len(names) <= 2
    assert not [name for name in names if name.startswith("here")]


def loader_of(**options):
    return forebay.DataLoader(Drawn(), batch_size=3, num_workers=2, **options)


FED = {
    "workers": (Drawn, {"num_workers": 2}),
    "a loader of the cluster": (lambda: loader_of(backend="ray"), {"backend": "process"}),
    "a loader of processes": (loader_of, {}),
}


@pytest.mark.parametrize(("data", "options"), FED.values(), ids=FED)
def test_a_model_here_is_fed_by_the_cluster(tmp_path, data, options):
    """Samples are drawn on the nodes, by a loader's backend or by predict's, and come in order."""
    here = []

    def model(batch):
        here.append(os.getpid())
        return {"total": total(batch), "is_far": batch["is_far"]}

    report = predicted(model, data(), tmp_path / "out", **options)
    predicted(total, Drawn(), tmp_path / "local", backend="process", num_workers=0)
    assert report.done == SAMPLES
    assert len(here) == SAMPLES // PART * 4
    found = rows(tmp_path / "out")
    assert all(row["is_far"] for row in found)
    assert [(row["index"], row["total"]) for row in found] == [
        (row["index"], row["prediction"]) for row in rows(tmp_path / "local")
    ]


def test_a_loader_of_the_cluster_says_where_models_are_made(tmp_path):
    """A factory goes where the loader's workers are."""
    made, make = maker_of(tmp_path)
    report = predicted(make, loader_of(backend="ray"), tmp_path / "out", backend="process")
    assert report.done == SAMPLES
    assert not list(made.glob("here*"))


def test_a_table_is_predicted_on_a_cluster(tmp_path):
    """Its columns stand beside the predictions, wherever its rows were loaded."""
    table = tmp_path / "rows.csv"
    table.write_text("x\n" + "".join(f"{number}\n" for number in range(25)))
    for number, (model, options) in enumerate(
        [(lambda: lambda batch: 2 * batch, {}), (lambda batch: 2 * batch, {"num_workers": 1})]
    ):
        predicted(model, table, tmp_path / f"out{number}", load=lambda row: row["x"], **options)
        assert rows(tmp_path / f"out{number}") == [
            {"index": at, "x": at, "prediction": 2 * at} for at in range(25)
        ]


def test_bad_samples_are_found_on_a_cluster_too(tmp_path):
    """Those that raise, in both ways to predict; with a model here, those that kill as well."""
    _, make = maker_of(tmp_path)
    for number, (model, options, lost) in enumerate(
        [(make, {}, [7, 33]), (total, {"num_workers": 2}, [7, 33, 41])]
    ):
        data = Drawn(bad=(7, 33), deadly=lost[2:])
        report = predicted(model, data, tmp_path / f"out{number}", **options)
        assert [failure.index for failure in report.failures] == lost
        assert report.failures[0].message == "no sample 7"
        kept = [index for index in range(SAMPLES) if index not in lost]
        assert [row["index"] for row in rows(tmp_path / f"out{number}")] == kept


def interrupted_at(index, mark):
    """Return what makes a model that ends the run at a sample, once."""
    path = str(mark)

    def make():
        def model(batch):
            if index in batch["number"] and not os.path.exists(path):
                Path(path).touch()
                raise KeyboardInterrupt
            return batch["x"].sum(1)

        return model

    return make


def test_predictions_begun_here_are_finished_on_a_cluster(tmp_path):
    """What was done stays; the parts are those of an undisturbed run."""
    make = interrupted_at(34, tmp_path / "mark")
    with pytest.raises(KeyboardInterrupt):
        predicted(make, Drawn(), tmp_path / "out", backend="process", num_workers=0)
    assert len(published(tmp_path / "out")) == 3
    report = predicted(make, Drawn(), tmp_path / "out")
    assert (report.done, report.resumed) == (SAMPLES, 3 * PART)
    predicted(total, Drawn(), tmp_path / "local", backend="process", num_workers=0)
    assert published(tmp_path / "out") == published(tmp_path / "local")


# ---- cache --------------------------------------------------------------------------------------


class Waves(Drawn):
    """Waves of various lengths, drawn at random; one ends the run, once, if there is a mark."""

    def __init__(self, mark=None, **ends):
        super().__init__(**ends)
        self.mark = None if mark is None else str(mark)

    def __getitem__(self, index):
        if index == 50 and self.mark is not None and not os.path.exists(self.mark):
            Path(self.mark).touch()
            raise KeyboardInterrupt
        del super().__getitem__(index)["is_far"]
        return torch.rand(1 + index % 5), index, f"no. {index}"


def cached(dataset, folder, **options):
    settings = {"backend": "ray", "progress": False, "shard_bytes": 200}
    return forebay.cache(dataset, folder, **settings | options)


def test_a_cache_made_on_a_cluster_is_that_of_a_local_run(tmp_path):
    """The same files, byte for byte, and the same samples."""
    here = cached(Waves(), tmp_path / "local", backend="process", num_workers=0)
    there = cached(Waves(), tmp_path / "out")
    assert published(tmp_path / "out") == published(tmp_path / "local")
    assert len(published(tmp_path / "out")) > 5
    assert_same(
        [there[index] for index in range(SAMPLES)], [here[index] for index in range(SAMPLES)]
    )


def test_a_cache_begun_here_is_finished_on_a_cluster(tmp_path):
    """What was done is not done again; the files are those of an undisturbed run."""
    dataset = Waves(tmp_path / "mark")
    with pytest.raises(KeyboardInterrupt):
        cached(dataset, tmp_path / "out", backend="process", num_workers=0)
    done = {path: path.stat().st_ino for path in (tmp_path / "out").glob("*.arrow")}
    assert done
    whole = cached(dataset, tmp_path / "out")
    cached(Waves(), tmp_path / "local", backend="process", num_workers=0)
    assert published(tmp_path / "out") == published(tmp_path / "local")
    assert done == {path: path.stat().st_ino for path in done}
    assert len(whole) == SAMPLES


def test_samples_that_cannot_be_cached_on_a_cluster_are_named(tmp_path):
    """One that raises, and one that takes its worker along."""
    with pytest.raises(forebay.FailuresError) as caught:
        cached(Waves(bad=[7], deadly=[60]), tmp_path / "out", retries=0)
    assert "2 of 70 samples could not be cached: 7, 60" in str(caught.value)
    assert "sample 7: ValueError: no sample 7" in str(caught.value)
