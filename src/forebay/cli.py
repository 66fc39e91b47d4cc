"""The command line: preprocess, predict, retry, status, failures, verify, prune, top, compare."""

from __future__ import annotations

import glob
import inspect
import io
import json
import os
import shlex
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

import click

import forebay
from forebay.base.datasets import is_map_style
from forebay.base.files import absolute, is_url
from forebay.base.formatting import byte_size, counted
from forebay.base.output_names import SUFFIXES, TABLE_FORMATS, path_elsewhere
from forebay.errors import (
    BusyError,
    ForebayError,
    OptionError,
    one_line,
    printable,
    shown_location,
)
from forebay.failures import Failure, grouped
from forebay.options import BACKENDS, Ray
from forebay.outputs.places import open_place, snapshot_of
from forebay.predicting.predict import predict
from forebay.runs.commits import perform_pending
from forebay.runs.fingerprint import Fingerprint
from forebay.runs.preprocess import preprocess, retry
from forebay.runs.recorded_settings import recorded_settings, settings_shown
from forebay.runs.references import load_work, parse_reference
from forebay.runs.report import lines_by_error
from forebay.runs.run_state import read_run_state, verb_of
from forebay.show.comparison import compare
from forebay.show.top import Signs, live_views, signs_for, text_of, watch


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


