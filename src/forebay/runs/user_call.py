"""How a worker calls the user's function: with or without `out`, with paths or strings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from forebay.errors import OptionError


class Call(NamedTuple):
    """How a worker calls the user's function.

    Attributes:
        gives_out: Whether with `out`, too.
        as_text: Whether a path is a string, as the user listed it or annotated the parameter.
        out_as_text: Whether `out` is a string, which the parameter is annotated as.
    """

    gives_out: bool = True
    as_text: bool = False
    out_as_text: bool = False


USUAL = Call()


def call_of(
    work: Callable[..., Any], *, as_text: bool = False, names: tuple[str, str] = ("source", "out")
) -> Call:
    """Return how a function is called; raise OptionError if it takes neither source nor output.

    A second parameter with a default keeps that, unless it is called `out...`.

    Args:
        as_text: Whether the paths that the user listed are strings.
        names: What errors call the two parameters.
    """
    import inspect

    is_async = inspect.iscoroutinefunction, inspect.isasyncgenfunction
    if any(check(each) for check in is_async for each in (work, type(work).__call__)):
        name = getattr(work, "__name__", type(work).__name__)
        raise OptionError(
            f"{name} is async, and a worker calls plain functions\n"
            "  Nothing was started. Pass a function that runs it, with asyncio.run() for example; "
            "with concurrency=8 a worker processes eight inputs at once."
        )
    try:
        signature = inspect.signature(work)
    except ValueError:
        return Call(gives_out=False, as_text=as_text)  # a builtin without a signature
    first, second = [*signature.parameters.values(), *[None] * 2][:2]
    as_text = first is not None and _kind_of(first.annotation, as_text)
    try:
        signature.bind(*names)
    except TypeError as error:
        with suppress(TypeError):
            signature.bind(names[0])
            return Call(gives_out=False, as_text=as_text)
        name = getattr(work, "__name__", type(work).__name__)
        raise OptionError(
            f"{name}{signature} cannot be called as {name}({names[0]}) or "
            f"{name}({', '.join(names)}): {error}\n"
            f"  Nothing was started. Give it one parameter, the {names[0]}, or two: the {names[0]} "
            "and the output. functools.partial sets others."
        ) from error
    second = second or first  # of f(*args)
    assert second is not None
    gives_out = second.default is second.empty or second.name.startswith("out")
    if second.kind is second.VAR_POSITIONAL:  # of what is not written in Python, that says nothing
        gives_out = any(hasattr(each, "__code__") for each in (work, type(work).__call__))
    return Call(gives_out, as_text, _kind_of(second.annotation, is_text=False))


def _kind_of(annotation: Any, is_text: bool) -> bool:
    """Return whether a parameter is annotated as a string, not as a path; `is_text` if as none."""
    name = str(getattr(annotation, "__name__", annotation)).rpartition(".")[2]
    return {"str": True, "Path": False}.get(name, is_text)
