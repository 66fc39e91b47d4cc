"""The command line: its commands, their exit codes, and what Ctrl-C does."""

from __future__ import annotations

import glob
import inspect
import io
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import click

import forebay
from forebay.base.datasets import is_map_style
from forebay.base.files import is_url
from forebay.base.formatting import byte_size, counted
from forebay.base.output_names import SUFFIXES, path_elsewhere
from forebay.cli_doctor import doctor_command
from forebay.cli_options import CLUSTER, PATH, REFERENCE, arguments_of, options, shown_options
from forebay.cli_status import (
    INTERRUPTED,
    failures_command,
    status_command,
    top_command,
)
from forebay.errors import (
    ForebayError,
    OptionError,
    printable,
    shown_location,
)
from forebay.outputs.places import snapshot_of
from forebay.predicting.predict import predict
from forebay.runs.calls import open_place, recorded_settings, settings_shown
from forebay.runs.commits import perform_pending
from forebay.runs.fingerprint import Fingerprint
from forebay.runs.preprocess import preprocess, retry
from forebay.runs.ranges import is_index, verb_of
from forebay.runs.source_code import load_work


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(forebay.__version__, prog_name="forebay")
def cli() -> None:
    """Preprocess and predict, resumably, on every core; look at runs, loaders and reports."""


for command in (status_command, failures_command, top_command, doctor_command):
    cli.add_command(command)


# Exit codes: 0 all done, 3 finished with failures (or `verify` found something wrong), 1 could not
# run or was stopped early, 2 wrong usage, 130 interrupted.

DONE, COULD_NOT_RUN, USAGE, FAILURES = 0, 1, 2, 3
# The commands that continue when they are given again after Ctrl-C.
_CONTINUED = ("preprocess", "predict", "retry", "index")
# The arguments of `retry`, by the entry point that made the folder.
_RETRIED = {"preprocess": ["FUNCTION"], "predict": ["MODEL", "DATA"], "cache": ["DATASET"]}


