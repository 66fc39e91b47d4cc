"""The how-to about training libraries is true: each script trains, and resumes where it was.

Skipped for each library that is not installed: `pip install -e '.[frameworks]'` installs all.

A script prints its last loss with all digits. It depends on every batch and on their order, so a
run that was interrupted must print what the uninterrupted one prints.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from documents import blocks

pytestmark = pytest.mark.full

HOW_TO = Path(__file__).parents[1] / "docs" / "how-to" / "frameworks.md"
# What must be installed to run the script of each section; Ray Train needs the last with ray.
NEEDS = {
    "Lightning": ("lightning",),
    "Accelerate": ("accelerate",),
    "transformers": ("transformers", "accelerate"),
    "transformers, packed": ("transformers", "accelerate"),
    "torchtitan": ("torchtitan", "torchdata", "tyro"),
    "Ray Train": ("ray", "tensorboardX"),
}
LOSS = re.compile(r"^loss (\S+)$", re.MULTILINE)
SINGLE_RANK = ("devices=2", "devices=1"), ('strategy="ddp"', 'strategy="auto"')


def scripts() -> dict[str, str]:
    """Return the script of each section: the blocks before the first section, then its own."""
    text = HOW_TO.read_text(encoding="utf-8")
    headings = [
        (number, line.removeprefix("## "))
        for number, line in enumerate(text.splitlines())
        if line.startswith("## ")
    ]
    shared: list[str] = []
    found: dict[str, list[str]] = {}
    for block in blocks(text):
        if block.language == "python" and block.excuse is None:
            names = [name for number, name in headings if number < block.start]
            (found.setdefault(names[-1], ["", ""]) if names else shared).extend(block.lines)
    return {name: "\n".join([*shared, *lines]) + "\n" for name, lines in found.items()}


def train(folder: Path, name: str, *changes: tuple[str, str], ranks: int = 0) -> str:
    """Run a script in a folder, changed, by itself or by torchrun, and return what it printed."""
    missing = [each for each in NEEDS[name] if find_spec(each) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    code = scripts()[name]
    for old, new in changes:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(code, encoding="utf-8")
    launcher = []
    if ranks:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    # Buffered, each rank writes its lines at its end, so that those of two ranks do not mix.
    buffered = {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **buffered},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def loss(printed: str) -> str:
    """Return the loss that all ranks printed."""
    found = set(LOSS.findall(printed))
    assert len(found) >= 1, printed
    return max(found)


def test_every_section_has_a_script_and_says_what_it_needs():
    """No section is left out of the tests below, and each script is Python."""
    found = scripts()
    assert list(found) == list(NEEDS)
    for name, code in found.items():
        compile(code, name, "exec")


# ---- Lightning ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_lightning_resumes_in_the_middle_of_an_epoch(tmp_path):
    """On two ranks, a run from the last checkpoint ends with the loss of the whole run."""
    whole = train(tmp_path, "Lightning")
    assert (tmp_path / "checkpoints" / "epoch=1-step=20.ckpt").exists()
    assert loss(train(tmp_path, "Lightning")) == loss(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "every",
    [
        pytest.param("save_top_k=1", id="default"),
        pytest.param(
            "every_n_train_steps=12",
            id="at the last step",
            marks=pytest.mark.xfail(
                reason="set_epoch after iter() has no effect, and the state names the old epoch"
            ),
        ),
    ],
)
def test_lightning_resumes_at_the_end_of_an_epoch(every, tmp_path):
    """A second epoch after a resume has the order that it has without one."""
    saves = ("every_n_train_steps=5", every)
    train(tmp_path, "Lightning", *SINGLE_RANK, saves, ("max_epochs=2", "max_epochs=1"))
    again = train(tmp_path, "Lightning", *SINGLE_RANK, saves)
    whole = train(tmp_path / "whole", "Lightning", *SINGLE_RANK, saves)
    assert loss(again) == loss(whole)


@pytest.mark.slow
def test_lightning_makes_the_loader_again_with_its_arguments(tmp_path):
    """Without `world_size` its sampler takes the place of the loader's, and the rest is kept."""
    show = (
        'print("loss"',
        "print(type(trainer.train_dataloader), trainer.train_dataloader, "
        'trainer.train_dataloader.sampler)\nprint("loss"',
    )
    changes = [
        ("use_distributed_sampler=False", "use_distributed_sampler=True"),
        ('        world_size="auto",\n', ""),
        (
            "        loader.sampler.set_epoch("
            "self.trainer.fit_loop.epoch_progress.current.processed)\n",
            "",
        ),
        show,
    ]
    printed = train(tmp_path, "Lightning", *changes)
    shown = re.findall(r"<class 'forebay.loader.DataLoader'> .* <.*DistributedSampler", printed)
    assert len(shown) == 2
    assert all("seed=0" in line and "buffer=" in line for line in shown)


@pytest.mark.slow
def test_lightnings_sampler_and_world_size_exclude_each_other(tmp_path):
    """The error names the argument of Trainer that has to change."""
    with pytest.raises(AssertionError, match=r"OptionError[^$]*use_distributed_sampler=False"):
        train(tmp_path, "Lightning", ("    use_distributed_sampler=False,\n", ""))


# ---- Accelerate ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_accelerate_resumes_in_the_middle_of_an_epoch(ranks, tmp_path):
    """The state travels with `save_state` and `load_state`, alone and on two ranks."""
    whole = train(tmp_path, "Accelerate", ranks=ranks)
    assert loss(train(tmp_path, "Accelerate", ranks=ranks)) == loss(whole)


