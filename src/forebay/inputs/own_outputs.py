"""Keep the output folder out of the inputs, so that a run never reads what an earlier one wrote.

It may be reached by a glob, through a symbolic link, or by its name in a list or a manifest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from forebay.base.files import is_url, local_path
from forebay.errors import InputError, OptionError, shown_location
from forebay.inputs.listing import Listing
from forebay.ledger.identity import FOLDER
from forebay.ledger.records import Input, LinkInput


def keep_apart(inputs: Any, output: str | os.PathLike[str]) -> None:
    """Check that the output folder is not in the folder of the inputs."""
    if not isinstance(inputs, str | os.PathLike):
        return
    folder, inside = map(shown_location, map(local_path, (inputs, output)))
    if is_url(folder):
        folder = folder.rstrip("/")
    elif os.path.isdir(folder) and not is_url(inside):
        folder, inside = os.path.realpath(folder), os.path.realpath(inside)
    else:
        return
    if inside == folder or inside.startswith(folder + os.sep):
        raise OptionError(
            f"the output folder {os.fspath(output)!r} lies in the input folder "
            f"{os.fspath(inputs)!r}\n"
            "  Its files would be the next run's inputs. Choose an output folder outside."
        )


def without_outputs(listing: Listing, output: str | os.PathLike[str]) -> Listing:
    """Return a listing without files in the output folder; one that the user named is an error."""
    if listing.kind == "indices":
        return listing
    is_output, shown = _Inside(output), os.fspath(output)

    def checked(inputs: Iterable[Input]) -> Iterator[Input]:
        for each in inputs:
            # A listing of files knows which are links; a row may name one.
            is_file = each.row is None
            path = each.source if is_file else _path_of(each, listing.folder)
            if not path:
                yield each
                continue
            is_folder = each.identity.startswith(FOLDER)
            holds = is_folder and is_output.is_below(path)
            is_inside = is_output(path, not is_file or type(each) is LinkInput)
            is_inside = is_inside or (is_folder and is_output.leads_inside(path))
            if not (holds or is_inside):
                yield each
            elif not listing.is_search:
                where = "holds" if holds else "lies in"
                raise InputError(
                    f"the input {each.source!r} {where} the output folder {shown!r}\n"
                    "  This run's outputs would be the next run's inputs. Nothing was started. "
                    f"Leave it out of {listing.description}, or choose another output folder."
                )

    rest = listing.through(checked)
    if listing.is_search and next(iter(rest), None) is None:
        raise InputError(
            f"{listing.description}: all of its files lie in the output folder {shown!r}\n"
            "  A run's outputs are never its inputs. Choose a separate output folder."
        )
    return rest


def _path_of(each: Input, folder: str | None) -> str:
    """Return the path that a row names, which may be relative to the manifest."""
    if not (each.source and folder) or "\0" in each.source or os.path.lexists(each.source):
        return each.source
    beside = os.path.join(folder, each.source)
    return beside if os.path.lexists(beside) else each.source


class _Inside:
    """Tells whether a path or URL is in the output folder, also through symbolic links."""

    def __init__(self, output: str | os.PathLike[str]) -> None:
        text = local_path(output)
        self._urls: tuple[str, ...] = ()
        if is_url(text):
            from forebay.base.file_stores import Store

            urls = map(shown_location, (text, Store(text).canonical_url))
            self._urls = tuple(f"{url.rstrip('/')}/" for url in urls)
        self._root = os.path.join(os.path.realpath(text), "")
        self._folder: str | None = None  # that of the last path, and whether it is inside
        self._is_inside = False

    def __call__(self, path: str, may_be_link: bool) -> bool:
        if is_url(path):
            path = local_path(path)
        if self._urls or is_url(path) or "\0" in path:
            return path.startswith(self._urls)
        folder = path[: path.rfind(os.sep) + 1]
        if folder != self._folder:  # most paths lie in the folder of the one before
            self._folder, self._is_inside = folder, self.leads_inside(folder)
        if self._is_inside or not (may_be_link and os.path.islink(path)):
            return self._is_inside
        return self.leads_inside(path)

    def is_below(self, folder: str) -> bool:
        """Return whether the output folder is in another folder."""
        return self._root.startswith(os.path.join(os.path.realpath(folder), ""))

    def leads_inside(self, path: str) -> bool:
        """Return whether a path, with its links followed, is in the output folder."""
        return os.path.join(os.path.realpath(path), "").startswith(self._root)
