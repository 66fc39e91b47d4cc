"""Commands that look at runs, loaders: status, failures, top."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial

import click

from forebay.base.files import absolute, is_url
from forebay.base.formatting import counted
from forebay.cli_options import PATH
from forebay.errors import BusyError, OptionError, one_line, printable, shown_location
from forebay.failures import Failure, grouped
from forebay.runs.ranges import read_run_state
from forebay.runs.report import lines_by_error
from forebay.show.top import Signs, live_views, signs_for, view_lines, watch

INTERRUPTED = 130
# Interval of `status --watch` in seconds.
WATCH_S = 2.0
# Columns of a text that goes to a file.
PLAIN_COLUMNS = 110


@click.command("status", short_help="Show the progress of a run.")
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


@click.command("failures", short_help="List failed inputs or samples.")
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


@click.command("top", short_help="Watch loaders and runs on this machine.")
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


def _lines(target: str | None, columns: int, signs: Signs, rows: int | None = None) -> list[str]:
    """Return the lines that show a target, or all loaders and runs without one."""
    views = live_views()
    if target is None:
        return view_lines(views, columns, signs, rows)
    path = shown_location(absolute(target))
    if views := [view for view in views if target == str(view.pid) or view.title == path]:
        return view_lines(views, columns, signs, rows)
    if not is_url(target) and not os.path.exists(target):
        raise OptionError(
            f"{target!r} is neither the output folder of a run nor the PID of one of your "
            "processes with a loader or run on this machine\n"
            "  A loader or run is shown one second after it began. `forebay top` lists all."
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