@pytest.mark.slow
def test_accelerates_prepare_makes_a_stock_loader_and_forebay_warns(tmp_path):
    """The one warning says what is lost and where to read on."""
    change = (
        "accelerator.register_for_checkpointing(loader)",
        "prepared = accelerator.prepare(loader)\n"
        "print(type(prepared), len(list(prepared)), len(list(prepared)))",
    )
    saves = ('accelerator.save_state("checkpoint")', "pass")
    printed = train(tmp_path, "Accelerate", change, saves)
    assert "<class 'accelerate.data_loader.DataLoaderShard'> 12 12" in printed
    assert printed.count("docs/how-to/frameworks.md") == 1


ACCUMULATE = """
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=5)
steps = []
for number in range(2):
    for batch in make_loader(accelerator.num_processes):
        with accelerator.accumulate(model):
            steps.append(accelerator.sync_gradients)
            loss = nn.functional.mse_loss(model(batch["x"]), batch["labels"])
            accelerator.backward(loss)
print("steps at", [at for at, is_step in enumerate(steps) if is_step])

uneven = torch.utils.data.Subset(Doubles(), range(21))
gathered = counted = 0
loader = DataLoader(uneven, batch_size=4, seed=0, world_size="auto")
for batch in loader:
    values = accelerator.gather_for_metrics(batch["x"])
    gathered += len(values)
    counted += len(accelerator.gather(batch["x"])[accelerator.gather(loader.mask)])
print("gathered", gathered, "counted", counted)
"""


@pytest.mark.slow
def test_what_accelerate_does_not_know_of_the_loader(tmp_path):
    """A group of batches goes on in the next epoch; the mask finds the repeated samples."""
    end = 'accelerator.print("loss", loss.item())\n'
    printed = train(tmp_path, "Accelerate", (end, end + ACCUMULATE), ranks=2)
    assert printed.count("steps at [4, 9, 14, 19]") == 2
    assert printed.count("gathered 22 counted 21") == 2


# ---- transformers -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("step", [5, 15])
def test_transformers_resumes_in_the_middle_of_an_epoch(ranks, step, tmp_path):
    """A run from a checkpoint of either epoch ends with the loss of the whole run."""
    whole = train(tmp_path, "transformers", ranks=ranks)
    for folder in (tmp_path / "checkpoints").glob("checkpoint-*"):
        if int(folder.name.partition("-")[2]) > step:
            shutil.rmtree(folder)
    again = train(tmp_path, "transformers", ranks=ranks)
    assert loss(again) == loss(whole)
    assert "plain torch DataLoader" not in again


@pytest.mark.slow
def test_transformers_makes_a_stock_loader_to_skip_batches(tmp_path):
    """Without `ignore_data_skip` a resumed run warns, and has another order."""
    whole = train(tmp_path, "transformers")
    for number in (20, 24):
        shutil.rmtree(tmp_path / "checkpoints" / f"checkpoint-{number}")
    again = train(tmp_path, "transformers", ("    ignore_data_skip=True,\n", ""))
    assert "a plain torch DataLoader was made" in again
    assert loss(again) != loss(whole)


@pytest.mark.slow
def test_transformers_trains_on_packed_rows(tmp_path):
    """On two ranks with half the batch each, the loss is that of one."""
    alone = float(loss(train(tmp_path / "one", "transformers, packed")))
    shared = float(loss(train(tmp_path / "two", "transformers, packed", ranks=2)))
    assert abs(alone - shared) < 0.02 * alone


# ---- torchtitan ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchtitans_loader_resumes_in_the_middle_of_an_epoch(tmp_path):
    """From a checkpoint of step 7, the last step has the loss of the whole run."""
    whole = train(tmp_path, "torchtitan")
    assert (tmp_path / "checkpoint").exists()
    assert loss(train(tmp_path, "torchtitan")) == loss(whole)


# ---- Ray Train ----------------------------------------------------------------------------------

FAIL = """
                mark = Path(trainer_folder, "failed")
                if epoch == 1 and step == 8 and rank == 0 and not mark.exists():
                    mark.touch()
                    raise RuntimeError("a node is lost")
"""


@pytest.mark.slow
def test_ray_train_resumes_after_a_failure(tmp_path):
    """A rank fails in the second epoch; the run ends with the loss of one without a failure."""
    whole = train(tmp_path / "whole", "Ray Train")
    step = "                optimizer.step()\n"
    folder = f"\ntrainer_folder = {str(tmp_path)!r}\n\ndef train():\n"
    changes = [(step, FAIL + step), ("\ndef train():\n", folder)]
    again = train(tmp_path / "failing", "Ray Train", *changes)
    assert (tmp_path / "failed").exists()
    assert loss(again) == loss(whole)


@pytest.mark.slow
def test_ray_trains_prepare_data_loader_makes_a_stock_loader(tmp_path):
    """With two workers it has torch's class and a DistributedSampler."""
    make = "    loader = make_loader(world_size)\n"
    change = (
        make,
        make
        + "    other = ray.train.torch.prepare_data_loader(loader)\n"
        + "    Path(trainer_folder, str(rank)).write_text("
        + "f'{type(other._dataloader)} {type(other.sampler)}')\n",
    )
    folder = ("\ndef train():\n", f"\ntrainer_folder = {str(tmp_path)!r}\n\ndef train():\n")
    train(tmp_path / "run", "Ray Train", change, folder)
    for rank in ("0", "1"):
        assert (tmp_path / rank).read_text() == (
            "<class 'torch.utils.data.dataloader.DataLoader'> "
            "<class 'torch.utils.data.distributed.DistributedSampler'>"
        )