@cli.command("preprocess", short_help="Run a function on every input.")
@click.argument("work", metavar="FILE.py:FUNCTION", type=REFERENCE)
@click.argument("paths", metavar="[INPUTS] OUTPUT", nargs=-1, required=True, type=PATH)
@options("num_workers", "concurrency", "backend", *CLUSTER, "timeout", "retries")
@options("max_failures", "limit", "redo", "metadata", "save", "batch_size")
@options("overwrite")
@options(
    *("version", "accept_changes", "report", "quiet"),
    batch_size="Call FUNCTION with lists of at most so many inputs.",
)
def preprocess_command(
    work: str, paths: tuple[str, ...], report: str | None, **settings: Any
) -> int:
    """Call FUNCTION(source), or FUNCTION(source, out), for each of INPUTS; publish files in OUTPUT.

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
            f"{shown_location(paths[0])} … {shown_location(paths[-1])}"
        )
    loaded = load_work(work)
    if is_map_style(loaded) != (len(paths) == 1):
        raise click.UsageError(
            f"{work} is a Dataset, which has its own inputs: give only OUTPUT"
            if is_map_style(loaded)
            else f"{work} is a function, which needs INPUTS and OUTPUT; got only "
            + repr(shown_location(paths[0]))
        )
    return _shown(preprocess(loaded, *(None, *paths)[-2:], **arguments_of(settings)), report)


@cli.command("predict", short_help="Run a model on every sample.")
@click.argument("model", metavar="FILE.py:MODEL", type=REFERENCE)
@click.argument("data", type=PATH)
@click.argument("output", type=PATH)
@options(
    *("batch_size", "num_workers", "device", "backend", *CLUSTER, "load", "timeout", "redo"),
    *("version", "accept_changes", "report", "quiet"),
    timeout="Seconds one batch may take.",
    redo="'*': make all predictions again.  failed: try samples that failed.",
    version="Your name for the state of model and data; a new one redoes everything.",
)
def predict_command(model: str, data: str, output: str, **settings: Any) -> int:
    """Run MODEL over every sample of DATA; write Parquet parts to OUTPUT.

    MODEL is a module, a function of a batch, or a class or function that makes one. DATA is
    FILE.py:DATASET. With --load, DATA is files (a folder, a glob in quotes, a URL) or a table
    (.csv, .jsonl, .parquet, an OUTPUT of preprocess, or the URL of one), and the function makes a
    sample of each file or row.

    The same command again continues where it stopped; samples that failed are left to `retry`.
    """
    return _predict(model, data, output, settings)


def _predict(
    model: str,
    data: str,
    output: str,
    settings: dict[str, Any],
    meta: dict[str, str] | None = None,
    **others: Any,
) -> int:
    report = settings.pop("report")
    given = arguments_of(settings)
    if meta is not None:
        given = _with_recorded(predict, meta, given)
    is_path = os.path.exists(data) or data.endswith(SUFFIXES) or is_url(data)
    is_path = is_path or glob.has_magic(data)
    if not is_path and ":" not in data:
        raise OptionError(
            f"{data!r}: no such file or folder\n"
            "  Nothing was started. DATA is a folder, a file, a glob or a URL, or FILE.py:DATASET."
        )
    work, source = load_work(model), data if is_path else load_work(data)
    return _shown(predict(work, source, output, **given, **others), report)


@cli.command("index", short_help="Find the samples of shards, to train on them in place.")
@click.argument("location", metavar="SHARDS", type=PATH)
@click.argument("index", type=PATH)
@click.option(
    "--format", help="Format of the shards, where suffixes do not say it: tar, parquet, …"
)
@options(
    *("num_workers", "backend", *CLUSTER, "timeout", "retries", "quiet"),
    timeout="Seconds one shard may take.",
    retries="Retries of a shard that could not be read.  Default: 1.",
)
def index_command(location: str, index: str, **settings: Any) -> int:
    """Write to INDEX where the samples of SHARDS are, for forebay.open_shards(index=INDEX).

    SHARDS is a folder, a glob or a pattern such as train-{000..999}.tar (quote both), or the URL of
    any of these. The same command again continues, and indexes shards that are new or changed.
    """
    from forebay.runs.index_shards import index_shards

    return _shown(index_shards(location, index, **arguments_of(settings)))


def _shown(made: Any, report: str | None = None) -> int:
    """Show a report, or a cache, which has no failures; return the exit code.

    Args:
        made: What a call returned.
        report: Where to write it as HTML, too.
    """
    click.echo(repr(made))
    if report is not None:
        made.save(report)
    return FAILURES if getattr(made, "failed", 0) else DONE


@cli.command("retry", short_help="Try failed inputs or samples again.")
@click.argument("output", type=PATH)
@click.argument("names", metavar="[FUNCTION | MODEL DATA | DATASET]", nargs=-1, type=PATH)
@options("batch_size", "num_workers", "device", "backend", *CLUSTER, "load", "save", "timeout")
@options("retries", "accept_changes", "report", "quiet")
def retry_command(output: str, names: tuple[str, ...], **settings: Any) -> int:
    """Try failed inputs or samples of OUTPUT again, and nothing else.

    Name what the earlier run worked with, as in its command: the FUNCTION or DATASET (and --save)
    of preprocess, the MODEL and DATA of predict, or the DATASET of cache. A folder is data: no code
    is loaded because a folder names it. Without a name, retry shows what is recorded. The settings
    of the earlier run hold, such as its --timeout, unless others are given.
    """
    meta = snapshot_of(output).meta
    verb = verb_of(meta)
    if is_index(meta):
        raise OptionError(
            f"{shown_location(output)} is an index of shards, and retry is for inputs and samples\n"
            "  Nothing was started. Repeat forebay index: it tries shards that failed again."
        )
    if len(names) != len(_RETRIED[verb]):
        raise OptionError(_how_to_retry(verb, output, meta))
    call = retry if verb == "preprocess" else getattr(forebay, verb)
    fit = {*inspect.signature(call).parameters, *CLUSTER, "quiet"}
    if verb != "cache":
        fit.add("report")
    if unfit := [name for name in settings if name not in fit and settings[name] is not None]:
        raise click.UsageError(
            f"{shown_options(unfit)} does not apply to {verb}, the command that made "
            + shown_location(output)
        )
    settings = {name: value for name, value in settings.items() if name in fit}
    if verb == "predict":
        return _predict(names[0], names[1], output, settings, meta, redo="failed")
    report = settings.pop("report", None)
    given = arguments_of(settings)
    if verb == "cache":
        given = _with_recorded(call, meta, given)
    return _shown(call(load_work(names[0]), output, **given), report)


def _with_recorded(
    call: Callable[..., Any], meta: dict[str, str], given: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call, with the settings of the run that it continues."""
    fit = inspect.signature(call).parameters
    return {name: value for name, value in recorded_settings(meta, given).items() if name in fit}


