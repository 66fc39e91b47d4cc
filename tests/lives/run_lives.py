"""Run lives: preprocess, cache and predict, while inputs and outputs change and processes die.

run_functions  PURE: the user's script, and what it makes of an input
run_inputs     the inputs, on the disk and as they are given
run_driver     the process that makes a call
run_ray        the cluster of calls on Ray
run_history    the steps; `run_more` has others
run_model      what should have been made so far
run_oracle     what has to be there afterwards
"""

from __future__ import annotations

import functools
import gc
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from large_pages import use_large_pages

from . import run_functions, run_more
from .life import Excluded, Life, Say, Step
from .run_driver import rehearse
from .run_history import History
from .run_ray import start_cluster

# Values of axes, as `Excluded` takes them.
CALLS = "preprocess predict cache"
MAKERS = "predict cache"
FILES = " ".join(run_functions.LEAVES[1:])
NOT_PLAIN = " ".join(run_functions.KINDS[1:])
NOT_NONE = " ".join(run_functions.RETURNS[1:])
NO_SHARDS = "folder glob str path rows rows2 csv url dataset subset"

NAME = "run"
AXES = {
    "call": ("preprocess", "predict", "cache", "index_shards"),
    "inputs": (*NO_SHARDS.split(), "shards"),
    "function": run_functions.KINDS,
    "returns": run_functions.RETURNS,
    "leaves": run_functions.LEAVES,
    "workers": ("1", "2"),
    "backend": ("process", "thread", "ray"),
    "failing": ("no", "raises", "odd", "dies", "broken", "flaky", "open", "slow", "model"),
}
STEPS = (
    "run",
    "add",
    "change",
    "touch",
    "remove",
    "rename",
    "relocate",
    "unmount",
    "mount",
    "delete_output",
    "delete_output_unmounted",
    "change_output",
    "move_outputs",
    "version",
    "restart",
    "restart_unmounted",
    "redo",
    "retry",
    "verify",
    "prune",
    "status",
    "kill",
    "kill_worker",
    "interrupt",
    "twice",
    "full",
    *run_more.STEPS,
)
LENGTH = 6
LIMIT_S = 30.0
EXCLUDED = (
    Excluded("threads die with their process", {"backend": "thread", "failing": "dies"}),
    Excluded("there is no worker process", {"backend": "thread"}, "kill_worker"),
    Excluded("what cannot be pickled is forked", {"backend": "ray", "function": "lock"}),
    Excluded("workers of Ray are no processes of the driver", {"backend": "ray"}, "kill_worker"),
    Excluded("the limit is one of the driver", {"backend": "ray"}, "full"),
    Excluded("threads leave files open in the driver", {"backend": "thread", "failing": "open"}),
    Excluded("no file is left open", {"leaves": "nothing", "failing": "open"}),
    Excluded("no function is called", {"call": "index_shards", "failing": "flaky open slow"}),
    Excluded("no model is called", {"call": "preprocess cache index_shards", "failing": "model"}),
    Excluded("a sample is tried once", {"call": "predict cache", "failing": "flaky"}),
    *(
        Excluded("only preprocess names outputs", {"call": "predict cache index_shards"}, step)
        for step in run_more.STEPS
    ),
    *(
        Excluded("shards have many samples", {"inputs": "shards subset"}, step)
        for step in run_more.STEPS
    ),
    # What a call takes.
    Excluded("a cache is of a Dataset", {"call": "cache", "inputs": "glob str path url"}),
    Excluded("only preprocess has files", {"call": "cache predict index_shards", "leaves": FILES}),
    Excluded("a prediction has a value", {"call": "predict", "returns": "none"}),
    Excluded("shards are indexed", {"call": "index_shards", "inputs": NO_SHARDS}),
    Excluded("no function is called", {"call": "index_shards", "function": NOT_PLAIN}),
    Excluded("no function is called", {"call": "index_shards", "returns": NOT_NONE}),
    Excluded("no function is called", {"call": "index_shards", "failing": "raises odd dies"}),
    Excluded("only a shard is broken", {"call": "preprocess predict cache", "failing": "broken"}),
    Excluded("inputs are named", {"call": "predict cache index_shards"}, "redo"),
    Excluded("there is nothing to start over", {"call": "index_shards"}, "restart"),
    Excluded("there is nothing to start over", {"call": "index_shards"}, "restart_unmounted"),
    Excluded("there is no function", {"call": "index_shards"}, "version"),
    Excluded("the same call tries again", {"call": "cache index_shards"}, "retry"),
    Excluded(
        "the Dataset is not at module level",
        {"call": "preprocess", "inputs": "dataset subset shards"},
        "retry",
    ),
    Excluded("a cache with a damaged shard is an error", {"call": "cache"}, "change_output"),
    # Samples without names: what they are of is not known.
    Excluded("a change is not noticed", {"inputs": "subset"}, "change"),
    Excluded("a change is not noticed", {"inputs": "subset"}, "touch"),
    Excluded("nor that a file is away", {"inputs": "subset"}, "restart_unmounted"),
    Excluded("nor that a file is away", {"inputs": "subset"}, "delete_output_unmounted"),
    Excluded("a number is a place", {"inputs": "subset"}, "rename"),
    Excluded("a number is a place", {"inputs": "subset"}, "relocate"),
    Excluded("to leave samples out is refused", {"inputs": "subset", "call": MAKERS}, "remove"),
    # The model does not say when what was away is made again.
    Excluded("it is made once its input is back", {}, "delete_output_unmounted"),
    Excluded("it is made once its input is back", {}, "restart_unmounted"),
    Excluded("samples of shards are named by shard and number", {"inputs": "shards"}, "redo"),
)
KNOWN = (
    Excluded(
        "a file that was left open is not noticed where names are mended",
        {"leaves": "list", "failing": "open"},
    ),
    Excluded(
        "rows are missing after a kill with a model that fails",
        {"call": "predict", "failing": "model"},
        "kill",
    ),
    Excluded("a value that fails in one column is none in others", {"failing": "odd"}),
)


