"""The how-to about training libraries is true: each script trains, and resumes where it was.

Skipped for each library that is not installed: `pip install -e '.[frameworks]'` installs all.

A script prints its last loss with all digits. It depends on every batch and on their order, so a
run that was interrupted must print what the uninterrupted one prints.
"""

from __future__ import annotations

import re

import pytest

from framework_scripts import NEEDS, forget_after, loss, scripts, train

pytestmark = pytest.mark.full

SINGLE_RANK = (
    ("devices=2", "devices=1"),
    ('strategy="ddp"', 'strategy="auto"'),
    ("make_loader(2)", "make_loader(1)"),
)


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
@pytest.mark.parametrize("every", ["save_top_k=1", "every_n_train_steps=12"])
def test_lightning_resumes_at_the_end_of_an_epoch(every, tmp_path):
    """From a checkpoint of its last step, or of its end, which has no state of a loader."""
    saves = ("every_n_train_steps=5", every)
    train(tmp_path, "Lightning", *SINGLE_RANK, saves, ("max_epochs=2", "max_epochs=1"))
    again = train(tmp_path, "Lightning", *SINGLE_RANK, saves)
    whole = train(tmp_path / "whole", "Lightning", *SINGLE_RANK, saves)
    assert loss(again) == loss(whole)


@pytest.mark.slow
def test_lightning_divides_the_batches_of_a_loader_without_a_world_size(tmp_path):
    """It makes the loader again, which has the order and the arguments of the one it was given."""
    auto = ('        world_size="auto",\n', "")
    expected = train(tmp_path / "expected", "Lightning")
    assert loss(train(tmp_path / "made", "Lightning", auto)) == loss(expected)


# ---- Accelerate ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("ranks", [0, 2])
def test_accelerate_resumes_in_the_middle_of_an_epoch(ranks, stateful, tmp_path):
    """`save_state` and `load_state` have the position of a prepared loader, alone and on ranks."""
    pytest.importorskip("torchdata" if stateful else "torch")
    setting = (
        "Accelerator(cpu=True",
        "Accelerator(dataloader_config=__import__('accelerate').utils.DataLoaderConfiguration("
        f"use_stateful_dataloader={stateful}), cpu=True",
    )
    whole = train(tmp_path, "Accelerate", setting, ranks=ranks)
    assert loss(train(tmp_path, "Accelerate", setting, ranks=ranks)) == loss(whole)


ACCUMULATE = """
import os

def prepared(samples, size, **settings):
    from accelerate.utils import DataLoaderConfiguration
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=5,
        dataloader_config=DataLoaderConfiguration(**settings),
    )
    data = torch.utils.data.Subset(Doubles(), range(samples))
    return accelerator, accelerator.prepare(DataLoader(data, batch_size=size, seed=0))

from accelerate.state import AcceleratorState, GradientState
GradientState._reset_state()
accelerator, batches = prepared(96, 8 // accelerator.num_processes)
steps, rest = [], {}
for number in range(2):
    for batch in batches:
        with accelerator.accumulate(model):
            steps.append(accelerator.sync_gradients)
        if not rest:  # another loop within the first
            rest = [len(each) for each in prepared(9, 4)[1]]
accelerator.print("steps at", [at for at, is_step in enumerate(steps) if is_step])
for split in (False, True):
    for even in (True, False):
        accelerator, batches = prepared(21, 4, split_batches=split, even_batches=even)
        found, lengths = [], []
        for batch in batches:
            lengths.append(len(batch["x"]))
            if even:
                found.append(accelerator.gather_for_metrics(batch["x"]))
        if even:
            found = (torch.cat(found) * 96).round().int().ravel().tolist()
        said = "gathered", split, even, accelerator.process_index, found, lengths
        os.write(1, (" ".join(map(str, said)) + "\\n").encode())  # whole, beside other ranks
"""


@pytest.mark.slow
def test_what_accelerate_knows_of_a_prepared_loader(tmp_path):
    """Groups of batches end with the epoch, and what is gathered is the dataset, once."""
    end = 'accelerator.print("loss", loss.item())\n'
    printed = train(tmp_path, "Accelerate", (end, end + ACCUMULATE), ranks=2)
    assert "steps at [4, 9, 11, 16, 21, 23]" in printed
    every = list(range(21))
    lengths = {
        (False, True): ([4] * 3, [4] * 3),
        (False, False): ([4, 4, 2], [4, 4, 3]),
        (True, True): ([2] * 6, [2] * 6),
        (True, False): ([2] * 5, [2] * 5 + [1]),
    }
    for (split, even), of_ranks in lengths.items():
        for rank, own in enumerate(of_ranks):
            assert f"gathered {split} {even} {rank} {every if even else []} {own}" in printed


