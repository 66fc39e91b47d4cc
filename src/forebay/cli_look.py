"""The commands that only show: status, failures, top, compare."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from functools import partial

import click

from forebay import cli_options as options
from forebay.errors import BusyError, OptionError, one_line, printable
from forebay.failures import Failure
from forebay.live.top_display import live_views, signs_for, text_of, watch
from forebay.live.top_screen import Signs
from forebay.reports.comparison import compare
from forebay.sample_ranges import read_run_state
from forebay.units import counted

INTERRUPTED = 130
# Interval of `status --watch` in seconds.
WATCH_S = 2.0
# Columns of a text that goes to a file.
PLAIN_COLUMNS = 110


@click.command("status", short_help="Show the progress of a run.")
@click.argument("output", type=options.PATH)
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


@click.command("failures", short_help="List failed inputs or samples.")
@click.argument("output", type=options.PATH)
@click.option("--traceback", is_flag=True, help="Show the traceback of each.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def failures_command(output: str, traceback: bool, as_json: bool) -> int:
    """List the failed inputs or samples of OUTPUT, also while it runs."""
    with read_run_state(output) as (snapshot, failures):
        for failure in failures:
            click.echo(_as_json(failure) if as_json else str(failure))
            if traceback and not as_json:
                rest = [*failure.message.splitlines()[1:], *failure.traceback.splitlines()]
                click.echo("".join(f"    {printable(line)}\n" for line in rest), nl=False)
    click.echo(f"{counted(snapshot.counts.failed, snapshot.unit)} failed", err=True)
    return 0


@click.command("top", short_help="Watch loaders and runs on this machine.")
@click.argument("target", metavar="[PID | OUTPUT]", required=False, type=options.PATH)
@click.option("--once", is_flag=True, help="Print once and end, as when stdout is not a terminal.")
def top_command(target: str | None, once: bool) -> int:
    """Show the loaders and runs of this user on this machine while they work.

    For a loader: its buffer, how long training waited and how busy each worker was in the last 30
    seconds, and why. For a run: how far it is. Only those of process PID, or the run in the folder
    OUTPUT. Ctrl-C ends the display.
    """
    if sys.stdout.isatty() and not once:
        watch(partial(_lines, target))
        return 0
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else PLAIN_COLUMNS
    click.echo("\n".join(_lines(target, columns, signs_for(sys.stdout.encoding))))
    return 0


@click.command("compare", short_help="Show what differs in two reports.")
@click.argument("first", metavar="A.html", type=options.PATH)
@click.argument("second", metavar="B.html", type=options.PATH)
@click.option("--save", metavar="FILE.html", type=options.PATH, help="Write it as HTML, too.")
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


def _lines(target: str | None, columns: int, signs: Signs) -> list[str]:
    """Return the lines that show a target, or all loaders and runs without one.

    Raises:
        OptionError: The target is neither a process that has anything to show nor a folder.
        LedgerError: The folder is not an output folder.
    """
    views = live_views()
    if target is None:
        return text_of(views, columns, signs)
    path = target if "://" in target else os.path.abspath(target)
    if views := [view for view in views if target == str(view.pid) or view.title == path]:
        return text_of(views, columns, signs)
    if "://" not in target and not os.path.exists(target):
        raise OptionError(
            f"{target!r} is neither the output folder of a run nor the number of a process that "
            "shows a loader or run of yours on this machine\n"
            "  A loader is shown one second after its first batch was requested. `forebay top` "
            "lists all loaders and runs."
        )
    with read_run_state(target) as (snapshot, _):  # it ended, or works on another machine
        return [one_line(line, columns) for line in snapshot.text(time.time()).splitlines()]


def _as_json(failure: Failure) -> str:
    names = ("source", "kind", "error", "message", "traceback", "attempts", "seconds")
    return json.dumps({name: getattr(failure, name) for name in names})
