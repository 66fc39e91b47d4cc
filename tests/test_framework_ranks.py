"""A run that was saved in the middle of an epoch goes on with another number of ranks.

Each case runs the script of the how-to: on one rank without an interruption; on some ranks until
the middle of an epoch; and from there on another number. The steps after the interruption have the
samples that they had without it, and the last loss is the same, up to the order in which ranks add
theirs.

Skipped for each library that is not installed, as in `test_framework_examples.py`.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from framework_scripts import NEEDS, forget_after, loss, run, scripts

pytestmark = [pytest.mark.full, pytest.mark.slow]

Changes = list[tuple[str, str]]

# A file for each rank has a line for each step, and in it a string for each sample.
NOTE = """
def note(samples):
    import torch.distributed as dist
    rank = dist.get_rank() if dist.is_initialized() else 0
    with open(f"FOLDER/seen-{rank}", "a") as file:
        print(*(str(each.tolist()).replace(" ", "") for each in samples), file=file)


def mean(loss):
    import torch.distributed as dist
    loss = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss


"""
RETURN = '        return {"loss"'
AUTO = ('        world_size="auto",\n', "")
SIZE = ("8 // world_size", "12 // world_size")
LOSS = "                loss = nn"
NOTED = (LOSS, f"                note(batch['x'])\n{LOSS}")


@dataclass(frozen=True)
class Case:
    """How the script of one library is run.

    Attributes:
        changes: What is different in the script, given the number of ranks.
        interrupted: What is different besides, in a run that ends in the middle of an epoch.
        done: How many steps that run has saved.
        is_launched: Whether torchrun starts the ranks; if not, the library does.
        code: The script; "" for that of the how-to's section of the case's name.
        needs: What must be installed; () for what the section needs.
        forget: Called with the folder after an interrupted run.
    """

    changes: Callable[[int], Changes]
    interrupted: Changes
    done: int
    is_launched: bool = True
    code: str = ""
    needs: tuple[str, ...] = ()
    forget: Callable[[Path], None] = field(default=lambda folder: None)


def lightning(ranks: int) -> Changes:
    """Return a datamodule whose loaders Lightning divides, in place of a loader."""
    module = f"""
class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        return make_loader({ranks})

    def val_dataloader(self):
        return DataLoader(Doubles(), batch_size=4, seed=0)


trainer = """
    validate = """
    def validation_step(self, batch, batch_idx):
        self.log("check", nn.functional.mse_loss(self.layer(batch["x"]), batch["labels"]))

    def configure_optimizers"""
    step = "        loss = nn"
    return [
        AUTO,
        SIZE,
        (step, f"        note(batch['x'])\n{step}"),
        ("devices=2", f"devices={ranks}"),
        ("make_loader(2), ckpt", "datamodule=Data(), ckpt"),
        ("\ntrainer = ", module),
        ("\n    def configure_optimizers", validate),
        ('self.log("loss", loss)', 'self.log("loss", loss, sync_dist=True)'),
    ]


def torchtitan(ranks: int) -> Changes:
    """Return a group of ranks, and the sum of their gradients: rows have different counts."""
    take = "    inputs, labels = next(batches)\n"
    return [
        ("global_batch_size=8", "global_batch_size=12"),
        ("dp_world_size=1", f"dp_world_size={ranks}"),
        ("dp_rank=0", "dp_rank=int(__import__('os').environ['RANK'])"),
        ('states = {"model"', "torch.distributed.init_process_group('gloo')\nstates = {\"model\""),
        (take, f"{take}    note(inputs['input'])\n"),
        ("labels.flatten())", "labels.flatten(), reduction='sum') / 700"),
        ("0.1 * parameter.grad", f"{0.1 * ranks} * mean(parameter.grad)"),
        ('print("loss", loss.item())', f"print('loss', {ranks} * mean(loss).item())"),
    ]


def ray_train(ranks: int) -> Changes:
    """Return a loader that `prepare_data_loader` divides, on a cluster with room for three."""
    step = "                optimizer.step()\n"
    return [
        AUTO,
        SIZE,
        NOTED,
        (step, f"{step}                loss = mean(loss)\n"),
        ("\ntrainer = Torch", "\nray.init(num_cpus=4)\ntrainer = Torch"),
        ("num_workers=2)", f"num_workers={ranks})"),
    ]


TRL = """
from pathlib import Path

import datasets
import forebay
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.trainer_utils import get_last_checkpoint


class Trainer(trl.SFTTrainer):
    def training_step(self, model, inputs, *others):
        note([row[row != 64] for row in inputs["input_ids"]])
        return super().training_step(model, inputs, *others)