SKIP = """
def ids(batches):
    return [(batch["x"] * 96).round().int().ravel().tolist() for batch in batches]

def made(**others):
    data = torch.utils.data.Subset(Doubles(), range(20))
    return accelerator.prepare(DataLoader(data, batch_size=4, seed=0, **others))

for others in ({"shuffle": True}, {"sampler": [*range(20)]}):
    whole = made(**others)
    epochs = [ids(whole), ids(whole)]
    other = made(**others)
    first = ids(accelerator.skip_first_batches(other, 3))
    print("skipped", [first, ids(other)] == [epochs[0][3:], epochs[1]])
    third = made(**others)
    state = whole.state_dict()
    for number, batch in enumerate(third):
        if number == 2:
            state = third.state_dict()
            break
    resumed = made(**others)
    resumed.load_state_dict(state)
    print("resumed", ids(accelerator.skip_first_batches(resumed, 3)) == epochs[0][3:])
    resumed.load_state_dict(state)
    try:
        accelerator.skip_first_batches(resumed, 2)
    except Exception as error:
        print(type(error).__name__, error)

import accelerate
try:
    next(iter(accelerate.skip_first_batches(made(), 2)))
except Exception as error:
    print(type(error).__name__, error)

for settings, dataset in (
    ({"dispatch_batches": True}, Doubles()),
    ({"split_batches": True}, Doubles()),
):
    config = accelerate.utils.DataLoaderConfiguration(**settings)
    others = Accelerator(cpu=True, dataloader_config=config)
    loader = DataLoader(dataset, batch_size=3, seed=0)
    try:
        print("prepared", others.prepare(loader) is loader)
    except Exception as error:
        print(type(error).__name__, error)
print("plain", type(accelerator.prepare(DataLoader(Doubles(), batch_size=4))).__name__)
"""


@pytest.mark.slow
def test_accelerate_skips_batches_once_and_what_it_cannot_do_is_an_error(tmp_path):
    """After a state nothing is skipped twice; a stock loader is refused, and so is dispatching."""
    end = 'accelerator.print("loss", loss.item())\n'
    printed = train(tmp_path, "Accelerate", (end, end + SKIP))
    assert printed.count("skipped True") == printed.count("resumed True") == 2
    assert (
        printed.count("OptionError skip_first_batches(loader, 2), and the loader is after 3") == 2
    )
    assert "OptionError a plain torch DataLoader was made" in printed
    assert "OptionError dispatch_batches=True with a forebay.DataLoader" in printed
    assert "prepared True" in printed
    assert "plain DataLoaderShard" in printed


# ---- transformers -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("step", [5, 15])
def test_transformers_resumes_in_the_middle_of_an_epoch(ranks, step, tmp_path):
    """A run from a checkpoint of either epoch ends with the loss of the whole run."""
    whole = train(tmp_path, "transformers", ranks=ranks)
    forget_after(step, tmp_path / "checkpoints")
    again = train(tmp_path, "transformers", ranks=ranks)
    assert loss(again) == loss(whole)