_COUNT = click.IntRange(1)
_CLUSTER = ("address", "num_cpus", "num_gpus")
# Options that several commands have, or that `preprocess` has as arguments: what click is told of
# each. One that is not given is left to the default of the function that is called.
_OPTIONS: dict[str, dict[str, Any]] = {
    "num_workers": {
        "type": WorkerCount(0),
        "help": "Default: one per core.  auto: more while that makes the run faster.",
    },
    "backend": {"type": click.Choice(BACKENDS)},
    "address": {"help": "Address of the Ray cluster; 'auto' finds it."},
    "num_cpus": {"type": float, "help": "CPUs of a worker on a cluster. Default: 1."},
    "num_gpus": {"type": float, "help": "GPUs of a worker on a cluster. Default: 0."},
    "concurrency": {"type": _COUNT, "help": "Inputs that each worker processes at once."},
    "timeout": {"type": float, "help": "Seconds one input may take."},
    "retries": {"type": click.IntRange(0), "help": "Retries of a failed input.  Default: 1."},
    "on_error": {
        "type": click.Choice(["skip", "raise"]),
        "help": "Default: skip; with --limit, raise.",
    },
    "max_failures": {
        "type": _count_or_fraction,
        "metavar": "TEXT",
        "help": "Stop after more: a count, or a fraction such as 0.01.",
    },
    "limit": {
        "type": _COUNT,
        "help": "Only the first N inputs, in this process, until one fails: to try a function.",
    },
    "redo": {
        "metavar": "PATTERN",
        "multiple": True,
        "help": "Process these inputs again, such as 'rec/*.wav'.  May be given several times.",
    },
    "restart": {"is_flag": True, "help": "Forget the earlier run; remove its outputs."},
    "metadata": {"type": click.Choice(TABLE_FORMATS)},
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
    "accept_changes": {
        "is_flag": True,
        "help": "Keep what is done although the code changed; use the new code for the rest.",
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
    cluster = {name: given.pop(name) for name in _CLUSTER if name in given}
    if cluster:
        if given.get("backend") != "ray":
            raise click.UsageError(
                f"{shown_options(cluster)} is for --backend ray, which was not given"
            )
        given["backend"] = Ray(**cluster)
    given |= {name: load_work(given[name]) for name in ("save", "load") if name in given}
    if given.pop("restart", False):
        given["resume"] = False
    return given | {"progress": not given.pop("quiet")}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(forebay.__version__, prog_name="forebay")
def cli() -> None:
    """Prepare data: run a function on every input, on every core, resumably."""


# ---- cli look ------------------------------------------------------------------------------------

INTERRUPTED = 130
# Interval of `status --watch` in seconds.
WATCH_S = 2.0
# Columns of a text that goes to a file.
PLAIN_COLUMNS = 110


@cli.command("status", short_help="Show the progress of a run.")
@click.argument("output", type=PATH)
@click.option("--watch", is_flag=True, help="Look again every 2 seconds, until the run ends.")
def status_command(output: str, watch: bool) -> int:
    """Show how far the run in OUTPUT is, also while it runs."""
    shown = ""
    while True:
        try:
            with read_run_state(output) as (snapshot, _):
                text = snapshot.text(time.time())
            if text != shown:
                if watch:
                    click.clear()  # does nothing if the output is not a terminal
                click.echo(text)
            shown = text
            if not watch or snapshot.live is None:
                return 0
        except BusyError:
            if not watch:
                raise
        try:
            time.sleep(WATCH_S)
        except KeyboardInterrupt:  # Ctrl-C ends the display; the run is another process
            return INTERRUPTED


@cli.command("failures", short_help="List failed inputs or samples.")
@click.argument("output", type=PATH)
@click.option("--traceback", is_flag=True, help="Show the traceback of each.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--summary", is_flag=True, help="Count each error, with examples, instead.")
def failures_command(output: str, traceback: bool, as_json: bool, summary: bool) -> int:
    """List the failed inputs or samples of OUTPUT, also while it runs."""
    if summary and traceback:
        raise click.UsageError("--traceback is for the list of failures, without --summary")
    with read_run_state(output) as (snapshot, failures):
        if summary and as_json:
            lines: Iterable[str] = (json.dumps(each._asdict()) for each in grouped(failures))
        elif summary:
            lines = lines_by_error(grouped(failures))
        elif as_json:
            lines = map(_as_json, failures)
        else:
            lines = _failure_lines(failures, traceback)
        for line in lines:
            click.echo(line)
    click.echo(f"{counted(snapshot.counts.failed, snapshot.unit)} failed", err=True)
    return 0


@cli.command("top", short_help="Watch loaders and runs on this machine.")
@click.argument("target", metavar="[PID | OUTPUT]", required=False, type=PATH)
@click.option("--once", is_flag=True, help="Print once and end, as when stdout is not a terminal.")
def top_command(target: str | None, once: bool) -> int:
    """Show the loaders and runs of this user on this machine while they work.

    For a loader: its buffer, how long training waited and how busy each worker was in the last 30
    seconds, and why. For a run: how far it is. Only those of process PID, or the run in the folder
    OUTPUT. q or Ctrl-C ends the display.
    """
    if sys.stdout.isatty() and not once:
        watch(partial(_lines, target))
        return 0
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else PLAIN_COLUMNS
    click.echo("\n".join(_lines(target, columns, signs_for(sys.stdout.encoding))))
    return 0


@cli.command("compare", short_help="Show what differs in two reports.")
@click.argument("first", metavar="A.html", type=PATH)
@click.argument("second", metavar="B.html", type=PATH)
@click.option("--save", metavar="FILE.html", type=PATH, help="Write it as HTML, too.")
def compare_command(first: str, second: str, save: str | None) -> int:
    """Say what differs between two reports: rate, waits, settings, environment, verdict."""
    try:
        comparison = compare(first, second)
        if save is not None:
            comparison.save(save)
    except OSError as error:
        raise click.FileError(str(error.filename), error.strerror) from None
    click.echo(str(comparison))
    return 0


def _lines(target: str | None, columns: int, signs: Signs, rows: int | None = None) -> list[str]:
    """Return the lines that show a target, or all loaders and runs without one."""
    views = live_views()
    if target is None:
        return text_of(views, columns, signs, rows)
    path = shown_location(absolute(target))
    if views := [view for view in views if target == str(view.pid) or view.title == path]:
        return text_of(views, columns, signs, rows)
    if not is_url(target) and not os.path.exists(target):
        raise OptionError(
            f"{target!r} is neither the output folder of a run nor the PID of one of your "
            "processes with a loader or run on this machine\n"
            "  A loader is shown one second after its first batch was requested. `forebay top` "
            "lists all loaders and runs."
        )
    with read_run_state(target) as (snapshot, _):  # it ended, or works on another machine
        return [one_line(line, columns) for line in snapshot.text(time.time()).splitlines()]


def _failure_lines(failures: Iterable[Failure], with_traceback: bool) -> Iterator[str]:
    for failure in failures:
        yield str(failure)
        if with_traceback:
            rest = [*failure.message.splitlines()[1:], *failure.traceback.splitlines()]
            yield from (f"    {printable(line)}" for line in rest)


def _as_json(failure: Failure) -> str:
    names = ("source", "kind", "error", "message", "traceback", "attempts", "seconds")
    return json.dumps({name: getattr(failure, name) for name in names})


# ---- cli -----------------------------------------------------------------------------------------
# Exit codes: 0 all done, 3 finished with failures (or `verify` found something wrong), 1 could not
# run or was stopped early, 2 wrong usage, 130 interrupted.

DONE, COULD_NOT_RUN, USAGE, FAILURES = 0, 1, 2, 3
# The commands that continue when they are given again after Ctrl-C.
_CONTINUED = ("preprocess", "predict", "retry")
# The arguments of `retry`, by the entry point that made the folder.
_RETRIED = {"preprocess": ["FUNCTION"], "predict": ["MODEL", "DATA"], "cache": ["DATASET"]}


@cli.command("preprocess", short_help="Run a function on every input.")
@click.argument("work", metavar="FILE.py:FUNCTION", type=REFERENCE)
@click.argument("paths", metavar="[INPUTS] OUTPUT", nargs=-1, required=True, type=PATH)
@options("num_workers", "concurrency", "backend", *_CLUSTER, "timeout", "retries", "on_error")
@options("max_failures", "limit", "redo", "restart", "metadata", "save")
@options("version", "accept_changes", "quiet")
def preprocess_command(work: str, paths: tuple[str, ...], **settings: Any) -> int:
    """Call FUNCTION(source) or (source, out) for each of INPUTS; publish its files in OUTPUT.

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
    return _shown(preprocess(loaded, *(None, *paths)[-2:], **arguments_of(settings)))


@cli.command("predict", short_help="Run a model on every sample.")
@click.argument("model", metavar="FILE.py:MODEL", type=REFERENCE)
@click.argument("data", type=PATH)
@click.argument("output", type=PATH)
@options(
    *("batch_size", "num_workers", "device", "backend", *_CLUSTER, "load", "timeout", "restart"),
    *("version", "accept_changes", "quiet"),
    timeout="Seconds one batch may take.",
    restart="Forget the earlier run; remove its predictions.",
)
def predict_command(model: str, data: str, output: str, **settings: Any) -> int:
    """Run MODEL over every sample of DATA; write Parquet parts to OUTPUT.

    MODEL is a module, a function of a batch, or a class or function that makes one. DATA is
    FILE.py:DATASET; or files that --load makes samples of: a folder, a glob in quotes, a URL; or a
    table (.csv, .jsonl, .parquet; or the folder that preprocess wrote one to; or the URL of
    either), of whose rows it makes them.

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
    return _shown(predict(work, source, output, **given, **others))


def _shown(made: Any) -> int:
    """Show a report, or a cache, which has no failures; return the exit code."""
    click.echo(repr(made))
    return FAILURES if getattr(made, "failed", 0) else DONE


@cli.command("retry", short_help="Try failed inputs or samples again.")
@click.argument("output", type=PATH)
@click.argument("names", metavar="[FUNCTION | MODEL DATA | DATASET]", nargs=-1, type=PATH)
@options("batch_size", "num_workers", "device", "backend", *_CLUSTER, "load", "save", "timeout")
@options("retries", "accept_changes", "quiet")
def retry_command(output: str, names: tuple[str, ...], **settings: Any) -> int:
    """Try failed inputs or samples of OUTPUT again, and nothing else.

    Name what the earlier run worked with, as in its command: the FUNCTION or DATASET (and --save)
    of preprocess, the MODEL and DATA of predict, or the DATASET of cache. A folder is data: no code
    is loaded because a folder names it. Without a name, retry shows what is recorded. The settings
    of the earlier run hold, such as its --timeout, unless others are given.
    """
    meta = snapshot_of(output).meta
    verb = verb_of(meta)
    if len(names) != len(_RETRIED[verb]):
        raise OptionError(_how_to_retry(verb, output, meta))
    call = retry if verb == "preprocess" else getattr(forebay, verb)
    fit = {*inspect.signature(call).parameters, *_CLUSTER, "quiet"}
    if unfit := [name for name in settings if name not in fit and settings[name] is not None]:
        raise click.UsageError(
            f"{shown_options(unfit)} does not apply to {verb}, the command that made "
            + shown_location(output)
        )
    settings = {name: value for name, value in settings.items() if name in fit}
    if verb == "predict":
        return _predict(names[0], names[1], output, settings, meta, retry_failed=True)
    given = arguments_of(settings)
    if verb == "cache":
        given = _with_recorded(call, meta, given)
    return _shown(call(load_work(names[0]), output, **given))


def _with_recorded(
    call: Callable[..., Any], meta: dict[str, str], given: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call, with the settings of the run that it continues."""
    fit = inspect.signature(call).parameters
    return {name: value for name, value in recorded_settings(meta, given).items() if name in fit}


@cli.command("verify", short_help="Check the output files of a run.")
@click.argument("output", type=PATH)
def verify_command(output: str) -> int:
    """Check that every recorded output exists unaltered, and that there are no other files.

    Inputs whose outputs are missing or altered are set to be redone: repeat the command that
    made them.
    """
    from forebay.runs.named_samples import absent_results

    snapshot_of(output)  # leave alone a folder that forebay did not make
    folder = open_place(output)
    with folder.ledger("verify") as ledger:
        missing, altered = perform_pending(ledger, folder), []
        found = dict(folder.files())
        checked, damaged = 0, set[int]()
        for name, size, ordinal in ledger.done_outputs():
            checked += 1
            elsewhere = path_elsewhere(name)
            actual = folder.size(name) if elsewhere else found.get(name)
            if actual == size:
                continue
            damaged.add(ordinal)
            shown = elsewhere or name
            if actual is None:
                missing.append(shown)
            else:
                altered.append(f"{shown}: {size:,} bytes recorded, {actual:,} found")
        known = {name for name, *_ in ledger.outputs()} | {*ledger.own_files()}
        orphans = dict.fromkeys(found.keys() - known, "no input is known to have made it")
        left = {each.name: each.reason for each in ledger.leftovers() if each.name in found}
        left |= {each.name: each.reason for each in absent_results(ledger)}
        ledger.mark_todo(damaged)
    for name in missing:
        click.echo(f"missing  {name}")
    for line in altered:
        click.echo(f"altered  {line}")
    for name, reason in sorted((orphans | left).items()):
        click.echo(f"orphan   {name}: {reason}")
    click.echo(
        f"{counted(checked, 'output')} checked: {len(missing):,} missing, "
        f"{len(altered):,} altered, {counted(len(orphans) + len(left), 'orphan')}"
    )
    if damaged:
        click.echo(f"{counted(len(damaged), 'input')} will be redone by the next run")
    if left:
        command = shlex.join(["forebay", "prune", shown_location(output)])
        click.echo(f"{counted(len(left), 'orphan')} can be removed: {command}")
    return FAILURES if missing or altered or orphans or left else DONE


@cli.command("prune", short_help="Remove outputs that belong to no row of the table.")
@click.argument("output", type=PATH)
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
def prune_command(output: str, *, dry_run: bool) -> int:
    """Remove the outputs of inputs, or the results of samples, that are no longer listed.

    Also those of changed inputs that failed when they were done again. An input that is listed
    again afterwards is processed again. Files that forebay did not make stay.
    """
    from forebay.runs.named_samples import absent_results, forget_earlier

    snapshot_of(output)  # leave alone a folder that forebay did not make
    folder = open_place(output)
    with folder.ledger("prune") as ledger:
        perform_pending(ledger, folder)
        absent = [*absent_results(ledger)]
        left = sorted([*ledger.leftovers(), *absent])
        if not dry_run:
            ledger.prune()
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
        given = [name for name in ("--restart", "--redo") if name in words and is_begun]
        again = f"the same command{' without ' * bool(given)}{' and '.join(given)}"
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
