"""SIGKILL half way, and the same command again: the same parts, less than one done twice."""

from __future__ import annotations

import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from driving import staged
from models import Tired, numbers

import forebay

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

    def run(model, workers):
        ending = trainers.start(
            f"sys.path.insert(0, {str(MODELS.parent)!r}); import models\n"
            "os.environ['TIRED_DRIVER'] = str(os.getpid())\n"
            f"report = forebay.predict(models.{model}, models.numbers, {str(output)!r}, "
            f"batch_size=3, num_workers={workers}, part_size={PART}, progress=False)\n"
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
def test_a_killed_driver_takes_its_workers_models_along(run, tmp_path, undisturbed):
    """Even one that hangs; less than a part is redone for each worker, and nothing stays behind."""
    output = tmp_path / "out"
    code, _, err = run("Deadly", 2)
    assert code == -signal.SIGKILL, err
    done = published(output)
    assert done.items() <= undisturbed.items()
    assert "part-00003.parquet" not in done
    code, out, err = run("Deadly", 2)
    assert code == 0, err
    assert out.split() == ["50", str(len(done) * PART)]
    assert repeated(tmp_path) < 2 * PART
    assert published(output) == undisturbed
    assert not staged(output)