LENGTHS = """
class Lengths(Doubles):
    def __getitem__(self, index):
        if index >= len(self):  # the trainer iterates the dataset for its lengths
            raise IndexError(index)
        return super().__getitem__(index) | {"input_ids": [0] * (1 + index % 7)}

"""
# What is different from the script, and the step whose checkpoint the run continues from.
RESUMED = {
    "at the end of an epoch": ([("save_steps=5", "save_steps=12")], 12),
    "with groups of batches": (
        [("save_steps=5", "save_steps=2, gradient_accumulation_steps=5")],
        4,  # one of the second epoch, whose last group has two batches
    ),
    "with a number of steps": ([("num_train_epochs=2", "max_steps=19")], 15),
    "while it evaluates": (
        [("save_steps=5", 'save_steps=5, eval_strategy="steps", eval_steps=2')],
        5,
    ),
    "grouped by length": (
        [
            ("save_steps=5", 'save_steps=5, train_sampling_strategy="group_by_length"'),
            ("train_dataset=Doubles()", "train_dataset=Lengths()"),
            ("eval_dataset=Doubles()", "eval_dataset=Lengths()"),
            ("\nargs = ", LENGTHS + "\nargs = "),
        ],
        5,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", RESUMED)
def test_transformers_resumes_wherever_a_checkpoint_is(way, tmp_path):
    """The trainer's own count of steps and epochs is right, and so is each batch."""
    changes, step = RESUMED[way]
    show = ('print("loss"', 'print("epoch", trainer.state.epoch)\nprint("loss"')
    whole = train(tmp_path, "transformers", *changes, show)
    forget_after(step, tmp_path / "checkpoints")
    again = train(tmp_path, "transformers", *changes, show)
    assert loss(again) == loss(whole)
    assert re.findall(r"^epoch .*", again, re.MULTILINE) == re.findall(
        r"^epoch .*", whole, re.MULTILINE
    )


@pytest.mark.slow
def test_transformers_refuses_a_checkpoint_without_a_position(tmp_path):
    """The message says what is missing; without `forebay.use` the checkpoint is as any."""
    line = 'forebay.use(trainer, num_workers=2, buffer="30MB", seed=0)\n'
    train(tmp_path, "transformers", (line, ""))
    forget_after(5, tmp_path / "checkpoints")
    with pytest.raises(
        AssertionError, match="OptionError: the checkpoint of step 5 has no position"
    ):
        train(tmp_path, "transformers")


@pytest.mark.slow
def test_transformers_evaluates_each_sample_once(tmp_path):
    """On two ranks, predictions and loss of a dataset that they do not divide are those of one."""
    show = (
        'print("loss"',
        "found = trainer.predict(torch.utils.data.Subset(Doubles(), range(21)))\n"
        "print('predicted', trainer.accelerator.process_index, found.label_ids.ravel().tolist())\n"
        'print("loss"',
    )
    out = ('return {"loss"', 'return {"logits": self.layer(x), "loss"')
    expected = str((torch_arange(21) / 96 * 2).tolist())
    for ranks in (0, 2):
        printed = train(tmp_path / str(ranks), "transformers", show, out, ranks=ranks)
        assert printed.count(expected) == max(ranks, 1)


def torch_arange(count: int):
    """Return numbers as torch has them."""
    import torch

    return torch.arange(count, dtype=torch.float32)


@pytest.mark.slow
def test_transformers_trains_on_packed_rows(tmp_path):
    """On two ranks with half the batch each, the loss is that of one; a resume changes nothing."""
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
@pytest.mark.parametrize("workers", [1, 2])
def test_ray_trains_prepare_data_loader_returns_the_loader(workers, tmp_path):
    """With and without `world_size=`, the loss is that of a loader that is not prepared."""
    alone = ("prepare_data_loader(make_loader(world_size))", "make_loader(world_size)")
    auto = ('        world_size="auto",\n', "")
    number = ("num_workers=2)", f"num_workers={workers})")
    device = ("    with loader:\n", "    assert type(loader) is DataLoader\n    with loader:\n")
    found = [
        loss(train(tmp_path / str(at), "Ray Train", number, *changes))
        for at, changes in enumerate([[alone], [device], [device, auto]])
    ]
    assert found == [found[0]] * 3


REFUSED = """
def train():
    from forebay import OptionError

    rank = ray.train.get_context().get_world_rank()
    for options in ({"batch_sampler": [[0, 1]], "seed": 0}, {"world_size": 3, "rank": 1}):
        try:
            prepare_data_loader(DataLoader(Doubles(), **options))
        except OptionError as error:
            print(f"{rank} refused: {error}")
    stock = torch.utils.data.DataLoader(Doubles(), batch_size=4, shuffle=True)
    plain = DataLoader(Doubles(), batch_size=4, shuffle=True)
    pairs = [prepare_data_loader(stock), prepare_data_loader(plain)]
    for epoch in range(2):
        found = []
        for loader in pairs:
            loader.sampler.set_epoch(epoch)
            found.append([batch["x"].tolist() for batch in loader])
        same = found[0] == found[1], len(found[0]), pairs[1] is plain
        print(f"{rank}, epoch {epoch}, as torch's:", *same)
    plain = DataLoader(Doubles(), batch_size=4)
    whole = prepare_data_loader(plain, add_dist_sampler=False)
    print(f"{rank} whole:", len(whole), whole is plain)


"""


@pytest.mark.slow
def test_ray_train_divides_a_loader_as_torchs_or_says_why_not(tmp_path):
    """With torch's arguments alone the order is that of torch's class under Ray."""
    last = 'print("loss", trainer.fit().metrics["loss"])', "trainer.fit()"
    printed = train(tmp_path, "Ray Train", ("\ntrainer = ", REFUSED + "trainer = "), last)
    for rank in (0, 1):
        assert f"{rank} refused: the batches of a list cannot be divided among the 2" in printed
        assert f"{rank} refused: the loader was made for rank 1 of 3" in printed
        for epoch in (0, 1):
            assert f"{rank}, epoch {epoch}, as torch's: True 12 True" in printed
        assert f"{rank} whole: 24 True" in printed
