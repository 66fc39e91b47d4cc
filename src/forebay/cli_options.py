"""Options and arguments that several commands of the command line have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import click

from forebay.base.output_names import TABLE_FORMATS
from forebay.errors import OptionError
from forebay.options import BACKENDS, Ray
from forebay.runs.source_code import load_work, parse_reference


class Reference(click.Path):
    """FILE.py:NAME or MODULE:NAME; the shell completes the file."""

    name = "reference"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value after checking its syntax; nothing is loaded."""
        try:
            parse_reference(value)
        except OptionError as error:
            self.fail(str(error), param, ctx)
        return value


REFERENCE = Reference()
PATH = click.Path(readable=False)  # for the shell to complete; also a URL or a glob


class WorkerCount(click.IntRange):
    """0, 1, 2, …, or "auto"."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or "auto"."""
        return value if value == "auto" else super().convert(value, param, ctx)


def _count_or_fraction(text: str) -> int | float:
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number") from None


def _report_path(path: str | None) -> str | None:
    """Return the path of a report, which is written at the end of what may take a day."""
    if path is not None and not os.path.isdir(os.path.dirname(path) or "."):
        raise click.BadParameter(f"the folder of {path!r} does not exist")
    return path


_COUNT = click.IntRange(1)
CLUSTER = ("address", "num_cpus", "num_gpus")
# Options that several commands have, or that `preprocess` has as arguments: what click is told of
# each. One that is not given is left to the default of the function that is called.
_OPTIONS: dict[str, dict[str, Any]] = {
    "num_workers": {
        "type": WorkerCount(0),
        "help": "Default: one per core.  auto: more while that makes the run faster.",
    },
    "backend": {"type": click.Choice(BACKENDS), "help": "How workers run.  Default: process."},
    "address": {"help": "Address of the Ray cluster; 'auto' finds it."},
    "num_cpus": {"type": float, "help": "CPUs of a worker on a cluster. Default: 1."},
    "num_gpus": {"type": float, "help": "GPUs of a worker on a cluster. Default: 0."},
    "concurrency": {"type": _COUNT, "help": "Inputs that each worker processes at once."},
    "timeout": {"type": float, "help": "Seconds one input may take."},
    "retries": {"type": click.IntRange(0), "help": "Retries of a failed input.  Default: 1."},
    "max_failures": {
        "type": _count_or_fraction,
        "metavar": "N",
        "help": "Stop once more inputs have failed: a count, or a fraction such as 0.01; 0: with "
        "the first error.",
    },
    "limit": {
        "type": _COUNT,
        "help": "Only the first N inputs, in this process, until one fails: to try a function.",
    },
    "redo": {
        "metavar": "PATTERN",
        "multiple": True,
        "help": "Process these inputs again, such as 'rec/*.wav', or '*' for all.  May be given "
        "several times.",
    },
    "metadata": {
        "type": click.Choice(TABLE_FORMATS),
        "help": "Format of the table.  Default: parquet.",
    },
    "save": {
        "metavar": "FILE.py:FUNCTION",
        "type": REFERENCE,
        "help": "Function that writes the files of a Dataset's sample.",
    },
    "load": {
        "metavar": "FILE.py:FUNCTION",
        "type": REFERENCE,
        "help": "Function that makes a sample of a file's path, or of a table's row.",
    },
    "batch_size": {"type": _COUNT, "help": "Samples in a batch.  Default: 64."},
    "device": {"help": "Where the model runs, such as cuda."},
    "version": {"help": "Your name for the state of the function; a new one redoes everything."},
    "overwrite": {
        "is_flag": True,
        "help": "Replace files in OUTPUT that forebay did not make.",
    },
    "accept_changes": {
        "is_flag": True,
        "help": "Keep what is done although the code changed; use the new code for the rest.",
    },
    "report": {
        "metavar": "FILE.html",
        "type": PATH,
        "callback": lambda _, __, path: _report_path(path),
        "help": "Write a report of the run, with charts, when it ends.",
    },
    "quiet": {"is_flag": True, "help": "Show no progress."},
}


def options(*names: str, **helps: str) -> Callable[[Any], Any]:
    """Add options to a command, in this order; `helps` replaces the help of some."""

    def added(command: Any) -> Any:
        for name in reversed(names):
            known = _OPTIONS[name] | ({"help": helps[name]} if name in helps else {})
            command = click.option("--" + name.replace("_", "-"), **known)(command)
        return command

    return added


def shown_options(names: Iterable[str]) -> str:
    """Return options as they are written on the command line."""
    return ", ".join("--" + name.replace("_", "-") for name in names)


def arguments_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call for the options that were given; loads what they name."""
    given = {name: value for name, value in settings.items() if value not in (None, ())}
    cluster = {name: given.pop(name) for name in CLUSTER if name in given}
    if cluster:
        if given.get("backend") != "ray":
            raise click.UsageError(
                f"{shown_options(cluster)} is for --backend ray, which was not given"
            )
        given["backend"] = Ray(**cluster)
    if len(given.get("redo", ())) == 1:
        (given["redo"],) = given["redo"]
    given |= {name: load_work(given[name]) for name in ("save", "load") if name in given}
    return given | {"progress": not given.pop("quiet")}
