"""SIGKILL half way, and the same command again: the same parts, less than one done twice."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from driving import staged
from models import Numbers, Tired, numbers, some_bad

import forebay
from forebay.base.file_stores import folder_at
from forebay.ledger.ledger import Ledger
from forebay.predicting import checkpoints

MODELS = Path(__file__).with_name("models.py")
# Of 50 samples in parts of 10, in batches of 3.
PART = 10


def published(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("part-*"))}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The parts of a run that was not killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIRED_SEEN", "/dev/null")
        forebay.predict(
            Tired(), numbers, folder, batch_size=3, num_workers=0, part_size=PART, progress=False
        )
    return published(folder)


@pytest.fixture
def run(trainers, tmp_path):
    """Predicts in a process of its own, into `out`; what the models saw is in `seen`."""
    output = tmp_path / "out"

    def run(model, workers, part_size=PART, every_s=5.0):
        ending = trainers.start(
            f"sys.path.insert(0, {str(MODELS.parent)!r}); import models\n"
            "from forebay.predicting import checkpoints\n"
            f"checkpoints.EVERY_S = {every_s}; checkpoints.REST = 0\n"
            "os.environ['TIRED_DRIVER'] = str(os.getpid())\n"
            f"report = forebay.predict(models.{model}, models.numbers, {str(output)!r}, "
            f"batch_size=3, num_workers={workers}, part_size={part_size}, "
            "progress=False)\n"
            "print(report.done, report.resumed)",
            tmp_path,
            TIRED_OUTPUT=str(output),
            TIRED_SEEN=str(tmp_path / "seen"),
            TIRED_MARK=str(tmp_path / "mark"),
            TIRED_AT="34",
        ).end()
        trainers.await_none_left()
        return ending

    return run


def repeated(folder):
    """Return how many samples the models saw twice; each they saw once."""
    asked = [int(line) for line in (folder / "seen").read_text().split()]
    assert set(asked) == set(range(50))
    return len(asked) - 50


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "model"), [(0, "tired"), (2, "tired"), (2, "Tired")])
def test_a_killed_run_is_finished(run, tmp_path, undisturbed, workers, model):
    """The parts are those of a run that was not killed, byte for byte; less than one is redone."""
    output = tmp_path / "out"
    code, out, err = run(model, workers)
    resumed = 0
    if (
        model == "tired"
    ):  # the model is in the driver; a factory's is in a worker, which is replaced
        assert code == -signal.SIGKILL
        resumed = 3 * PART
        assert len(published(output)) <= 3
        code, out, err = run(model, workers)
    assert code == 0, err
    assert out.split() == ["50", str(resumed)]
    assert repeated(tmp_path) < PART
    assert published(output) == undisturbed
    assert pq.read_table(output)["index"].to_pylist() == list(range(50))


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "model"), [(0, "tired"), (1, "Lethal")])
def test_a_part_of_a_killed_run_goes_on_behind_its_last_batch(run, tmp_path, workers, model):
    """Whether the model is in the driver or in a worker: the batch that was killed comes next."""
    code, _, err = run(model, workers, 50, every_s=0)
    assert code == -signal.SIGKILL, err
    code, out, err = run(model, workers, 50, every_s=0)
    assert code == 0, err
    assert out.split()[0] == "50"
    assert (tmp_path / "seen").read_text().split() == [str(one) for one in range(50)]
    assert pq.read_table(tmp_path / "out")["index"].to_pylist() == list(range(50))


@pytest.mark.slow
def test_a_killed_driver_takes_its_workers_models_along(run, tmp_path, undisturbed):
    """Even one that hangs; less than a part is redone for each worker, and nothing stays behind."""
    output = tmp_path / "out"
    code, _, err = run("Deadly", 2)
    assert code == -signal.SIGKILL, err
    done = published(output)
    assert done.items() <= undisturbed.items()
    assert "part-00003.parquet" not in done
    with Ledger.open(output / ".forebay") as ledger:  # the last one may not be in its place yet
        recorded = ledger.counts().done
    assert len(done) <= recorded <= 4
    code, out, err = run("Deadly", 2)
    assert code == 0, err
    assert out.split() == ["50", str(recorded * PART)]
    assert repeated(tmp_path) < 2 * PART
    assert published(output) == undisturbed
    assert not staged(output)


# ---- checkpoints ---------------------------------------------------------------------------------


class Stopped(Numbers):
    """Stops the run at sample 34, as Ctrl-C does, once."""

    def __init__(self, count=50, bad=()):
        super().__init__(count, bad)
        self.seen = []

    def __call__(self, batch):
        if 34 in self.seen or not (batch[:, 0] == 34).any():
            self.seen += batch[:, 0].int().tolist()
            return {"sum": batch.sum(1), "name": np.array([f"{one:.1f}" for one in batch[:, 0]])}
        self.seen.append(34)
        raise KeyboardInterrupt


def predict(model, output, data=numbers, **options):
    """Predict in this process, in one part, with a checkpoint after every batch."""
    options = {"batch_size": 3, "num_workers": 0, "progress": False, "version": "1"} | options
    return forebay.predict(model, data, output, **options)


@pytest.fixture
def at_once(monkeypatch):
    """A checkpoint is due after every batch."""
    monkeypatch.setattr(checkpoints, "EVERY_S", 0.0)
    monkeypatch.setattr(checkpoints, "REST", 0)


def interrupted(output, data=numbers, **options):
    """Return a model that stopped a run at sample 34."""
    model = Stopped()
    with pytest.raises(KeyboardInterrupt):
        predict(model, output, data, **options)
    model.seen.clear()
    model.seen.append(34)
    return model


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("place", ["{}/out", "memory://checkpoints-{}"])
def test_a_part_that_was_stopped_goes_on_behind_its_last_batch(tmp_path, place):
    """Its samples are not predicted again, its bytes are the same, and nothing is left behind."""
    output = place.format(tmp_path if "out" in place else tmp_path.name)
    model = interrupted(output, some_bad)
    report = predict(model, output, some_bad)
    assert model.seen == [34, *range(33, 50)]
    assert (report.done, report.failed, report.resumed) == (49, 1, 33)
    assert [each.index for each in report.failures] == [7]
    predict(Stopped.__call__.__get__(model), tmp_path / "whole", some_bad)
    whole = (tmp_path / "whole" / "part-00000.parquet").read_bytes()
    assert folder_at(output).read("part-00000.parquet") == whole
    assert not folder_at(f"{output}/.forebay/checkpoints").files()


@pytest.mark.usefixtures("at_once")
def test_a_stop_within_a_batch_with_failing_samples_leaves_whole_batches(tmp_path):
    """What the model returns may depend on the batch, so no other batches follow."""
    stops = [True]

    def model(batch):
        numbers_of = batch[:, 0].tolist()
        if 30 in numbers_of:
            raise ValueError("a sample that the model refuses")
        if 34 in numbers_of and len(numbers_of) < 5 and stops:  # the batch was halved
            stops.clear()
            raise KeyboardInterrupt
        return batch.sum(1) + 1000 * batch.sum()

    with pytest.raises(KeyboardInterrupt):
        predict(model, tmp_path / "out", batch_size=5)
    report = predict(model, tmp_path / "out", batch_size=5)
    assert (report.done, report.failed, report.resumed) == (49, 1, 30)
    predict(model, tmp_path / "whole", batch_size=5)
    assert published(tmp_path / "out") == published(tmp_path / "whole")


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("is_finished", [True, False])
def test_what_a_kill_left_of_a_checkpoint_is_removed(tmp_path, is_finished):
    """Also by the same call after the last part was made: a file may have many megabytes."""
    folder = tmp_path / "out" / ".forebay" / "checkpoints"
    model = interrupted(tmp_path / "out")
    if is_finished:
        predict(model, tmp_path / "out")
        folder.mkdir(exist_ok=True)
    (folder / ".0123-0-3.tmp").write_bytes(bytes(100))
    (folder / "0123-3-6").write_bytes(bytes(100))
    predict(model, tmp_path / "out")
    assert [*folder.iterdir()] == []


@pytest.mark.usefixtures("at_once")
def test_checkpoints_of_other_work_do_not_count(tmp_path):
    """With redo="*", or another model, every sample is predicted again."""
    output = tmp_path / "out"
    for options in ({"redo": "*"}, {"version": "2"}):
        model = interrupted(output)
        predict(model, output, **options)
        assert model.seen == [34, *range(50)]
        shutil.rmtree(output)


@pytest.mark.usefixtures("at_once")
def test_failed_parts_leave_out_the_checkpoints_in_which_a_sample_failed(tmp_path):
    """The part goes on before the first of them."""
    output, data = tmp_path / "out", Numbers(50, bad=(7,))
    model = interrupted(output, data)
    data.bad = ()
    report = predict(model, output, data, redo="failed")
    assert model.seen == [34, *range(6, 50)]
    assert (report.done, report.failed, report.resumed) == (50, 0, 6)


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("damage", [b"", b"{}\n", b"\xff", None])
def test_damaged_checkpoints_are_made_again(tmp_path, damage):
    """Their samples are predicted again, and so are those that follow."""
    output = tmp_path / "out"
    model = interrupted(output)
    (second,) = (output / ".forebay" / "checkpoints").glob("*-3-6")
    second.write_bytes(second.read_bytes()[:-1] if damage is None else damage)
    assert predict(model, output).resumed == 3
    assert model.seen == [34, *range(3, 50)]


def test_rows_that_come_faster_than_they_can_be_written_wait_for_the_part(tmp_path, monkeypatch):
    """Memory stays bounded: a part whose rows are too large for checkpoints has no more of them."""
    monkeypatch.setattr(checkpoints, "MOST_HELD_BYTES", 100)
    monkeypatch.setattr(checkpoints, "REST", 1 << 40)
    model = interrupted(tmp_path / "out")
    assert len([*(tmp_path / "out" / ".forebay" / "checkpoints").iterdir()]) == 1
    assert predict(model, tmp_path / "out").done == 50
