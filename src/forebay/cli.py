"""The command line: preprocess, predict, retry, status, failures, verify, top, compare.

Exit codes: 0 all done, 3 finished with failures (or `verify` found something wrong), 1 could not
run or was stopped early, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import sys
import traceback
from typing import Any, NoReturn

import click

from forebay import __version__
from forebay import cli_options as options
from forebay.cli_look import (
    INTERRUPTED,
    compare_command,
    failures_command,
    status_command,
    top_command,
)
from forebay.errors import ForebayError, OptionError
from forebay.formats import SHARD_BYTES, TABLE_FORMATS
from forebay.jobs.inputs.manifest import SUFFIXES
from forebay.jobs.outputs.commits import perform_pending
from forebay.jobs.outputs.output_places import open_place, snapshot_of
from forebay.jobs.user_code.fingerprint import Fingerprint
from forebay.jobs.user_code.reference import load_work
from forebay.jobs.verification import verify as verify_outputs
from forebay.predict import predict
from forebay.preprocess import preprocess, retry
from forebay.sample_names import is_map_style
from forebay.sample_ranges import verb_of
from forebay.units import counted

DONE, COULD_NOT_RUN, USAGE, FAILURES = 0, 1, 2, 3
# The commands that continue when they are given again after Ctrl-C.
_CONTINUED = ("preprocess", "predict", "retry")
# The arguments of `retry`, by the entry point that made the folder.
_RETRIED = {"preprocess": ["FUNCTION"], "predict": ["MODEL", "DATA"], "cache": ["DATASET"]}
# The options of `retry` that do not apply to it.
_NOT_RETRIED_WITH = {
    "preprocess": ["load", "batch_size", "device"],
    "predict": ["retries", "save"],
    "cache": ["load", "batch_size", "device", "save"],
}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="forebay")
def cli() -> None:
    """Prepare data: run a function on every input, on every core, resumably."""


@cli.command("preprocess", short_help="Run a function on every input.")
@click.argument("work", metavar="FILE.py:FUNCTION", type=options.REFERENCE)
@click.argument("paths", metavar="[INPUTS] OUTPUT", nargs=-1, required=True, type=options.PATH)
@options.num_workers
@options.backend
@options.timeout
@options.retries
@click.option(
    "--on-error", type=click.Choice(["skip", "raise"]), help="Default: skip; with --limit, raise."
)
@click.option("--max-failures", help="Stop after more: a count, or a fraction such as 0.01.")
@click.option(
    "--limit",
    type=click.IntRange(1),
    help="Only the first N inputs, in this process, until one fails: to try a function.",
)
@click.option("--restart", is_flag=True, help="Forget the earlier run; remove its outputs.")
@click.option("--metadata", type=click.Choice(TABLE_FORMATS), default="parquet")
@click.option(
    "--shard-bytes",
    type=click.IntRange(1),
    default=SHARD_BYTES,
    help="About how large a tar file of packed outputs is.",
)
@options.save
@options.version
@options.quiet
def preprocess_command(
    work: str,
    paths: tuple[str, ...],
    max_failures: str | None,
    restart: bool,
    save: str | None,
    quiet: bool,
    **settings: Any,
) -> int:
    """Call FUNCTION(source, out) for each of INPUTS; publish its files in OUTPUT.

    INPUTS is a folder, a glob (quote it), a manifest (.csv, .jsonl or .parquet), or the OUTPUT of
    an earlier step, which stands for its table. FILE.py:DATASET in place of FUNCTION has its own
    inputs: leave INPUTS out; --save names the function(sample, out) that writes its files.
    MODULE:NAME works as well as FILE.py:NAME.

    The same command again continues where it stopped.
    """
    if len(paths) > 2:
        raise click.UsageError(
            f"{len(paths)} paths were given instead of two, INPUTS and OUTPUT. If you wrote a "
            "glob, the shell replaced it with its matches: quote it, as in '*.wav'. Got "
            f"{paths[0]} … {paths[-1]}"
        )
    loaded = load_work(work)
    if is_map_style(loaded) != (len(paths) == 1):
        raise click.UsageError(
            f"{work} is a Dataset, which has its own inputs: give only OUTPUT"
            if is_map_style(loaded)
            else f"{work} is a function, which needs INPUTS and OUTPUT; got only {paths[0]!r}"
        )
    report = preprocess(
        loaded,
        *(None, *paths)[-2:],
        save=None if save is None else load_work(save),
        max_failures=_count_or_fraction(max_failures),
        resume=not restart,
        progress=not quiet,
        **options.with_backend(settings),
    )
    click.echo(repr(report))
    return FAILURES if report.failed else DONE


@cli.command("predict", short_help="Run a model on every sample.")
@click.argument("model", metavar="FILE.py:MODEL", type=options.REFERENCE)
@click.argument("data", type=options.PATH)
@click.argument("output", type=options.PATH)
@options.batch_size
@options.num_workers
@options.device
@options.backend
@options.load
@click.option("--timeout", type=float, help="Seconds one batch may take.")
@click.option("--restart", is_flag=True, help="Forget the earlier run; remove its predictions.")
@options.version
@options.quiet
def predict_command(model: str, data: str, output: str, restart: bool, **settings: Any) -> int:
    """Run MODEL over every sample of DATA; write Parquet parts to OUTPUT.

    MODEL is a module, a function of a batch, or a class or function that makes one. DATA is
    FILE.py:DATASET, or a table (.csv, .jsonl, .parquet; or the folder that preprocess wrote one
    to; or the URL of either), whose rows --load makes samples of.

    The same command again continues where it stopped; samples that failed are left to `retry`.
    """
    return _predict(model, data, output, resume=not restart, **settings)


def _predict(
    model: str, data: str, output: str, *, load: str | None, quiet: bool, **settings: Any
) -> int:
    is_table = os.path.exists(data) or data.endswith(SUFFIXES) or "://" in data
    report = predict(
        load_work(model),
        data if is_table else load_work(data),
        output,
        load=None if load is None else load_work(load),
        progress=not quiet,
        **options.with_backend(settings),
    )
    click.echo(repr(report))
    return FAILURES if report.failed else DONE


@cli.command("retry", short_help="Try failed inputs or samples again.")
@click.argument("output", type=options.PATH)
@click.argument("names", metavar="[FUNCTION | MODEL DATA | DATASET]", nargs=-1, type=options.PATH)
@options.batch_size
@options.num_workers
@options.device
@options.backend
@options.load
@options.save
@options.timeout
@options.retries
@options.version
@options.quiet
def retry_command(output: str, names: tuple[str, ...], quiet: bool, **settings: Any) -> int:
    """Try failed inputs or samples of OUTPUT again, and nothing else.

    Name what the earlier run worked with, as in its command: the FUNCTION or DATASET (and --save)
    of preprocess, the MODEL and DATA of predict, or the DATASET of cache. A folder is data: no code
    is loaded because a folder names it. Without a name, retry shows what is recorded.
    """
    meta = snapshot_of(output).meta
    verb = verb_of(meta)
    if len(names) != len(_RETRIED[verb]):
        raise OptionError(_how_to_retry(verb, output, meta))
    if unfit := [name for name in _NOT_RETRIED_WITH[verb] if settings.pop(name) is not None]:
        given = ", ".join("--" + name.replace("_", "-") for name in unfit)
        raise click.UsageError(f"{given} does not apply to {verb}, the command that made {output}")
    if verb == "predict":
        model, data = names
        return _predict(model, data, output, retry_failed=True, quiet=quiet, **settings)
    work, settings = load_work(names[0]), {**options.with_backend(settings), "progress": not quiet}
    if verb == "cache":
        from forebay.cache import cache

        click.echo(repr(cache(work, output, **settings)))
        return DONE
    save = settings.pop("save")
    report = retry(work, output, save=None if save is None else load_work(save), **settings)
    click.echo(repr(report))
    return FAILURES if report.failed else DONE


@cli.command("verify", short_help="Check the output files of a run.")
@click.argument("output", type=options.PATH)
def verify_command(output: str) -> int:
    """Check that every recorded output exists unaltered, and that there are no other files.

    Inputs whose outputs are missing or altered are set to be redone: repeat the command that
    made them.
    """
    snapshot_of(output)  # leave alone a folder that forebay did not make
    folder = open_place(output)
    with folder.ledger("verify") as ledger:
        lost = perform_pending(ledger, folder)
        found = [*folder.files(), *folder.packed_outputs(ledger)]
        result = verify_outputs(ledger.outputs(), found, frozenset(ledger.own_files()))
        ledger.mark_todo(result.damaged)
    for name in (*lost, *result.missing):
        click.echo(f"missing  {name}")
    for name, recorded, actual in result.altered:
        click.echo(f"altered  {name}: {recorded:,} bytes recorded, {actual:,} found")
    for name in result.orphans:
        click.echo(f"orphan   {name}: no input is known to have made it")
    click.echo(
        f"{counted(result.checked, 'output')} checked: "
        f"{len(lost) + len(result.missing):,} missing, "
        f"{len(result.altered):,} altered, {counted(len(result.orphans), 'orphan')}"
    )
    if result.damaged:
        click.echo(f"{counted(len(result.damaged), 'input')} will be redone by the next run")
    return DONE if result.is_sound and not lost else FAILURES


for command in (status_command, failures_command, top_command, compare_command):
    cli.add_command(command)


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    signal.signal(signal.SIGTERM, _interrupted)
    _let_stdout_take_all()
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        again = "the same command" + (" without --restart" if "--restart" in sys.argv else "")
        continued = f"; completed work is kept, {again} continues"
        is_continued = sys.argv[1:2] and sys.argv[1] in _CONTINUED
        click.echo(f"forebay: interrupted{continued if is_continued else ''}", err=True)
        code = INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = USAGE
    except ForebayError as error:
        click.echo(f"forebay: {error}", err=True)
        code = USAGE if isinstance(error, OptionError) else COULD_NOT_RUN
    except OSError as error:
        if not _is_of_stdout(error):
            raise
        click.echo(f"forebay: cannot write to stdout: {error.strerror}", err=True)
        # What is left in the buffer would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = COULD_NOT_RUN
    sys.exit(code)


def _is_of_stdout(error: OSError) -> bool:
    """Whether writing to stdout failed: everything is printed by click's `echo`."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return innermost.f_code is click.echo.__code__


def _let_stdout_take_all() -> None:
    """Escape what the encoding of stdout lacks: names may be anything. A closed one takes all."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _count_or_fraction(text: str | None) -> int | float | None:
    if text is None:
        return None
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number", param_hint="--max-failures") from None


def _how_to_retry(verb: str, output: str, meta: dict[str, str]) -> str:
    """Return the message with the arguments of `retry`, and the recorded name of the function."""
    wanted, recorded = _RETRIED[verb], ""
    if "work" in meta:
        found = Fingerprint.from_json(meta["work"])
        recorded = f"  The folder says that it was {found.name!r}. If you trust that:\n"
        if verb == "preprocess" and found.reference and found.reference.isprintable():
            wanted = [found.reference]
    return (
        f"retry loads no code because a folder names it: give it the {' and '.join(_RETRIED[verb])}"
        f" of the earlier run\n{recorded}  {shlex.join(['forebay', 'retry', output, *wanted])}"
    )
