"""Lightning resumes from every checkpoint with the samples, and the weights, of the whole run."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

PROGRAM = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch, lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DistributedSampler
from forebay import DataLoader

class Noisy(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return torch.tensor(index), torch.rand(())

class Stream(torch.utils.data.IterableDataset):
    def __init__(self, count):
        self.count = count
    def indices(self):
        info = torch.utils.data.get_worker_info()
        return range(self.count) if info is None else range(info.id, self.count, info.num_workers)
    def __iter__(self):
        for index in self.indices():
            yield torch.tensor(index), torch.rand(())

class Kept(Stream):
    at = 0
    def __iter__(self):
        while self.at < len(self.indices()):
            self.at += 1
            yield torch.tensor(self.indices()[self.at - 1]), torch.tensor(self.at / 22)
        self.at = 0
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]

class Model(lightning.LightningModule):
    saved = None
    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.checked = torch.nn.Linear(1, 1), [], []
    def training_step(self, batch, batch_idx):
        self.seen.append(str(torch.utils._pytree.tree_map(lambda each: each.tolist(), batch)))
        index, noise = next(iter(batch.values())) if isinstance(batch, dict) else batch
        return (self.layer(noise[:, None]) - index[:, None] / 40).square().mean()
    def on_train_batch_end(self, *args):
        if self.saved:
            self.trainer.save_checkpoint(f"{self.saved}/step={len(self.seen)}.ckpt")
    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.checked.append(f"{self.trainer.current_epoch} {batch}")
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def train(folder, make, state=None, every=None, hook=False, validate=False, saves=False, **options):
    torch.manual_seed(0)
    model, loader = Model(), None
    if saves and every and not state:
        model.saved = folder
    if hook:
        model.train_dataloader = make
    else:
        loader = make()
    name = "{step}" if every else "end-{epoch}"
    saver = ModelCheckpoint(folder, filename=name, every_n_train_steps=every, save_top_k=-1)
    if state or model.saved:
        saver = None
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[saver] if saver else [],
        enable_checkpointing=bool(saver), **options,
    )
    checks = DataLoader(Noisy(9), 4, seed=5) if validate else None
    trainer.fit(model, loader, checks, ckpt_path=state, weights_only=False)
    return model

def planned(count=22, seed=3, **options):
    return DataLoader(Noisy(count), 4, shuffle=True, seed=seed, **options)

def sampled():
    return DataLoader(Noisy(22), 4, seed=1, sampler=DistributedSampler(range(22), 1, 0, seed=3))

def stream(count=22, **options):
    return DataLoader(Stream(count), 4, seed=3, **options)

def kept(**options):
    return DataLoader(Kept(22), 4, **options)

def combined(mode, a=planned, b=lambda: planned(10, 9)):
    return lambda: CombinedLoader({"a": a(), "b": b()}, mode)

WAYS = {
    "passed": (planned, {}),
    "buffer": (lambda: planned(num_workers=1, buffer="1MB"), {}),
    "auto": (lambda: planned(world_size="auto"), {}),
    "hook": (planned, {"hook": True}),
    "limit": (planned, {"limit_train_batches": 3}),
    "reload": (planned, {"hook": True, "reload_dataloaders_every_n_epochs": 1}),
    "validation": (planned, {"validate": True, "val_check_interval": 2}),
    "max_size_cycle": (combined("max_size_cycle"), {}),
    "cycle and limit": (combined("max_size_cycle"), {"limit_train_batches": 5}),
    "min_size": (combined("min_size"), {}),
    "DistributedSampler": (sampled, {}),
    "stream": (stream, {}),
    "stream, workers": (lambda: stream(num_workers=2), {}),
    "stream, buffer": (lambda: stream(num_workers=1, buffer="1MB"), {}),
    "stream, hook": (stream, {"hook": True, "saves": True}),
    "groups": (planned, {"accumulate_grad_batches": 4}),
    "stream, groups": (stream, {"accumulate_grad_batches": 4}),
    "stream, validation": (stream, {"validate": True, "val_check_interval": 2}),
    "stream, reload": (stream, {"hook": True, "reload_dataloaders_every_n_epochs": 1}),
    "stream, limit": (stream, {"limit_train_batches": 4}),
    "state": (kept, {}),
    "state, workers": (lambda: kept(num_workers=2), {}),
    "stream and plan": (combined("max_size_cycle", stream), {}),
    "plan and stream": (combined("max_size_cycle", planned, lambda: stream(10)), {}),
    "stream and sampler": (combined("max_size_cycle", lambda: stream(10), sampled), {}),
    "stream, other name": (stream, {}),
    "streams, min_size": (combined("min_size", stream, lambda: stream(26)), {}),
}
way, folder = sys.argv[1:]
make, options = WAYS[way]
for every in (1, None):
    whole = train(folder, make, every=every, **options)
    for file in sorted(os.listdir(folder)):
        if file.startswith("end") == bool(every):
            continue
        number = int(file.split("=")[1].split(".")[0])
        if every and "accumulate_grad_batches" in options:
            number = number // 2 * 6 + number % 2 * 4  # batches of two steps, the second of two
        done = number if every else len(whole.seen) // 3 * (number + 1)
        if done < len(whole.seen):
            again = train(folder, make, f"{folder}/{file}", **options)
            assert again.seen == whole.seen[done:], (file, again.seen, whole.seen[done:])
            assert set(again.checked) <= set(whole.checked), file
            if way == "stream, groups" and every and done % 6 == 0:
                continue  # without a length Lightning goes on to count the batches of that epoch
            for one, other in zip(again.parameters(), whole.parameters()):
                assert torch.equal(one, other), file
    assert way.startswith("state") or len(set(whole.seen)) == len(whole.seen)
print("exact")
"""

WAYS = [
    *("passed", "buffer", "auto", "hook", "limit", "reload", "validation"),
    *("max_size_cycle", "cycle and limit", "min_size", "DistributedSampler", "groups"),
    *("stream", "stream, workers", "stream, buffer", "stream, hook", "stream, groups"),
    *("stream, validation", "stream, reload", "stream, limit", "state", "state, workers"),
    *("stream and plan", "plan and stream", "stream and sampler", "streams, min_size"),
    "stream, other name",
]


@pytest.mark.parametrize("way", WAYS)
def test_every_checkpoint_resumes_exactly(way, tmp_path):
    """One of each step, the last of an epoch included, and those of the ends of epochs."""
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    program = PROGRAM
    if way == "stream, other name":
        program = program.replace("lightning.pytorch", "pytorch_lightning").replace(
            "import torch, lightning", "import torch, pytorch_lightning as lightning"
        )
    done = subprocess.run(
        [sys.executable, "-c", program, way, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert done.stdout.splitlines()[-1] == "exact"
