"""`resume-check`: what it says of training scripts that resume exactly, and of others."""

from __future__ import annotations

import importlib
import sys
import textwrap

import pytest

from resume_check import OptionError, recording, scripts
from resume_check.command import main
from resume_check.comparison import LoaderRun, ReceivedBatch
from resume_check.recording import TrainingStep
from resume_check.scripts import FOLDER, check_script, judged

BEGINNING = """
import pathlib, sys
import torch

torch.manual_seed(0)
checkpoint = pathlib.Path(sys.argv[1]) / "last.pt"
model, epoch, step = torch.nn.Linear(1, 1), 0, 0
optimizer = torch.optim.SGD(model.parameters(), 1e-4)
data = torch.arange(12.0)[:, None]


def train(batch):
    loss = torch.nn.MSELoss()(model(batch), batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def save(**position):
    torch.save({"model": model.state_dict(), **position}, checkpoint.with_suffix(".new"))
    checkpoint.with_suffix(".new").replace(checkpoint)


def load():
    if not checkpoint.exists():
        return {}
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    return saved
"""
# A checkpoint after every second step.
EXACT = """
saved = load()
for number in range(saved.get("next", 0), 8):
    train(data[number % 4 * 3 :][:3])
    if number % 2:
        save(next=number + 1)
"""
# The epoch begins again.
TORCHS = """
saved = load()
for epoch in range(saved.get("epoch", 0), 2):
    torch.manual_seed(epoch)
    for step, batch in enumerate(torch.utils.data.DataLoader(data, 3, shuffle=True)):
        train(batch)
        save(epoch=epoch)
"""
# The position that is saved is one batch ahead of the model.
AHEAD = """
for first in range(load().get("next", 0), 12, 2):
    train(data[first : first + 2])
    save(next=first + 4)
"""
FORGETS = """
for first in range(0, 12, 3):
    train(data[first : first + 3])
"""
UNSEEDED = """
torch.seed()
for _ in range(4):
    train(torch.rand(2, 1))
    save()
"""
# Its optimizer has a momentum, which is not saved.
WITHOUT_OPTIMIZER = """
optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
for first in range(load().get("next", 0), 12, 3):
    train(data[first : first + 3])
    save(next=first + 3)
"""


