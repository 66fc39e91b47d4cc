"""A folder without a table whose run has not written it yet."""

from __future__ import annotations

from forebay.base.formatting import counted
from forebay.errors import BusyError, ForebayError, InputError
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
        counts = found.counts
        state = f"{counts.done:,} of {counted(counts.total, found.unit)} done, and not finished"
        way = "The same call of preprocess continues it, and writes the table at its end."
        if found.live is not None:
            state = f"{counts.done:,} of {counted(counts.total, found.unit)} done, by {found.live}"
            way = f"Wait for its end: `forebay status {folder} --watch` shows how far it is."
        elif found.meta.get("verb", "preprocess") != "preprocess":
            return  # predict and cache write none
    raise InputError(
        f"the folder {folder!r} holds no metadata table yet: its run writes it at its end\n"
        f"  The run: {state}. {way}"
    )
