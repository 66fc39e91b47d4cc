"""Arguments and options that several commands of the command line share."""

from __future__ import annotations

from typing import Any

import click

from forebay.errors import OptionError
from forebay.jobs.user_code.reference import parse_reference
from forebay.options import BACKENDS, Ray


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


num_workers = click.option(
    "--num-workers",
    type=WorkerCount(0),
    help="Default: one per core.  auto: more while that makes the run faster.",
)


def backend(command: Any) -> Any:
    """Add the options that select where workers run to a command."""
    for option in (
        click.option("--num-gpus", type=float, help="GPUs of a worker on a cluster. Default: 0."),
        click.option("--num-cpus", type=float, help="CPUs of a worker on a cluster. Default: 1."),
        click.option("--address", help="Address of the Ray cluster; 'auto' finds it."),
        click.option("--backend", type=click.Choice(BACKENDS), default="process"),
    ):
        command = option(command)
    return command


timeout = click.option("--timeout", type=float, help="Seconds one input may take.")
retries = click.option(
    "--retries", type=click.IntRange(0), help="Retries of a failed input.  Default: 1."
)
version = click.option(
    "--version", help="Your name for the state of the function; a new one redoes everything."
)
quiet = click.option("--quiet", is_flag=True, help="Show no progress.")
save = click.option(
    "--save",
    metavar="FILE.py:FUNCTION",
    type=REFERENCE,
    help="Function that writes the files of a Dataset's sample.",
)
load = click.option(
    "--load",
    metavar="FILE.py:FUNCTION",
    type=REFERENCE,
    help="Function that makes a sample from a table's row.",
)
batch_size = click.option(
    "--batch-size", type=click.IntRange(1), help="Samples in a batch.  Default: 64."
)
device = click.option("--device", help="Where the model runs, such as cuda.")


def with_backend(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings in which the options of a cluster are combined into the backend."""
    names = ("address", "num_cpus", "num_gpus")
    cluster = {name: value for name in names if (value := settings.pop(name)) is not None}
    if cluster and settings["backend"] != "ray":
        options = ", ".join("--" + name.replace("_", "-") for name in cluster)
        raise click.UsageError(f"{options} is for --backend ray, which was not given")
    return {**settings, "backend": Ray(**cluster)} if cluster else settings