_REHEARSED = (
    *(("preprocess", inputs) for inputs in ("csv", "url", "shards")),
    *(("predict", inputs) for inputs in ("folder", "csv", "url")),
    ("cache", "folder"),
    ("index_shards", "shards"),
)


def cost(setup: Mapping[str, str]) -> float:
    """Return how long a life takes, relative to others: each driver joins the cluster."""
    return 8.0 if setup["backend"] == "ray" else 1.0


def limit_s(setup: Mapping[str, str]) -> float:
    """Return after how many seconds a life hangs, on an idle machine."""
    return LIMIT_S * cost(setup)


def applies(step: str, setup: Mapping[str, str]) -> bool:
    """Return whether a step means something with a setup."""
    return True


@functools.cache
def prepare() -> None:
    """Import what calls use, by making small ones."""
    before = os.getcwd()
    simplest = {axis: values[0] for axis, values in AXES.items()} | {"returns": "dict"}
    for call, inputs in _REHEARSED:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                setup = simplest | {"call": call, "inputs": inputs}
                rehearse(History(Life(NAME, "0", setup, []), lambda sentence: None).call())
            finally:
                os.chdir(before)
    gc.collect()
    gc.freeze()  # what is imported is not copied by each process's collections
    use_large_pages()


def prepare_for(life: Life) -> None:
    """Start the cluster, for the first life that needs it."""
    if life.setup["backend"] == "ray":
        start_cluster()


def live(life: Life, folder: Path, say: Say) -> None:
    """Live a life in an empty folder, which is the working folder."""
    history = History(life, say)
    if life.steps and life.steps[0].name not in ("run", "kill", "interrupt", "full", "twice"):
        history.do(Step("run"))
    for step in life.steps:
        history.do(step)
    history.end()
