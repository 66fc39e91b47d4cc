"""Tracebacks that show the user's frames: forebay's own are cut where they explain nothing.

An error that forebay raises on purpose says in its message what is wrong, and an exception of the
user's code is about the user's frames. An unexpected exception in forebay's own code, which would
be a bug, keeps every frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from types import TracebackType
from typing import Any, TypeVar, cast

from forebay.errors import ForebayError

_F = TypeVar("_F", bound=Callable[..., Any])

# Modules that only pass a call or an exception on for forebay.
_PASSING_ON = ("contextlib", "torch._utils")


def short_tracebacks(function: _F) -> _F:
    """Decorate an entry point: what it raises on purpose shows none of its internal frames."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # for IPython and pytest
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            cut_below_entry(error)
            raise

    return cast("_F", call)


def cut_below_entry(error: BaseException) -> None:
    """Cut forebay's frames below the first, if forebay raises or passes on this exception.

    It passes on what it has added a note to; see `BaseException.add_note`.
    """
    notes = getattr(error, "__notes__", ())
    is_passed_on = any(isinstance(each, str) and each.startswith("forebay: ") for each in notes)
    first = error.__traceback__
    if first is None or not (isinstance(error, ForebayError) or is_passed_on):
        return
    first.tb_next = _without_own(first.tb_next)
    _cut_causes(error)


def cut_own_frames(error: BaseException) -> None:
    """Cut forebay's frames from an exception that the user's code raised, or forebay on purpose."""
    frames = list(_frames(error.__traceback__))
    if frames and _is_own(frames[-1]) and not isinstance(error, ForebayError):
        return
    error.__traceback__ = _without_own(error.__traceback__)
    _cut_causes(error)


def _cut_causes(error: BaseException) -> None:
    seen = {id(error)}  # causes may go round in a circle
    cause = error.__cause__
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        cause.__traceback__ = _without_own(cause.__traceback__)
        cause = cause.__cause__


def _without_own(trace: TracebackType | None) -> TracebackType | None:
    kept: TracebackType | None = None
    for each in reversed([each for each in _frames(trace) if not _is_own(each)]):
        each.tb_next, kept = kept, each
    return kept


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_own(trace: TracebackType) -> bool:
    # Not the file: methods that dataclasses generates have none.
    module = str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] == "forebay" or module in _PASSING_ON
