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

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.checked = torch.nn.Linear(1, 1), [], []
    def training_step(self, batch, batch_idx):
        self.seen.append(str(torch.utils._pytree.tree_map(lambda each: each.tolist(), batch)))
        index, noise = next(iter(batch.values())) if isinstance(batch, dict) else batch
        return (self.layer(noise[:, None]) - index[:, None] / 40).square().mean()
    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.checked.append(f"{self.trainer.current_epoch} {batch}")
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def train(folder, make, state=None, every=None, hook=False, validate=False, **options):
    torch.manual_seed(0)
    model, loader = Model(), None
    if hook:
        model.train_dataloader = make
    else:
        loader = make()
    name = "{step}" if every else "end-{epoch}"
    saver = ModelCheckpoint(folder, filename=name, every_n_train_steps=every, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[] if state else [saver],
        enable_checkpointing=not state, **options,
    )
    checks = DataLoader(Noisy(9), 4, seed=5) if validate else None
    trainer.fit(model, loader, checks, ckpt_path=state, weights_only=False)
    return model

def planned(count=22, seed=3, **options):
    return DataLoader(Noisy(count), 4, shuffle=True, seed=seed, **options)

def sampled():
    return DataLoader(Noisy(22), 4, seed=1, sampler=DistributedSampler(range(22), 1, 0, seed=3))

def combined(mode):
    return lambda: CombinedLoader({"a": planned(), "b": planned(10, 9)}, mode)

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
}
way, folder = sys.argv[1:]
make, options = WAYS[way]
for every in (1, None):
    whole = train(folder, make, every=every, **options)
    for file in sorted(os.listdir(folder)):
        if file.startswith("end") == bool(every):
            continue
        number = int(file.split("=")[1].split(".")[0])
        done = number if every else len(whole.seen) // 3 * (number + 1)
        if done < len(whole.seen):
            again = train(folder, make, f"{folder}/{file}", **options)
            assert again.seen == whole.seen[done:], (file, again.seen, whole.seen[done:])
            assert set(again.checked) <= set(whole.checked), file
            for one, other in zip(again.parameters(), whole.parameters()):
                assert torch.equal(one, other), file
    assert len(set(whole.seen)) == len(whole.seen)
print("exact")
"""

WAYS = [
    *("passed", "buffer", "auto", "hook", "limit", "reload", "validation"),
    *("max_size_cycle", "cycle and limit", "min_size", "DistributedSampler"),
]


@pytest.mark.parametrize("way", WAYS)
def test_every_checkpoint_resumes_exactly(way, tmp_path):
    """One of each step, the last of an epoch included, and those of the ends of epochs."""
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert done.stdout.splitlines()[-1] == "exact"
