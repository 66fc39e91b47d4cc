"""The command line: preprocess, predict, status, failures, retry, verify.

Exit codes: 0 all done, 3 finished with failures (or `verify` found something wrong), 1 could not
run or was stopped early, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any, NoReturn

import click

from forebay import __version__
from forebay.errors import ForebayError, OptionError
from forebay.jobs.commits import settle
from forebay.jobs.manifest import SUFFIXES
from forebay.jobs.output_names import table_name
from forebay.jobs.places import look_at, open_place
from forebay.jobs.reference import load_work
from forebay.jobs.status import Snapshot
from forebay.jobs.verify import verify as hold_against
from forebay.observe.progress import duration
from forebay.options import BACKENDS, TABLE_FORMATS, Ray
from forebay.predict import predict
from forebay.preprocess import preprocess, retry

DONE, COULD_NOT_RUN, USAGE, FAILURES, INTERRUPTED = 0, 1, 2, 3, 130

_workers = click.option("--num-workers", type=click.IntRange(0), help="Default: one a core.")


def _backend(command: Any) -> Any:
    """Give a command the options that say where workers run."""
    for option in (
        click.option("--num-gpus", type=float, help="GPUs of a worker on a cluster. Default: 0."),
        click.option("--num-cpus", type=float, help="CPUs of a worker on a cluster. Default: 1."),
        click.option("--address", help="The cluster's, for --backend ray; 'auto' finds it."),
        click.option("--backend", type=click.Choice(BACKENDS), default="process"),
    ):
        command = option(command)
    return command


_timeout = click.option("--timeout", type=float, help="Seconds one input may take.")
_retries = click.option(
    "--retries", type=click.IntRange(0), help="Further tries.  Default: 1; with --limit, 0."
)
_version = click.option(
    "--version", help="Your name for the state of the function; a new one redoes everything."
)
_quiet = click.option("--quiet", is_flag=True, help="Show no progress.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="forebay")
def cli() -> None:
    """Make data ready: a function over every input, on every core, resumably."""


@cli.command("preprocess", context_settings={"allow_extra_args": True})
@click.argument("work", metavar="MODULE_OR_FILE:FUNCTION")
@click.argument("inputs")
@click.argument("output")
@_workers
@_backend
@_timeout
@_retries
@click.option(
    "--on-error", type=click.Choice(["skip", "raise"]), help="Default: skip; with --limit, raise."
)
@click.option("--max-failures", help="Stop after more: a count, or a fraction such as 0.01.")
@click.option(
    "--limit",
    type=click.IntRange(1),
    help="Only the first N inputs, in this process: to try a function.",
)
@click.option("--restart", is_flag=True, help="Forget the earlier run; remove its outputs.")
@click.option("--metadata", type=click.Choice(TABLE_FORMATS), default="parquet")
@_version
@_quiet
def preprocess_command(
    work: str,
    inputs: str,
    output: str,
    max_failures: str | None,
    restart: bool,
    quiet: bool,
    **settings: Any,
) -> int:
    """Call FUNCTION(source, out) for every one of INPUTS; publish its files in OUTPUT.

    INPUTS is a folder, a glob (quote it), or a manifest: .csv, .jsonl or .parquet.
    The same command again continues where it stopped.
    """
    if more := click.get_current_context().args:
        given = [inputs, output, *more]
        raise click.UsageError(
            f"{len(given)} paths were given, where INPUTS and OUTPUT are two. If you wrote a glob, "
            f"the shell has put its matches there: quote it, as in '*.wav'. Got {given[0]} … "
            f"{given[-1]}"
        )
    report = preprocess(
        load_work(work),
        inputs,
        output,
        max_failures=_count_or_fraction(max_failures),
        resume=not restart,
        progress=not quiet,
        **_with_backend(settings),
    )
    click.echo(repr(report))
    return FAILURES if report.failed else DONE


@cli.command("predict")
@click.argument("model", metavar="MODULE_OR_FILE:MODEL")
@click.argument("data")
@click.argument("output")
@click.option("--batch-size", type=click.IntRange(1), help="Samples of a batch.  Default: 64.")
@_workers
@click.option("--device", help="Where the model runs, such as cuda.")
@_backend
@click.option("--load", metavar="MODULE_OR_FILE:FUNCTION", help="Makes a sample of a table's row.")
@click.option("--timeout", type=float, help="Seconds one batch may take.")
@click.option("--restart", is_flag=True, help="Forget the earlier run; remove its predictions.")
@_version
@_quiet
def predict_command(
    model: str,
    data: str,
    output: str,
    load: str | None,
    restart: bool,
    quiet: bool,
    **settings: Any,
) -> int:
    """Run MODEL over every sample of DATA; write Parquet parts to OUTPUT.

    MODEL is a module, a function of a batch, or a class or function that makes one. DATA is
    FILE:DATASET, or a table (.csv, .jsonl, .parquet; or the folder preprocess wrote one to), whose
    rows --load makes samples of.
    The same command again continues where it stopped.
    """
    is_table = os.path.exists(data) or data.endswith(SUFFIXES)
    report = predict(
        load_work(model),
        data if is_table else load_work(data),
        output,
        load=None if load is None else load_work(load),
        resume=not restart,
        progress=not quiet,
        **_with_backend(settings),
    )
    click.echo(repr(report))
    return FAILURES if report.failed else DONE


@cli.command("retry")
@click.argument("output")
@click.option("--work", metavar="MODULE_OR_FILE:FUNCTION", help="Default: as in the earlier run.")
@_workers
@_backend
@_timeout
@_retries
@_version
@_quiet
def retry_command(output: str, work: str | None, quiet: bool, **settings: Any) -> int:
    """Try the failed inputs of OUTPUT again, and nothing else."""
    if work is None:
        described = look_at(output).meta.get("work", "{}")
        work = json.loads(described).get("reference")
    if work is None:
        raise OptionError(
            "the earlier run's function cannot be found by name: it was a Dataset, a lambda, or "
            "from a notebook\n  Name it with --work, or make the same call again from Python."
        )
    report = retry(load_work(work), output, progress=not quiet, **_with_backend(settings))
    click.echo(repr(report))
    return FAILURES if report.failed else DONE


@cli.command("status")
@click.argument("output")
def status_command(output: str) -> int:
    """Tell how far the run in OUTPUT is, also while it runs."""
    click.echo(_status(look_at(output), time.time()))
    return DONE


@cli.command("failures")
@click.argument("output")
@click.option("--traceback", is_flag=True, help="With the frames of each.")
def failures_command(output: str, traceback: bool) -> int:
    """List the failed inputs of OUTPUT, also while it runs."""
    snapshot = look_at(output)
    for failure in snapshot.failures:
        click.echo(str(failure))
        if traceback:
            rest = [*failure.message.splitlines()[1:], *failure.traceback.splitlines()]
            click.echo("".join(f"    {line}\n" for line in rest), nl=False)
    click.echo(f"{len(snapshot.failures):,} failed", err=True)
    return DONE


@cli.command("verify")
@click.argument("output")
def verify_command(output: str) -> int:
    """Prove that every recorded output is there, whole, and that nothing else is.

    Inputs whose outputs are missing or altered are set to be redone: repeat the command that
    made them.
    """
    look_at(output)  # a folder that is no output of forebay's is left alone
    folder = open_place(output)
    with folder.ledger("verify") as ledger:
        lost = settle(ledger, folder)
        own = frozenset(map(table_name, ledger.tables()))
        result = hold_against(ledger.outputs(), folder.files(), own)
        ledger.mark_todo(result.damaged)
    for name in (*lost, *result.missing):
        click.echo(f"missing  {name}")
    for name, recorded, actual in result.altered:
        click.echo(f"altered  {name}: {recorded:,} bytes recorded, {actual:,} found")
    for name in result.orphans:
        click.echo(f"orphan   {name}: no input is known to have made it")
    click.echo(
        f"{_counted(result.checked, 'output')} checked: "
        f"{len(lost) + len(result.missing):,} missing, "
        f"{len(result.altered):,} altered, {_counted(len(result.orphans), 'orphan')}"
    )
    if result.damaged:
        click.echo(f"{_counted(len(result.damaged), 'input')} will be redone by the next run")
    return DONE if result.is_sound and not lost else FAILURES


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo(
            "forebay: interrupted; what was done is kept, the same command continues", err=True
        )
        code = INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = USAGE
    except OptionError as error:
        click.echo(f"forebay: {error}", err=True)
        code = USAGE
    except ForebayError as error:
        click.echo(f"forebay: {error}", err=True)
        code = COULD_NOT_RUN
    sys.exit(code)


def _interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _with_backend(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the cluster, if one is meant, as their backend."""
    names = ("address", "num_cpus", "num_gpus")
    cluster = {name: value for name in names if (value := settings.pop(name)) is not None}
    if cluster and settings["backend"] != "ray":
        options = ", ".join("--" + name.replace("_", "-") for name in cluster)
        raise click.UsageError(f"{options} is for --backend ray, which was not given")
    return {**settings, "backend": Ray(**cluster)} if cluster else settings


def _count_or_fraction(text: str | None) -> int | float | None:
    if text is None:
        return None
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no number", param_hint="--max-failures") from None


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _status(snapshot: Snapshot, now: float) -> str:
    counts = snapshot.counts
    lines = [
        f"{counts.done:,} of {counts.total:,} done, {counts.failed:,} failed, {counts.todo:,} to do"
    ]
    run = json.loads(snapshot.meta.get("run", "{}"))
    if snapshot.live is not None:
        elapsed = max(now - run.get("began", now), 1e-9)
        rate = (counts.done + counts.failed - run.get("done", 0)) / elapsed
        left = duration(counts.todo / rate) if rate > 0 else "unknown"
        lines.append(f"running: {snapshot.live}")
        lines.append(f"{rate:,.1f} inputs/s, {left} left")
    elif counts.todo:
        lines.append("not running; the same call continues it")
    else:
        lines.append("finished")
    return "\n".join(lines)
