"""Find the metadata table that the user names by its path, its folder or a URL."""

from __future__ import annotations

import os

from forebay.base.files import file_name, is_url, joined, names_among
from forebay.base.output_names import PRIVATE, SUFFIXES, TABLES
from forebay.errors import InputError


def find_table(table: str | os.PathLike[str]) -> str:
    """Return the path or URL of a metadata table, given that or its folder's."""
    name = os.path.expanduser(os.fspath(table))
    if (tables := names_among(name, TABLES)) is not None:
        if len(tables) != 1:
            if not tables:
                from forebay.inputs.unfinished import refuse_unfinished

                refuse_unfinished(name)
            raise InputError(
                f"the folder {name!r} holds {' and '.join(tables) or 'no metadata table'}\n"
                f"  An output folder of preprocess holds one of {', '.join(TABLES)}. Name the "
                "table itself. If metadata= was changed, only the last run's is up to date: remove "
                "the others."
            )
        _warn_if_stale(name, tables[0])
        return joined(name, tables[0])
    is_remote = is_url(name)
    if not file_name(name).lower().endswith(SUFFIXES) or not (is_remote or os.path.isfile(name)):
        what = "is not a table" if is_remote or os.path.exists(name) else "does not exist"
        raise InputError(
            f"{name!r} {what}\n"
            f"  A table is a file ending in {', '.join(SUFFIXES)}, or the folder that preprocess "
            "wrote one to."
        )
    if not is_remote:
        _warn_if_stale(*os.path.split(name))
    return name


def _warn_if_stale(folder: str, table: str) -> None:
    if is_url(folder) or os.path.isdir(os.path.join(folder, PRIVATE)):
        from forebay.inputs.unfinished import warn_if_stale

        warn_if_stale(folder, table)