@cli.command("verify", short_help="Check the output files of a run.")
@click.argument("output", type=PATH)
@click.option(
    "--altered",
    type=click.Choice(["keep", "redo"]),
    help="Of altered outputs: record them as they are, or have the next run make them again.",
)
def verify_command(output: str, *, altered: str | None = None) -> int:
    """Check that every recorded output is there with its size, and that there are no other files.

    Inputs whose outputs are missing are set to be redone: repeat the command that made them. An
    altered output stays as it is until --altered says which of the two is meant: somebody may have
    improved it.
    """
    from forebay.ledger.leftovers import leftovers
    from forebay.ledger.results import record_sizes
    from forebay.runs.sample_numbers import absent_results
    from forebay.shards.sources import INDEX_NAME

    meta = snapshot_of(output).meta  # leave alone a folder that forebay did not make
    folder = open_place(output)
    with folder.ledger("verify") as ledger:
        missing, sizes = perform_pending(ledger, folder), dict[str, tuple[int, int]]()
        lines = list[str]()
        found = dict(folder.files())
        checked, damaged = 0, set[int]()
        for name, size, ordinal in ledger.done_outputs():
            checked += 1
            elsewhere = path_elsewhere(name)
            actual = folder.size(name) if elsewhere else found.get(name)
            if actual == size:
                continue
            shown = elsewhere or name
            if actual is None:
                missing.append(shown)
            else:
                lines.append(f"altered  {shown}: {size:,} bytes recorded, {actual:,} found")
                sizes[name] = ordinal, actual
            if actual is None or altered == "redo":
                damaged.add(ordinal)
        known = {name for name, *_ in ledger.outputs()} | {*ledger.own_files()}
        known |= {INDEX_NAME} if is_index(meta) else set()
        orphans = dict.fromkeys(found.keys() - known, "no input is known to have made it")
        unlisted = [each for each in leftovers(ledger.rows) if each.name in found]
        left = {each.name: each.reason for each in unlisted}
        left |= {each.name: each.reason for each in absent_results(ledger)}
        if altered == "keep" and sizes:
            with ledger.transaction() as db:
                record_sizes(db, sizes)
        ledger.mark_todo(damaged)
    for line in [f"missing  {name}" for name in missing] + lines:
        click.echo(line)
    for name, reason in sorted((orphans | left).items()):
        click.echo(f"orphan   {name}: {reason}")
    click.echo(
        f"{counted(checked, 'output')} checked: {len(missing):,} missing, "
        f"{len(sizes):,} altered, {counted(len(orphans) + len(left), 'orphan')}"
    )
    if damaged:
        click.echo(f"{counted(len(damaged), 'input')} will be redone by the next run")
    if kept := sum(each.may_come_back for each in unlisted):
        click.echo(
            f"{counted(kept, 'orphan')} may be of another call, whose inputs the last one did not "
            "list: list the inputs of both in one call, or give each call a folder of its own"
        )
    if sizes and altered is None:
        command = shlex.join(["forebay", "verify", shown_location(output), "--altered"])
        click.echo(
            f"{counted(len(sizes), 'altered output')} left as found: `{command} keep` records the "
            f"new sizes, `{command} redo` has the next run make them again"
        )
    if left and not kept:
        command = shlex.join(["forebay", "prune", shown_location(output)])
        click.echo(f"{counted(len(left), 'orphan')} can be removed: {command}")
    return FAILURES if missing or lines or orphans or left else DONE