def written(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text(BEGINNING + textwrap.dedent(text))
    return str(path)


def forked(log, arguments, connection):
    """Run the script in the forked process, which has imported torch."""
    sys.stderr = log.open("w")
    sys.argv = ["", str(connection.fileno()), *arguments]
    recording.run_script()


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Check a script, without a new interpreter for each of its runs."""
    importlib.import_module("torch._dynamo")  # which an optimizer imports: once for all of them
    monkeypatch.setattr(scripts, "_begin_script", forked)

    def check(text, *kills, arguments=(FOLDER,)):
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        return check_script(written(tmp_path, text), arguments, scratch, kills=kills, timeout=300)

    return check


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "kills", "is_exact", "said"),
    [
        pytest.param(
            EXACT,
            (3,),
            True,
            "killed after 3 steps: continued after 2 steps (1 step again, from an older "
            "checkpoint), with the batches that were left",
            id="exact",
        ),
        pytest.param(
            AHEAD,
            (2,),
            False,
            "killed after 2 steps: continued after 2 steps: step 2 is the one that came as step 3; "
            "1 batch lost; 3 batches came instead of 4",
            id="ahead",
        ),
        pytest.param(
            TORCHS,
            (3,),
            False,
            "killed after 3 steps: continued after 3 steps: step 3 is the one that came as step 0; "
            "3 batches repeated; 8 batches came instead of 5",
            id="the epoch again",
        ),
        pytest.param(
            FORGETS,
            (2,),
            False,
            "killed after 2 steps: began anew, with the batches that were left\n"
            "It continued from no checkpoint, so that nothing was shown: kill it later",
            id="restores nothing",
        ),
        pytest.param(
            UNSEEDED,
            (2,),
            False,
            "4 steps; two runs without interruption differ, so nothing can be said: step 0",
            id="unseeded",
        ),
        pytest.param(
            WITHOUT_OPTIMIZER,
            (2,),
            True,
            "with the batches that were left; from step 3 on its weights are others: an optimizer, "
            "a scheduler or a random generator is not restored",
            id="without the optimizer",
        ),
        pytest.param(
            "raise ValueError('no data')",
            (),
            False,
            "0 steps; uninterrupted, its process ended with exit code 1 after 0 batches (ValueError"
            ": no data)",
            id="raises",
        ),
        pytest.param("", (), False, "Nothing was killed: it needs at least two", id="no steps"),
    ],
)
def test_what_a_script_is_trained_on_after_a_kill_is_compared(text, kills, is_exact, said, checked):
    """Its weights say where its checkpoint was taken: batches since then may come again, only."""
    check = checked(text, *kills)
    assert bool(check) == is_exact
    assert said in str(check)


@pytest.mark.full
def test_the_command_runs_a_script_with_its_interpreter(tmp_path, capsys):
    """As `python train.py` does; exit code 3 says that it differs."""
    assert main(["--after", "3", written(tmp_path, TORCHS), FOLDER]) == 3
    assert capsys.readouterr().out == (
        "8 steps without interruption:\n"
        "  killed after 3 steps: continued after 3 steps: step 3 is the one that came as step 0; "
        "3 batches repeated; 8 batches came instead of 5\n"
    )


def test_the_command_says_what_is_impossible(tmp_path, capsys):
    """In words, and with exit code 2."""
    assert main([written(tmp_path, ""), "checkpoints"]) == 2
    assert "has {folder}, the folder of its checkpoints" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "none.py"), FOLDER])


def test_a_script_needs_a_folder_for_each_of_its_runs(tmp_path):
    """Without one, each run would go on where the one before it was."""
    with pytest.raises(OptionError, match=r"no argument of .* has \{folder\}"):
        check_script(written(tmp_path, ""), ["checkpoints"], tmp_path, kills=(), timeout=1)


# ---- the verdict, of steps without a process -----------------------------------------------------


def steps(*each):
    """Return steps; each is its batch, weights and updates."""
    return [
        TrainingStep(ReceivedBatch(None, number, str(batch)), 0, str(weights), updates)
        for number, (batch, weights, updates) in enumerate(each)
    ]


# Two batches for each update.
ACCUMULATED = steps((0, "a", 0), (1, "a", 0), (2, "b", 1), (3, "b", 1), (4, "c", 2), (5, "c", 2))
# The first update has a learning rate of 0.
WARMED_UP = steps((0, "a", 0), (1, "a", 1), (2, "b", 2), (3, "c", 3))
CONSTANT = steps((0, "a", 0), (1, "a", 0), (2, "a", 0))


@pytest.mark.parametrize(
    ("whole", "killed_after", "again", "continued", "what"),
    [
        (ACCUMULATED, 3, ACCUMULATED[2:], 2, ""),
        (ACCUMULATED, 3, ACCUMULATED[3:], 3, "nobody can say"),
        (ACCUMULATED, 4, [ACCUMULATED[2], *ACCUMULATED[4:]], 2, "1 batch lost"),
        (WARMED_UP, 2, WARMED_UP[1:], 1, ""),
        (WARMED_UP, 1, WARMED_UP, 0, ""),
        (CONSTANT, 2, CONSTANT[1:], 1, "nobody can say"),
        (CONSTANT, 2, steps((1, "other", 0)), None, "does not restore the model"),
        (CONSTANT, 2, [], None, "ended without a step"),
    ],
)
def test_the_weights_say_after_which_step_it_continues(whole, killed_after, again, continued, what):
    """Where several steps have equal weights, the one right after an update, or nobody can say."""
    found = judged(whole, whole[: killed_after + 1], LoaderRun(list(again)))
    assert found.continued == continued
    assert what in found.what
    assert bool(what) == bool(found.what)
