"""What is said of a run that is probably not as it was meant."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from forebay.base.formatting import byte_size, counted
from forebay.base.output_names import path_elsewhere
from forebay.errors import shortened, shown_location

if TYPE_CHECKING:
    from forebay.ledger.records import Enrolment


# How many inputs a note names.
NAMED = 5
# Metadata of an input that may be an image by mistake, in characters of JSON, and the fewest
# numbers of that image. An embedding is smaller.
LARGE_METADATA, MANY_NUMBERS = 1 << 16, 1000
_NUMBERS = re.compile(r"[-+.\deE,\[\]]+")


def note_on_gone(enrolment: Enrolment, kind: str) -> str:
    """Return what to say of inputs of an earlier run that are not listed now."""
    gone, kept = enrolment.gone, enrolment.same + enrolment.changed
    if enrolment.new and not kept and kind == "rows":
        return (
            f"of the {gone:,} rows of the earlier run none is in the manifest now, so each is "
            "processed. A row with another value, or with other columns, is another input."
        )
    noun = {"rows": "row", "indices": "sample"}.get(kind, "input")
    return (
        f"{gone:,} of the {counted(gone + kept, noun)} of the earlier run "
        f"{'is' if gone == 1 else 'are'} not listed now, so the table is without them; their files "
        "stay in the folder. For one table of all, list them too; for two tables, use another "
        "output folder."
    )


def note_on_unseen(enrolment: Enrolment, kind: str, is_search: bool, output: str) -> str:
    """Return what to say of done inputs that cannot be seen now.

    Args:
        is_search: Whether they are files that were found, whose folder may be gone for good.
    """
    count, first = len(enrolment.unseen), enrolment.unseen_names[0]
    names = ", ".join(map(shortened, enrolment.unseen_names[:NAMED]))
    more = f" and {count - NAMED:,} more" if count > NAMED else ""
    total = counted(enrolment.same + enrolment.changed, _noun(kind))
    folder = os.path.dirname(first.rstrip("/")) or os.curdir
    command = shlex.join(["forebay", "prune", shown_location(output), folder])
    gone = f" If it is gone for good: `{command}` removes what was made of its files."
    return (
        f"{count:,} of {total} done earlier cannot be seen now: {names}{more}. What was made of "
        f"{'it' if count == 1 else 'them'} stays as it is, with its rows. Mount the folder, or "
        f"reach the server, and the same call tells whether anything changed.{gone * is_search}"
    )


def notes_on_inputs(enrolment: Enrolment, kind: str) -> Iterator[str]:
    """Yield what to say of done inputs that changed."""
    noun, total = _noun(kind), enrolment.same + enrolment.changed
    if enrolment.kept:
        yield (
            f"{enrolment.kept:,} of {counted(total, noun)} have other times and the content that "
            "they had: they stay done."
        )
    if enrolment.changed and kind not in ("predict", "cache"):
        only = " (only their times)" if enrolment.retimed == enrolment.changed else ""
        yield (
            f"{enrolment.changed:,} of {counted(total, noun)} changed{only}: each is done again, "
            "and its outputs stay until then."
        )


def _noun(kind: str) -> str:
    return {"rows": "row", "indices": "sample"}.get(kind, unit_of(kind))


def unit_of(verb: str) -> str:
    """Return what an input of the ledger is called in messages, given the entry point."""
    return {"predict": "part", "cache": "shard"}.get(verb, "input")


def note_on_missing(again: int, done: int, name: str) -> str:
    """Return what to say of done inputs whose outputs, such as this one, are not in the folder."""
    return (
        f"{again:,} of {counted(done, 'done input')} {'is' if again == 1 else 'are'} done again: "
        f"outputs are no longer in the folder, such as {shortened(name)}."
    )


def note_on_strays(names: Sequence[str], folder: str, function: str, call: str) -> str:
    """Return what to say of files that were written into the output folder directly.

    Args:
        call: What returns the path to write to instead, such as "out.file".
    """
    first = names[0]
    was = "file was" if len(names) == 1 else "files were"
    return (
        f"{len(names):,} {was} written to {folder} without {call}(), such as {first!r}\n"
        "  A kill leaves such a file incomplete, nothing removes it when its input changes, and "
        "`forebay verify` counts it as an orphan.\n"
        f"  In {function}, write to {call}({first!r}) instead of {os.path.join(folder, first)!r}, "
        "and remove what is there."
    )


def notes_on_results(
    unstaged: tuple[int, str] | None,
    rewritten: tuple[int, str] | None,
    folder: str,
    function: str,
) -> Iterator[str]:
    """Yield what to say of outputs that a function wrote by itself, and of inputs that it changed.

    Args:
        unstaged, rewritten: How many there are, and the first; None for none.
    """
    if unstaged is not None:
        yield _note_on_unstaged(*unstaged, folder, function)
    if rewritten is not None:
        count, name = rewritten
        were = "input was" if count == 1 else "inputs were"
        yield (
            f"{count:,} {were} changed while {function} worked on them, such as {shortened(name)}\n"
            "  They are recorded as they are now, so the same call does not process them again. If "
            f"another program wrote them, and not {function}, process them again: redo={name!r}."
        )


def _note_on_unstaged(count: int, name: str, folder: str, function: str) -> str:
    """Return what to say of outputs that a function wrote by itself.

    Args:
        name: The first of them, as the ledger has it.
    """
    path = path_elsewhere(name) or os.path.join(folder, name)
    was = "output was" if count == 1 else "outputs were"
    return (
        f"{count:,} {was} written by {function} itself, such as {path!r}\n"
        "  They are in the table, and `forebay verify` checks them. But a kill can leave such a "
        "file incomplete, and it stays so until its input is done again.\n"
        f"  Take a second argument, as in {function}(source, out), and write to "
        f"out / {os.path.basename(path)!r}: then a file appears once it is whole."
    )


# How many characters of the metadata of an input are searched for arrays.
LOOKED_AT = 1 << 20


def note_on_arrays(metadata: str, total: int, function: str, call: str) -> str | None:
    """Return what to say if the metadata of an input, large as JSON, have an array.

    Args:
        total: How many inputs there are.
        call: As for `note_on_strays`.
    """
    numbers = _NUMBERS.finditer(metadata, 0, LOOKED_AT)
    if not any(found.group().count(",") >= MANY_NUMBERS for found in numbers):
        return None
    way = f"{function} writes it to {call}(), with numpy.save for example, and returns a dict"
    if call != "out.file":
        way = (
            f"pass save=, a function(sample, out) that writes what {function} returns to out.file()"
        )
    return (
        f"the metadata of one input have {byte_size(len(metadata))}, with an array of numbers; for "
        f"all {total:,} that may be {byte_size(len(metadata) * total)}\n"
        "  The table keeps them as lists, which is slow. It is meant for what describes a file: "
        f"{way}."
    )
