"""A folder whose run has not written its table yet, or not since it began again."""

from __future__ import annotations

import json
import warnings
from contextlib import suppress

from forebay.base.formatting import counted
from forebay.base.output_names import table_name
from forebay.errors import BusyError, ForebayError, InputError
from forebay.ledger.database import reading
from forebay.ledger.snapshot import Snapshot
from forebay.options import depth_in_forebay
from forebay.outputs.places import snapshot_of


def refuse_unfinished(folder: str) -> None:
    """Raise InputError if a run has not written the table of this folder yet."""
    try:
        found = snapshot_of(folder)
    except BusyError as error:
        state, way = str(error).splitlines()[0], f"`forebay status {folder}` shows how far it is."
    except ForebayError:  # it is no output folder
        return
    else:
        if found.live is None and found.meta.get("verb", "preprocess") != "preprocess":
            return  # predict and cache write none
        state, way = _state_of(found, folder)
    raise InputError(
        f"the folder {folder!r} holds no metadata table yet: its run writes it at its end\n"
        f"  The run: {state}. {way}"
    )


def warn_if_stale(folder: str, table: str) -> None:
    """Warn if the table of this folder is that of an earlier run, and a later one began.

    Args:
        table: The table's file name.
    """
    with suppress(ForebayError):  # it is no output folder, or its ledger changes just now
        found = snapshot_of(folder)
        with reading("the tables"):
            tables = dict(json.loads(found.meta.get("tables", "{}")))
        current = [table_name(form) for form, is_current in tables.items() if is_current]
        if not any(table_name(form) == table for form in tables) or table in current:
            return
        if current:
            why = f"the run since then wrote {current[0]}"
        else:
            why = "the run since then is not finished\n  The run: {}. {}".format(
                *_state_of(found, folder)
            )
        warnings.warn(
            f"the table {table} in {folder!r} is that of an earlier run: {why}",
            stacklevel=depth_in_forebay(),
        )


def _state_of(found: Snapshot, folder: str) -> tuple[str, str]:
    """Return how far a run is that has no table yet, and what to do."""
    counts = found.counts
    done = f"{counts.done:,} of {counted(counts.total, found.unit)} done"
    if found.live is not None:
        way = f"Wait for its end: `forebay status {folder} --watch` shows how far it is."
        return f"{done}, by {found.live}", way
    way = "The same call of preprocess continues it, and writes the table at its end."
    return f"{done}, and not finished", way
