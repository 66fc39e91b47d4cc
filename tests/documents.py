"""The fenced blocks of a document: the program they make, and what it is said to print.

A `text` block right after a Python or shell block shows what that block prints to stdout. In it,
times and rates may differ, and `…` stands for anything.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

NOT_RUN = re.compile(r"<!-- not run: (?P<reason>\S.*) -->")
SHELLS = ("shell", "bash", "console")
# Printed after a block, with the number of its first line: what came before is that block's.
END = "\x1e"
# Of the programs: on a busy machine, several threads for tensors waste cores by spinning.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
# Seconds after which a program is taken to hang, on a machine with much else to do.
HANG_S = 280
TIME = re.compile(r"\b\d[\d,]*(?:\.\d+)? (?:us|ms|s|min|h|d)\b(?: \d+ (?:s|min|h)\b)?")
RATE = re.compile(r"\b\d[\d,]*(?:\.\d+)?(?= \w+/s\b)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        language: What stands behind its opening fence.
        start: Its first line's number, from 0.
        lines: Its lines.
        excuse: Why it is not run, if it is not.
        shown: What it is said to print, where the document shows that.
    """

    language: str
    start: int
    lines: tuple[str, ...]
    excuse: str | None = None
    shown: str | None = None

    @property
    def end(self) -> int:
        """The number of its closing fence's line."""
        return self.start + len(self.lines)


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a document."""
    lines = text.splitlines()
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    assert len(fences) % 2 == 0, "a fence is left open"
    pairs = list(zip(fences[::2], fences[1::2], strict=True))
    for opening, closing in pairs:
        before = next((line for line in reversed(lines[:opening]) if line.strip()), "")
        excuse = NOT_RUN.fullmatch(before.strip())
        yield Block(
            lines[opening].removeprefix("```").strip(),
            opening + 1,
            tuple(lines[opening + 1 : closing]),
            excuse["reason"] if excuse else None,
            _shown(lines, closing, dict(pairs)),
        )


def program(text: str, *, announced: bool = False) -> str:
    """Return the Python blocks of a document as one program, each line at its place.

    Args:
        text: The document.
        announced: Whether each block ends by printing `END` and its number.
    """
    lines = [""] * len(text.splitlines())
    for block in blocks(text):
        if block.language == "python" and block.excuse is None:
            lines[block.start : block.end] = block.lines
            if announced:
                lines[block.end] = f"print({END + str(block.start)!r})"
    return "\n".join(lines) + "\n"


def disagreements(text: str, output: str) -> Iterator[str]:
    """Yield a line for each block whose output is not what the document shows.

    Args:
        text: The document.
        output: What its announced program printed.
    """
    *parts, _ = re.split(rf"{END}(\d+)\n", output)
    printed = {int(at): part for part, at in zip(parts[::2], parts[1::2], strict=True)}
    for block in blocks(text):
        found = printed.get(block.start)
        if found is not None and block.shown is not None and not agrees(block.shown, found):
            yield f"line {block.end + 1} shows\n{block.shown}\nbut\n{found}"


def commands(block: Block) -> list[list[str]]:
    """Return the words of each `forebay` command of a shell block."""
    if block.language not in SHELLS:
        return []
    lines = "\n".join(block.lines).replace("\\\n", "").split("\n")
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [line for line in words if line[:1] == ["forebay"]]


def agrees(shown: str, printed: str) -> bool:
    """Return whether a program printed what a document shows, but for times and rates."""
    pattern = re.escape(_settled(shown)).replace("…", ".*")
    return re.fullmatch(pattern, _settled(printed), re.DOTALL) is not None


def _shown(lines: list[str], closing: int, pairs: dict[int, int]) -> str | None:
    """Return the `text` block that follows a closing fence with nothing in between."""
    following = next((at for at in range(closing + 1, len(lines)) if lines[at].strip()), None)
    if following is None or lines[following] != "```text":
        return None
    return "\n".join(lines[following + 1 : pairs[following]])


def _settled(text: str) -> str:
    lines = [line.rstrip() for line in text.strip().splitlines()]
    return RATE.sub("0", TIME.sub("0 s", "\n".join(lines)))
