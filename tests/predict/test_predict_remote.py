"""Predictions in a bucket: the parts of a folder, on any machine, by any worker."""

from __future__ import annotations

import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from driving import published
from models import Factory, Half, Numbers, total

import forebay

MODELS = Path(__file__).with_name("models.py")
OUT = "memory://bucket/out"
SAMPLES, PART = 50, 10

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The parts of a run into a folder."""
    folder = tmp_path_factory.mktemp("folder")
    predicted(total, folder)
    return published(folder)


def predicted(model, output=OUT, *, data=None, **options):
    settings = {"batch_size": 3, "part_size": PART, "num_workers": 0, "progress": False}
    data = Numbers(SAMPLES) if data is None else data
    return forebay.predict(model, data, output, **settings | options)


def objects(memory):
    found = memory.find("/bucket/out/")
    return {name[12:]: memory.cat(name) for name in found if "/.forebay/" not in name}


@pytest.mark.parametrize(
    ("model", "workers"), [(total, 0), pytest.param(total, 2, marks=pytest.mark.slow), (Factory, 0)]
)
def test_a_bucket_gets_the_parts_of_a_folder(memory, parts, model, workers):
    """The same names and bytes, whoever loads; together they are one dataset."""
    report = predicted(model, num_workers=workers)
    assert (report.done, report.failed) == (SAMPLES, 0)
    assert objects(memory) == parts
    assert report.output == f"{OUT}/"
    table = pq.read_table("/bucket/out", filesystem=memory)
    assert table["index"].to_pylist() == list(range(SAMPLES))


def test_only_what_is_not_in_the_bucket_is_done(memory, parts):
    """Nothing, the second time; only a part that was removed is made again."""
    sizes = []

    def model(batch):
        sizes.append(len(batch))
        return total(batch)

    predicted(model)
    sizes.clear()
    assert predicted(model, version="1").resumed == SAMPLES
    assert not sizes
    memory.rm("/bucket/out/part-00002.parquet")
    assert predicted(model, version="1").resumed == SAMPLES - PART
    assert sum(sizes) == PART
    assert objects(memory) == parts


def test_another_machine_goes_on(memory, parts, machine):
    """It finds in the bucket what is done; of what was under way there is no part."""
    is_first = True

    def model(batch):
        nonlocal is_first
        if is_first and 34 * 4 in total(batch):
            is_first = False
            raise KeyboardInterrupt
        return total(batch)

    with pytest.raises(KeyboardInterrupt):
        predicted(model)
    assert len(objects(memory)) == 3
    machine("there")
    assert predicted(model, accept_changes=True).resumed == 3 * PART
    assert objects(memory) == parts


def test_models_in_workers_cannot_reach_this_process_memory(memory):
    """It is said before anything starts, and what to do instead."""
    with pytest.raises(forebay.OptionError) as caught:
        predicted(Factory, num_workers=2)
    assert "is in the memory of this process, but workers are other processes" in str(caught.value)
    assert "Use num_workers=0" in str(caught.value)
    assert not memory.store


def test_a_store_that_is_not_there_is_named():
    """No sample is loaded."""
    with pytest.raises(forebay.OutputError, match="nosuch://bucket cannot be reached"):
        predicted(total, "nosuch://bucket")


# ---- a bucket, with process workers -------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("model", "workers"), [("tired", 0), ("Tired", 2)])
def test_a_killed_run_into_a_bucket_is_finished(trainers, bucket, tmp_path, model, workers):
    """The driver is killed, or a worker with its model: the objects are the parts of a folder."""
    predicted(Half(), tmp_path / "out")
    parts = published(tmp_path / "out")

    def run():
        ending = trainers.start(
            f"sys.path.insert(0, {str(MODELS.parent)!r}); import models\n"
            f"report = forebay.predict(models.{model}, models.numbers, "
            f"'s3://{bucket.name}/out', batch_size=3, num_workers={workers}, part_size={PART}, "
            "progress=False)\n"
            "print(report.done, report.resumed)",
            tmp_path,
            TIRED_SEEN="/dev/null",
            TIRED_MARK=str(tmp_path / "mark"),
            TIRED_AT="34",
        ).end()
        trainers.await_none_left()
        return ending

    code, out, err = run()
    if workers == 0:
        assert code == -signal.SIGKILL, err
        assert bucket.outputs() == dict(sorted(parts.items())[:3])
        code, out, err = run()
    assert code == 0, err
    assert out.split() == ["50", "0" if workers else "30"]
    assert (tmp_path / "mark").exists()
    assert bucket.outputs() == parts
