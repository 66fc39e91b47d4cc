"""How a loader of a life is made, from the values of the axes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    WeightedRandomSampler,
)

import forebay

from . import loader_data, loader_draws, loader_sets

_SEED = 11


@dataclass(frozen=True)
class Plan:
    """How a loader is made.

    Attributes:
        setup: The values of the axes.
        told: What `set_epoch` was called with, before the loader is made.
        version: Of the dataset.
        order: Of a sampler of the user's.
        is_resumed: Whether a state is loaded next.
        is_torch: Whether the loader is one of torch's class.
    """

    setup: dict[str, str]
    folder: Path
    told: int = 0
    version: int = 0
    order: int = 1
    is_resumed: bool = False
    is_torch: bool = False

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return int(self.setup["world"])

    @property
    def seed(self) -> int | None:
        """Return the seed of the loader."""
        return None if self.setup["seed"] == "none" else _SEED


def dataset_of(plan: Plan) -> tuple[Any, loader_data.Maker]:
    """Return the dataset that a plan names, and what makes its samples."""
    setup = plan.setup
    kind, place = setup["data"], setup["place"]
    holder = setup["holder"]
    draw = loader_draws.draw_of("nothing" if holder == "collate" else setup["draws"], holder)
    form = "tensor" if setup["batch"] in ("views", "raw") else setup["batch"]
    pids = plan.folder / "pids"
    maker = loader_data.Maker(form, draw, str(pids), breaks=setup["failing"] == "skip")
    if kind not in loader_sets.STORED:
        dataset = loader_sets.in_memory(kind, maker, plan.version)
    else:
        layout = loader_sets.layout_of(kind, place)
        decode = loader_data.Decode(maker, plan.version, layout)
        dataset = loader_sets.opened(
            kind, place, plan.folder / "data" / "set", plan.folder / "kept", decode
        )
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(plan.told)
    return dataset, maker


def _sampler_of(plan: Plan) -> dict[str, Any]:
    setup = plan.setup
    kind = setup["sampler"]
    if kind in ("sequence", "shuffle"):
        return {"shuffle": True} if kind == "shuffle" else {}
    if kind == "weights":
        weights = [1.0 + each % 3 for each in range(loader_data.COUNT)]
        return {"sampler": WeightedRandomSampler(weights, loader_data.COUNT)}
    if kind == "distributed":
        shared = DistributedSampler(range(loader_data.COUNT), num_replicas=1, rank=0)
        if not plan.is_resumed:  # a state says it, too
            shared.set_epoch(plan.told)
        return {"sampler": shared}
    if kind == "drawn":
        generator = torch.Generator().manual_seed(3)
        return {"sampler": RandomSampler(range(loader_data.COUNT), generator=generator)}
    if setup["holder"] == "sampler":
        sampler: Any = loader_data.Drawing(setup["draws"].removeprefix("own-"))
    elif kind == "told":
        sampler = loader_data.Told()
        sampler.set_epoch(plan.told)
    else:
        sampler = loader_data.Ordered() if kind == "state" else loader_data.Fixed(plan.order)
    if kind == "batches":
        return {"batch_sampler": loader_data.Batches(sampler, reuses=setup["buffer"] != "none")}
    return {"sampler": sampler}


def loader_of(plan: Plan, dataset: Any, rank: int) -> Any:
    """Return the loader of a rank."""
    setup = plan.setup
    options = _sampler_of(plan)
    is_raw = setup["batch"] == "raw" or setup["data"] == "grouped"
    if "batch_sampler" not in options:
        options["batch_size"] = None if is_raw else loader_data.TOGETHER // plan.world
    has_rows = setup["data"] in ("packed", "grouped")
    draw = None
    if setup["holder"] == "collate":
        draw = loader_draws.draw_of(setup["draws"], "collate")
    needs_one = draw or has_rows or setup["batch"] in ("padded", "views", "arrays")
    if needs_one and setup["batch"] != "raw":
        options["collate_fn"] = loader_data.Collate(
            setup["batch"], draw, rows=setup["data"] == "packed"
        )
    workers = setup["workers"]
    options["num_workers"] = workers if workers == "auto" else int(workers)
    if setup["keep"] == "persistent":
        options["persistent_workers"] = True
    if setup["tail"] == "drop":
        options["drop_last"] = True
    if plan.is_torch:
        return DataLoader(dataset, **options)
    if setup["tail"] in ("uneven", "fill"):
        options["tail"] = setup["tail"]
    if plan.world > 1:
        options |= {"world_size": plan.world, "rank": rank}
    if setup["buffer"] != "none":
        options["buffer"] = {
            "bytes": "1MB",
            "batches": forebay.Buffer(max_batches=2, refill_below=1),
            "disk": forebay.Buffer("1MB", directory=plan.folder),
        }[setup["buffer"]]
    if plan.seed is not None:
        options["seed"] = plan.seed
    if setup["backend"] == "thread":
        options["backend"] = "thread"
    elif setup["backend"] == "concurrent":
        options["concurrency"] = 3
    if setup["failing"] == "skip":
        options["on_error"] = "skip"
    return forebay.DataLoader(dataset, **options)
