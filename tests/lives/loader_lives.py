"""Lives of a loader: how it is made, and what a program does with it.

loader_draws    what samples draw, and who holds what they draw from
loader_data     datasets, streams, samplers and collate functions
loader_sets     memory, caches, shards and buckets
loader_plans    how a loader is made
loader_trainer  the process that trains
loader_oracle   what has to come
loader_history  the steps of a life, judged
loader_known    faults that are known
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .life import Excluded, Life, Say
from .loader_known import KNOWN as KNOWN
from .loader_more import STEPS as STEPS_OF_MORE
from .loader_oracle import STREAMS

NAME = "loader"
LENGTH = 6
LIMIT_S = 30.0

AXES = {
    "data": (
        "map",
        "groups",
        "epochal",
        "stream",
        "stream-shuffled",
        "stream-state",
        "stream-epoch",
        "stream-state-epoch",
        "columns",
        "packed",
        "grouped",
        "mix",
        "cache",
        "tar",
        "parquet",
        "jsonl",
        "arrow",
        "mds",
    ),
    "place": ("local", "compressed", "nested", "bucket", "kept"),
    "draws": ("nothing", "python", "numpy", "torch", "own-python", "own-numpy", "own-torch"),
    "holder": (
        "attribute",
        "list",
        "closure",
        "global",
        "module",
        "helper",
        "collate",
        "sampler",
    ),
    "sampler": (
        *("sequence", "shuffle", "weights", "fixed", "told", "state", "batches"),
        *("distributed", "drawn"),
    ),
    "workers": ("0", "1", "3", "auto"),
    "buffer": ("none", "bytes", "batches", "disk"),
    "seed": ("none", "known"),
    "batch": ("tensor", "nested", "padded", "views", "arrays", "raw", "large"),
    "world": ("1", "2", "3"),
    "tail": ("repeat", "uneven", "fill", "drop"),
    "backend": ("process", "thread", "concurrent"),
    "keep": ("usual", "persistent"),
    "failing": ("none", "skip"),
}

STEPS = (
    "take",
    "rest",
    "leave",
    "state",
    "resume",
    "elsewhere",
    "replay",
    "check",
    "set_epoch",
    "weights",
    "refresh",
    "change",
    "fork",
    "ask_forked",
    "alarm",
    "kill_worker",
    "kill",
    "freeze",
    "cut",
    "silence",
    *STEPS_OF_MORE,
)

_STREAMS = " ".join(STREAMS)
_STORED = "cache tar parquet jsonl arrow mds"
_IN_MEMORY = f"map groups epochal {_STREAMS} columns packed grouped mix"
_OWN = "own-python own-numpy own-torch"
_GLOBAL = "nothing python numpy torch"
_MADE = "told state fixed weights batches distributed drawn"

EXCLUDED = (
    Excluded(
        "only what is stored is in a place",
        {"data": _IN_MEMORY, "place": "compressed nested bucket kept"},
    ),
    Excluded("no columns", {"data": "tar mds", "place": "nested"}),
    Excluded("not written here", {"data": "mds", "place": "compressed"}),
    Excluded("a cache is made from its folder", {"data": "cache", "place": "kept bucket"}),
    Excluded(
        "who holds a global generator",
        {"draws": _GLOBAL, "holder": "list closure global module helper sampler"},
    ),
    Excluded("nothing is drawn", {"draws": "nothing", "holder": "collate"}),
    Excluded(
        "only samplers that draw hold a generator",
        {"holder": "sampler", "sampler": "sequence shuffle weights told state distributed drawn"},
    ),
    *(
        Excluded("the rest of a stream's own order is refused", {"data": "stream-shuffled"}, step)
        for step in ("state", "resume", "elsewhere", "other_workers")
    ),
    Excluded("streams have no sampler", {"data": _STREAMS, "sampler": f"shuffle {_MADE}"}),
    Excluded("streams are not divided among ranks", {"data": _STREAMS, "world": "2 3"}),
    Excluded("streams are divided among workers", {"data": _STREAMS, "workers": "auto"}),
    Excluded("streams are read by processes", {"data": _STREAMS, "backend": "thread concurrent"}),
    Excluded("an iterator ends where it raises", {"data": _STREAMS, "failing": "skip"}),
    Excluded("the order of a mixture is its own", {"data": "mix", "sampler": _MADE}),
    Excluded("samplers of samples, not of rows", {"data": "packed grouped", "sampler": _MADE}),
    Excluded(
        "no function of the user makes samples of columns", {"data": "columns", "failing": "skip"}
    ),
    Excluded(
        "columns have a form of their own",
        {"data": "columns", "batch": "tensor padded views arrays raw large"},
    ),
    Excluded(
        "columns draw nothing by themselves",
        {
            "data": "columns",
            "draws": f"{_OWN} python numpy torch",
            "holder": "attribute list closure global module helper",
        },
    ),
    Excluded("a rank without a sample raises", {"failing": "skip", "world": "3"}),
    Excluded(
        "ranks are processes: side by side in one, their threads share its generators",
        {"backend": "thread concurrent", "world": "2 3"},
    ),
    Excluded("a row without its samples", {"data": "packed grouped mix", "failing": "skip"}),
    Excluded("rows are batches", {"data": "packed grouped", "batch": "raw"}),
    Excluded("a batch without a sample is left out", {"batch": "raw", "failing": "skip"}),
    Excluded("samples one by one", {"batch": "raw", "holder": "collate"}),
    Excluded("samples one by one", {"batch": "raw", "world": "2 3"}),
    Excluded("samples one by one", {"batch": "raw", "tail": "drop uneven fill"}),
    Excluded("samples one by one", {"batch": "raw", "sampler": "batches"}),
    Excluded("samples one by one", {"batch": "raw", "data": "groups"}),
    Excluded("a row is a batch", {"data": "grouped", "tail": "drop uneven fill"}),
    Excluded("a sampler of one rank", {"sampler": "distributed", "world": "2 3"}),
    Excluded("batches of the user's own", {"sampler": "batches", "world": "2 3"}),
    Excluded("batches of the user's own", {"sampler": "batches", "tail": "drop uneven fill"}),
    Excluded("a batch of one rank with its tail", {"tail": "uneven fill", "world": "1"}),
    Excluded("without workers", {"workers": "0", "keep": "persistent"}),
    Excluded("whole batches are asked for at once", {"data": "groups", "backend": "concurrent"}),
    Excluded(
        "slices and blocks are not fetched by samples",
        {"data": f"columns {_STORED}", "backend": "concurrent"},
    ),
    Excluded(
        "threads have no shared memory to be on a disk", {"backend": "thread", "buffer": "disk"}
    ),
    Excluded(
        "rows count the tokens of samples",
        {"data": "packed grouped", "batch": "tensor nested views arrays large"},
    ),
)


def applies(step: str, setup: Mapping[str, str]) -> bool:
    """Return whether a step means something with a setup."""
    if step == "weights":
        return setup["data"] == "mix"
    if step in ("cut", "silence"):
        return setup["place"] in ("bucket", "kept")
    if step == "kill_worker":
        return setup["workers"] not in ("0",) and setup["backend"] != "thread"
    if step == "alarm" and (setup["world"] != "1" or setup["place"] in ("bucket", "kept")):
        return False  # ranks are processes; libraries for buckets may lose an exception
    if step == "alarm" and setup["failing"] == "skip":
        return False  # an exception in a sample is that sample's failure
    if step == "change":
        return setup["data"] != "columns"
    if step in ("leave", "alarm"):
        # What knows where it is goes on from there, as with torch.
        return setup["sampler"] != "state" and "state" not in setup["data"]
    return True


def cost(setup: Mapping[str, str]) -> float:
    """Return how long a life takes, relative to others: a bucket is read by a process."""
    return {"bucket": 8.0, "kept": 8.0}.get(setup["place"], 1.0) + int(setup["world"])


def prepare() -> None:
    """Import what all lives use."""
    import boto3  # noqa: F401
    import obstore.store  # noqa: F401
    import pandas  # noqa: F401
    import s3fs  # noqa: F401
    import torch

    from .loader_rehearsal import rehearse

    torch.set_num_threads(1)
    rehearse(AXES)


def prepare_for(life: Life) -> None:
    """Loaders share nothing."""


def live(life: Life, folder: Path, say: Say) -> None:
    """Live a life in an empty folder."""
    from .loader_history import History

    with History(life, folder, say) as history:
        for step in life.steps:
            history.take_step(step)
        history.end()
