"""torchdata.nodes: a sampler, a mapper in processes, a batcher, and one state for all."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler
from torchdata.nodes import (
    Batcher,
    Mapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    SamplerWrapper,
)
from torchdata.nodes import (
    Loader as NodesLoader,
)

from benchmarks.exactness.data import Samples, second_source
from benchmarks.exactness.epoch_loop import EpochLoop
from benchmarks.exactness.record import Task

TITLE = "torchdata.nodes"
NEEDS = ("torchdata", "torch")
DOCS = "https://meta-pytorch.org/data/main/torchdata.nodes.html"
_RANKS = "a state is of its rank"
LACKS = {"stream": "workers do not read a stream; its source is one process"}
UNCLAIMED = {
    "ranks-1-2": _RANKS,
    "ranks-2-3": _RANKS,
    "ranks-3-1": _RANKS,
    "tree": "says nothing about signals",
    "random-workers": "seeds of workers are the script's",
    "random-resumed": "generators of workers are not in the state",
}


class Loader(EpochLoop):
    """Epochs by `SamplerWrapper`, which calls `set_epoch` and has the epoch in its state.

    By default the state after an epoch's last batch begins the next one; a script that counts the
    epochs itself says `restart_on_stop_iteration=False`.
    """

    PER_RANK = True

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if task.kind == "mixture":
            sources = {"a": Samples(), "b": second_source()}
            node: Any = MultiNodeWeightedSampler(
                {
                    name: Mapper(self._indices(each), each.__getitem__)
                    for name, each in sources.items()
                },
                {"a": 0.75, "b": 0.25},
                seed=task.seed,
            )
        elif task.workers:
            node = ParallelMapper(
                self._indices(Samples()),
                Samples().__getitem__,
                num_workers=task.workers,
                method="process",
            )
        else:
            node = Mapper(self._indices(Samples()), Samples().__getitem__)
        self.loader = NodesLoader(Batcher(node, task.batch), restart_on_stop_iteration=False)

    def _indices(self, dataset: Any) -> Any:
        ranks = {"num_replicas": self.task.ranks, "rank": self.task.rank}
        return SamplerWrapper(DistributedSampler(dataset, seed=self.task.seed, **ranks))
