"""An output folder without a table, or with an earlier one: its run did not end, or writes none."""

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

# What opens the outputs of runs that write no table.
_OPENING = {
    "predict": "Its predictions are the files part-00000.parquet, …: once all are done, "
    "from_table({0!r}, columns=[...]) reads columns of them. For rows, pass "
    "pyarrow.parquet.read_table({0!r}).",
    "cache": "forebay.open_cache({0!r}) opens its samples.",
}


def refuse_unfinished(folder: str) -> None:
    """Raise InputError for an output folder that has no table, or none yet."""
    try:
        found = snapshot_of(folder)
    except BusyError as error:
        state, way = str(error).splitlines()[0], f"`forebay status {folder}` shows how far it is."
    except ForebayError:  # it is no output folder
        return
    else:
        _refuse_other(found, folder)
        state, way = _state_of(found, folder)
    raise InputError(
        f"the folder {folder!r} holds no metadata table yet: its run writes it at its end\n"
        f"  The run: {state}. {way}"
    )


def has_only_data(folder: str) -> bool:
    """Return whether all files of a folder without a table are data: of others, or predictions."""
    try:
        found = snapshot_of(folder)
    except BusyError:
        return False
    except ForebayError:  # it is no output folder
        return True
    is_done = found.live is None and found.counts.done == found.counts.total
    return found.meta.get("verb") == "predict" and is_done


def refuse_other_outputs(folder: str) -> None:
    """Raise InputError for an output folder of a function that writes no table."""
    with suppress(BusyError):
        _refuse_other(snapshot_of(folder), folder)


def _refuse_other(found: Snapshot, folder: str) -> None:
    verb = found.meta.get("verb", "")
    if verb in _OPENING:
        raise InputError(
            f"the folder {folder!r} is an output of forebay.{verb}(), which writes no table\n"
            f"  {_OPENING[verb].format(folder)}"
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
