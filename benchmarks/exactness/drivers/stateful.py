"""torchdata's StatefulDataLoader: torch's DataLoader with a state, one for each rank."""

from __future__ import annotations

from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from benchmarks.exactness.drivers import torch_loader

TITLE = "StatefulDataLoader"
NEEDS = ("torchdata", "torch")
DOCS = "https://meta-pytorch.org/data/main/stateful_dataloader_tutorial.html"
_ANOTHER = "a state is of one number of workers and of its rank"
LACKS = {"mixture": "has no mixtures"}
UNCLAIMED = {
    "workers-3": _ANOTHER,
    "workers-0": _ANOTHER,
    "ranks-1-2": _ANOTHER,
    "ranks-2-3": _ANOTHER,
    "ranks-3-1": _ANOTHER,
    "random-workers": "seeds depend on the workers",
    "random-resumed": "generators of workers are not in the state",
}


class Loader(torch_loader.Loader):
    """The epoch is the script's, as in torch's own loop."""

    CLASS = StatefulDataLoader
    SAMPLER = StatefulDistributedSampler
    PER_RANK = True
