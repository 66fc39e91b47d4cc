"""Libraries that derive classes from torch's DataLoader, or are given one, with forebay's instead.

Each program runs twice: with torch's class, and with forebay's in its place before the library is
imported. Both must print the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

BEGIN = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.utils.data
if sys.argv[1] == "forebay":
    import forebay
    torch.utils.data.DataLoader = torch.utils.data.dataloader.DataLoader = forebay.DataLoader
Loader = torch.utils.data.DataLoader
seen = []

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 26
    def __getitem__(self, index):
        return torch.tensor(index)

def note(batches):
    seen.append([batch.tolist() for batch in batches])
"""
END = "\nprint(json.dumps(seen))\n"

TORCHDATA = """
from torchdata.stateful_dataloader import StatefulDataLoader
assert issubclass(StatefulDataLoader, Loader)
for workers in (0, 2):
    torch.manual_seed(3)
    loader = StatefulDataLoader(Numbers(), 4, shuffle=True, num_workers=workers)
    iterator = iter(loader)
    note([next(iterator), next(iterator)])
    state = loader.state_dict()
    note(iterator)
    again = StatefulDataLoader(Numbers(), 4, shuffle=True, num_workers=workers)
    again.load_state_dict(state)
    note(again)
    note(again)
"""
SPEECHBRAIN = """
import tempfile
from speechbrain.dataio.dataloader import SaveableDataLoader
from speechbrain.utils.checkpoints import Checkpointer
assert issubclass(SaveableDataLoader, Loader)
slices = torch.utils.data.TensorDataset(torch.arange(26))
kinds = [{}, {"num_workers": 2}, {"shuffle": True, "num_workers": 1, "persistent_workers": True}]
if sys.argv[1] == "forebay":  # as many, with arguments of its own
    kinds += [{"seed": 1}, {"seed": 1, "num_workers": 2, "buffer": "1MB"}]
for options in kinds:
    for dataset in (Numbers(), slices):
        with tempfile.TemporaryDirectory() as folder:
            def make():
                generator = None if "seed" in options else torch.Generator().manual_seed(5)
                loader = SaveableDataLoader(dataset, 4, generator=generator, **options)
                return loader, Checkpointer(folder, {"loader": loader})
            loader, saver = make()
            got = []
            for number, batch in enumerate(loader):
                got.append(batch)
                if number == 2:
                    saver.save_checkpoint(end_of_epoch=False)
            again, saver = make()
            saver.recover_if_possible()
            rest = list(again)
            assert str(rest) == str(got[3:]), (options, rest, got[3:])
            assert len(list(again)) == 7
            seen.append(str(rest) if "seed" not in options else None)
seen = [each for each in seen if each is not None]
"""
TIMM = """
from timm.data.loader import MultiEpochsDataLoader
assert issubclass(MultiEpochsDataLoader, Loader)
for workers in (0, 2):
    torch.manual_seed(3)
    loader = MultiEpochsDataLoader(Numbers(), 4, shuffle=True, num_workers=workers)
    for _ in range(3):
        note(loader)
"""
ULTRALYTICS = """
from ultralytics.data.build import InfiniteDataLoader
assert issubclass(InfiniteDataLoader, Loader)

def epochs(loader):
    found = [[batch.tolist() for batch in loader] for _ in range(2)]
    loader.reset()
    return [*found, [batch.tolist() for batch in loader]]

for workers in (0, 2):
    torch.manual_seed(3)
    loader = InfiniteDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers)
    seen.append(epochs(loader))
if sys.argv[1] == "forebay":
    def make(**options):
        return InfiniteDataLoader(Numbers(), batch_size=4, shuffle=True, seed=1, **options)
    whole = epochs(make())
    assert epochs(make(num_workers=2, buffer="1MB")) == whole
    loader, rest = make(num_workers=1), make()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    rest.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert next(iter(rest)).tolist() == whole[0][3]
"""
GEOMETRIC = """
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
assert issubclass(DataLoader, Loader)
graphs = [
    Data(x=torch.arange(n + 1.0)[:, None], edge_index=torch.tensor([[0], [n]])) for n in range(9)
]
for workers in (0, 2):
    torch.manual_seed(3)
    for batch in DataLoader(graphs, batch_size=4, shuffle=True, num_workers=workers):
        seen.append([batch.x.tolist(), batch.edge_index.tolist(), batch.batch.tolist()])
"""
TRAINED = """
from torch import nn

class Pairs(Numbers):
    def __getitem__(self, index):
        x = torch.tensor([index / 26])
        return x, 2 * x

torch.manual_seed(3)
model, options = nn.Linear(1, 1), {"num_workers": 2} if sys.argv[1] == "forebay" else {}
"""
FASTAI = (
    TRAINED
    + """
import fastai.callback.progress
from fastai.data.core import DataLoaders
from fastai.learner import Learner
loaders = [Loader(Pairs(), 4, shuffle=shuffle) for shuffle in (True, False)]
learner = Learner(DataLoaders(*loaders, device="cpu"), model, nn.functional.mse_loss)
with learner.no_bar(), learner.no_logging():
    learner.fit(2, lr=0.1)
seen += [value.tolist() for value in model.parameters()]
seen += [float(each) for each in learner.recorder.losses]
"""
)
IGNITE = (
    TRAINED
    + """
from ignite.engine import Engine
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(engine, batch):
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    seen.append(loss.item())
Engine(step).run(Loader(Pairs(), 4, shuffle=True), max_epochs=3)
"""
)
SKORCH = (
    TRAINED
    + """
from skorch import NeuralNetRegressor
net = NeuralNetRegressor(
    model, max_epochs=3, lr=0.1, iterator_train=Loader, iterator_valid=Loader,
    iterator_train__shuffle=True, batch_size=4, train_split=None, verbose=0,
)
net.fit(Pairs(), y=None)
seen = [[row["train_loss"] for row in net.history], net.predict(Pairs()).tolist()]
"""
)
# The modules that have to be there, and the program.
PROGRAMS = {
    "torchdata": ("torchdata", TORCHDATA),
    "SpeechBrain": ("speechbrain torchaudio", SPEECHBRAIN),
    "timm": ("timm torchvision", TIMM),
    "ultralytics": ("ultralytics torchvision", ULTRALYTICS),
    "PyTorch Geometric": ("torch_geometric", GEOMETRIC),
    "fastai": ("fastai torchvision", FASTAI),
    "ignite": ("ignite", IGNITE),
    "skorch": ("skorch", SKORCH),
}


def printed(program, way):
    """Return the last line that a program prints with torch's class, or forebay's."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program + END, way],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_library_does_the_same_with_forebays_class_in_place_of_torchs(name):
    """Batches, states and losses are those with torch's class, to the last digit."""
    modules, program = PROGRAMS[name]
    missing = [module for module in modules.split() if find_spec(module) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    assert printed(program, "forebay") == printed(program, "torch")