@cli.command("prune", short_help="Remove outputs that belong to no row of the table.")
@click.argument("output", type=PATH)
@click.argument("folders", type=PATH, nargs=-1)
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
def prune_command(output: str, folders: tuple[str, ...], *, dry_run: bool) -> int:
    """Remove the outputs of inputs, or the results of samples, that are no longer listed.

    Also those of changed inputs that failed when they were done again, and those of all inputs in
    FOLDERS, which may be away for good. An input that is listed again afterwards is processed
    again. Files that forebay did not make stay.
    """
    from forebay.ledger.leftovers import leftovers, made_of
    from forebay.runs.sample_numbers import absent_results, forget_earlier

    snapshot_of(output)  # leave alone a folder that forebay did not make
    folder = open_place(output)
    with folder.ledger("prune") as ledger:
        perform_pending(ledger, folder)
        absent = [*absent_results(ledger)]
        named = made_of(ledger.rows, folders)
        left = sorted([*leftovers(ledger.rows, named), *absent])
        if not dry_run:
            if named:
                ledger.mark_tables_stale()
            ledger.prune(also=[each.ordinal for each in named])
            perform_pending(ledger, folder)
            if absent:
                forget_earlier(ledger, folder, absent_too=True)
    done = "would remove" if dry_run else "removed"
    for each in left:
        click.echo(f"{done}  {each.name}: {each.reason}")
    nbytes = byte_size(sum(each.size for each in left))
    click.echo(f"{done} {counted(len(left), 'output')} ({nbytes})")
    return DONE


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    signal.signal(signal.SIGTERM, _interrupted)
    _let_stdout_take_all()
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort as error:
        words = {word.partition("=")[0] for word in sys.argv}
        notes: list[str] = getattr(error.__cause__, "__notes__", [])
        is_begun = any(each.endswith(" continues") for each in notes)
        again = "the same command" + (" without --redo" if "--redo" in words and is_begun else "")
        said = notes[0] if notes else "forebay: interrupted"
        is_continued = sys.argv[1:2] and sys.argv[1] in _CONTINUED
        continued = f"; {again} {'continues' if is_begun else 'begins'}" if is_continued else ""
        click.echo(f"{said}{continued}", err=True)
        code = INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = USAGE
    except ForebayError as error:
        said = "\n".join([f"forebay: {error}", *getattr(error, "__notes__", ())])
        click.echo(said, err=True)
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
    """Return whether writing to stdout failed: everything is printed by click's `echo`."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return innermost.f_code is click.echo.__code__


def _let_stdout_take_all() -> None:
    """Escape what the encoding of stdout lacks: names may be anything. A closed one takes all."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _interrupted(*_: object) -> NoReturn:
    # Schedulers send it more than once, and what is finished is being committed from now on.
    signal.signal(signal.SIGTERM, lambda *_: None)
    raise KeyboardInterrupt


def _how_to_retry(verb: str, output: str, meta: dict[str, str]) -> str:
    """Return the message with the arguments of `retry`, and the recorded name of the function."""
    wanted, recorded = _RETRIED[verb], ""
    if "work" in meta:
        found = Fingerprint.from_json(meta["work"])
        recorded = f"  The folder says that it was {found.name!r}. If you trust that:\n"
        if verb == "preprocess" and found.reference and found.reference.isprintable():
            wanted = [found.reference]
    words = ["forebay", "retry", output, *wanted]
    for name, value in settings_shown(meta).items():
        if any(each.name == name for each in retry_command.params):
            words += [f"--{name.replace('_', '-')}", printable(str(value))]
    return (
        f"retry loads no code because a folder names it: give it the {' and '.join(_RETRIED[verb])}"
        f" of the earlier run\n{recorded}  {shlex.join(words)}"
    )