words = {f"w{number}": number for number in range(64)} | {"[PAD]": 64, "[EOS]": 65}
raw = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
texts = [" ".join(f"w{(index + at) % 64}" for at in range(5 + index % 11)) for index in range(96)]
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=66,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    pad_token_id=64,
    eos_token_id=65,
)
args = trl.SFTConfig(
    "checkpoints",
    num_train_epochs=2,
    learning_rate=0.01,
    save_steps=5,
    use_cpu=True,
    bf16=False,
    report_to="none",
)
args.per_device_train_batch_size = 12 // args.world_size
trainer = Trainer(
    transformers.LlamaForCausalLM(config),
    args,
    train_dataset=datasets.Dataset.from_dict({"text": texts}),
    eval_dataset=datasets.Dataset.from_dict({"text": texts}),
    processing_class=transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", eos_token="[EOS]"
    ),
)
forebay.use(trainer, num_workers=2, buffer="30MB", seed=0)
checkpoint = get_last_checkpoint("checkpoints") if Path("checkpoints").exists() else None
trainer.train(resume_from_checkpoint=checkpoint)
print("loss", trainer.evaluate()["eval_loss"])
"""


def forget_later_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a Trainer that were saved after step 5."""
    forget_after(5, folder / "checkpoints")


CASES = {
    "Accelerate": Case(
        lambda ranks: [
            ("8 // accelerator", "12 // accelerator"),
            NOTED,
            ("== 8:", "== 6:"),  # the end of a group of two: no gradients are left to be saved
            ('print("loss", loss.item())', 'print("loss", mean(loss).item())'),
        ],
        [("range(loader.epoch, 2)", "range(1)")],
        6,
    ),
    "transformers": Case(
        lambda ranks: [
            ("8 // args.world_size", "12 // args.world_size"),
            (RETURN, f"        if self.training:\n            note(x)\n{RETURN}"),
        ],
        [],
        5,
        forget=forget_later_checkpoints,
    ),
    "TRL": Case(
        lambda ranks: [],
        [],
        5,
        code=TRL,
        needs=("trl", "transformers", "accelerate", "datasets", "tokenizers"),
        forget=forget_later_checkpoints,
    ),
    "Lightning": Case(lightning, [("max_epochs=2", "max_steps=5")], 5, is_launched=False),
    "torchtitan": Case(torchtitan, [("while step < 12", "while step < 7")], 7),
    "Ray Train": Case(
        ray_train,
        [
            (
                "                if step % 5",
                "                if step == 6:\n"
                "                    raise RuntimeError('preempted')\n"
                "                if step % 5",
            ),
            ("max_failures=3", "max_failures=0"),
            ("\nprint(", "\nwith __import__('contextlib').suppress(Exception):\n    print("),
        ],
        5,
        is_launched=False,
    ),
}


def train_case(folder: Path, name: str, ranks: int, changes: Changes) -> tuple[list[str], str]:
    """Run a case; return the samples of all ranks in each of its steps, and what it printed."""
    case, seen = CASES[name], folder / "seen"
    shutil.rmtree(seen, ignore_errors=True)
    seen.mkdir(parents=True)
    code = case.code or scripts()[name]
    for old, new in [*case.changes(ranks), *changes]:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    code = NOTE.replace("FOLDER", str(seen)) + code
    needs = case.needs or NEEDS[name]
    printed = run(folder, code, needs, ranks if case.is_launched else 0)
    files = sorted(seen.iterdir())
    assert len(files) == ranks, printed
    lines = [file.read_text(encoding="utf-8").splitlines() for file in files]
    # Of each step, the samples of the ranks.
    return [
        " ".join(sorted(" ".join(step).split())) for step in zip(*lines, strict=not changes)
    ], printed


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that returns what a case does on one rank, without an interruption."""

    @functools.cache
    def train_whole(name):
        return train_case(tmp_path_factory.mktemp("whole"), name, 1, [])

    return train_whole


@pytest.mark.parametrize(("saved", "resumed"), [(1, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_with_another_number_of_ranks(name, saved, resumed, whole, tmp_path):
    """The remaining steps have the samples, and the last one the loss, of a run on one rank."""
    case = CASES[name]
    steps, printed = whole(name)
    begun, _ = train_case(tmp_path, name, saved, case.interrupted)
    assert begun[: case.done] == steps[: case.done]
    case.forget(tmp_path)
    rest, again = train_case(tmp_path, name, resumed, [])
    assert rest == steps[case.done :]
    assert len(set(steps)) == len(steps) > case.done
    expected = float(loss(printed))
    assert abs(float(loss(again)) - expected) < 1e-4 * expected
