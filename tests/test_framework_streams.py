"""Hugging Face streams in the Trainer, Lightning and Accelerate: whole epochs, exact resumes."""

from __future__ import annotations

import pytest
import torch

import forebay

# A module of tests/loading may have the name of the library.
pytest.importorskip("datasets.arrow_dataset")
import datasets

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
COUNT, SIZE, STEPS = 24, 4, 6
WAYS = {"here": {}, "buffer": {"num_workers": 2, "buffer": "5MB"}}
# In the middle of the second epoch, and at the end of one.
CUTS = [6, 9]


def stream(shuffles):
    """A stream of 24 numbers in four shards, with a shuffle buffer or without."""
    numbers = datasets.Dataset.from_dict({"x": [float(each) for each in range(COUNT)]})
    found = numbers.to_iterable_dataset(num_shards=4)
    found = found.shuffle(seed=1, buffer_size=6) if shuffles else found
    return found.with_format("torch")


def in_trainer(folder, way, shuffles, resume=None):
    """Return the batches that a Trainer trains on in three epochs, saving after each step."""
    transformers = pytest.importorskip("transformers")
    seen = []

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x):
            seen.append(x.int().tolist())
            return {"loss": self.layer(x[:, None]).square().mean()}

    args = transformers.TrainingArguments(
        str(folder),
        max_steps=3 * STEPS,
        per_device_train_batch_size=SIZE,
        save_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = transformers.Trainer(Model(), args, train_dataset=stream(shuffles))
    forebay.use(trainer, **{"seed": None, **way})
    before = None if resume is None else str(folder / f"checkpoint-{resume}")
    trainer.train(resume_from_checkpoint=before)
    return seen


def in_lightning(folder, way, shuffles, resume=None):
    """Return the batches that Lightning trains on in three epochs, saving after each step."""
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    seen = []

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, at):
            seen.append(batch["x"].int().tolist())
            return self.layer(batch["x"][:, None]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    saved = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        callbacks=[saved],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = forebay.DataLoader(stream(shuffles), batch_size=SIZE, **way)
    before = None if resume is None else folder / f"step={resume}.ckpt"
    trainer.fit(Model(), loader, ckpt_path=before)
    return seen


def in_accelerate(folder, way, shuffles, resume=None):
    """Return the batches of a loop with Accelerate in three epochs, saving after each step."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    loader = accelerator.prepare(
        forebay.DataLoader(stream(shuffles), batch_size=SIZE, **{"seed": 0, **way})
    )
    if resume is not None:
        accelerator.load_state(str(folder / str(resume)))
    seen, step = [], resume or 0
    with loader:
        for epoch in range(loader.epoch, 3):
            loader.dataset.set_epoch(epoch)
            for batch in loader:
                seen.append(batch["x"].int().tolist())
                step += 1
                if resume is None:
                    accelerator.save_state(str(folder / str(step)))
    return seen


@pytest.mark.parametrize("shuffles", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", [in_trainer, in_lightning, in_accelerate])
def test_a_stream_is_whole_in_each_epoch_and_after_each_resume(
    program, way, shuffles, tmp_path, monkeypatch
):
    """From the middle of any epoch, and from the end of one."""
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # no thread of tqdm's
    whole = program(tmp_path, WAYS[way], shuffles)
    samples = [each for batch in whole for each in batch]
    epochs = [samples[at : at + COUNT] for at in range(0, 3 * COUNT, COUNT)]
    assert [*map(sorted, epochs)] == [[*range(COUNT)]] * 3
    for cut in CUTS:
        assert program(tmp_path, WAYS[way], shuffles, cut) == whole[cut:], cut
