"""The inputs of a run: what is on the disk, and what a call is given.

A file's content follows from its number and how often it was changed, so that a history is told by
numbers. Inputs are in two folders, either of which may be away, as a disk that is not mounted.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDERS = ("in/d1", "in/d2")
MASKS = "masks"
TABLE = "inputs.csv"
# What a file begins with whose processing fails, by how.
FAILURES = ("raises", "odd", "dies", "broken", "open", "model")
# And what it begins with where only something is special.
SPECIAL = ("flaky", "slow")
# Inputs that are listed one by one, in the order in which they came.
LISTED = ("str", "path", "rows", "rows2", "csv", "dataset", "subset")
# Inputs whose folder is searched.
FOUND = ("folder", "glob", "url", "shards")
ROWS = ("rows", "rows2", "csv")


@dataclass
class Item:
    """One input.

    Attributes:
        number: How many were there before it; never used again.
        stem: Its file's name without the suffix.
        contents: What is read of its file, and of its mask, if it has one.
        fails: How processing fails; empty if it does not.
    """

    number: int
    folder: str
    stem: str
    suffix: str
    contents: list[bytes]
    fails: str = ""
    changes: int = 0

    @property
    def path(self) -> str:
        """Where its file is."""
        return f"{self.folder}/{self.stem}{self.suffix}"

    @property
    def paths(self) -> list[str]:
        """Where its files are."""
        mask = f"{MASKS}/{self.stem}.msk"
        return [self.path, mask][: len(self.contents)]

    def data(self) -> list[bytes]:
        """Return what its files hold."""
        if self.suffix != ".jsonl":
            return self.contents
        text = self.contents[0].decode()
        if text.startswith("broken"):
            return [b"[1]\n"]
        return [json.dumps({"stem": self.stem, "text": text}).encode() + b"\n"]

    @property
    def tries(self) -> int:
        """How often a call tries it: what its function has left is not tried again."""
        return 2 if self.fails and self.fails != "open" else 1


def content(number: int, changes: int, failure: str = "") -> bytes:
    """Return what a file has after so many changes; every other one leaves its size."""
    text = f"{failure or 'good'} {number} {changes} "
    return (text * (1 + (number + changes // 2) % 4)).encode()


@dataclass
class Inputs:
    """All inputs, as they should be on the disk.

    Attributes:
        kind: How a call is given them.
        failure: How those fail that fail; "no" if none does.
        call: What they are for.
        away: The folder that is not mounted, if one is not.
    """

    kind: str
    failure: str
    call: str = "preprocess"
    items: list[Item] = field(default_factory=list)
    away: str = ""
    count: int = 0

    # ---- steps

    def add(self) -> Item:
        """Add an input."""
        number = self.count
        self.count += 1
        folder = FOLDERS[number // 2 % 2]
        if folder == self.away:
            folder = next(each for each in FOLDERS if each != self.away)
        letter = chr(ord("a") + number * 7 % 26)  # the order of names is not that of numbers
        is_bad = number % 3 == 1 or self.failure == "slow"
        how = self.failure if self.failure != "no" and is_bad else ""
        fails = how if how in FAILURES else ""
        contents = [content(number, 0, how)]
        if self.kind == "rows2":
            contents.append(content(number + 100, 0))
        suffix = ".jsonl" if self.kind == "shards" else ".txt"
        item = Item(number, folder, f"{letter}{number:02}", suffix, contents, fails)
        self.items.append(item)
        self.write(item)
        return item

    def change(self, item: Item, which: int = 0, *, heals: bool = False) -> None:
        """Change one of an input's files; `heals` turns a bad one into a good one, or back."""
        item.changes += 1
        which %= len(item.contents)
        if heals and self.failure in FAILURES and not which:
            item.fails = "" if item.fails else self.failure
        number = item.number + 100 * which
        how = self.failure if self.failure in SPECIAL else item.fails
        item.contents[which] = content(number, item.changes, "" if which else how)
        self.write(item)

    def touch(self, item: Item) -> None:
        """Give an input's file another time, and the same content."""
        time = os.stat(item.path).st_mtime_ns + 5_000_000_000
        os.utime(item.path, ns=(time, time))

    def remove(self, item: Item) -> None:
        """Remove an input, with its files."""
        self.items.remove(item)
        for path in item.paths:
            Path(path).unlink()

    def rename(self, item: Item) -> None:
        """Give an input another name: it is another one."""
        before = item.paths
        item.number, self.count = self.count, self.count + 1
        item.stem = f"{item.stem[0]}{item.number:02}"
        for old, new in zip(before, item.paths, strict=True):
            os.rename(old, new)
        self.write(item)

    def relocate(self, item: Item) -> None:
        """Move an input into the other folder, where its outputs have the same names."""
        before = item.path
        item.folder = next(each for each in FOLDERS if each != item.folder)
        os.rename(before, item.path)

    def unmount(self, folder: str, *, leaves_empty: bool) -> None:
        """Take a folder away; an empty mount point may stay."""
        os.rename(folder, f"{folder}.away".replace("in/", ""))
        if leaves_empty:
            os.mkdir(folder)
        self.away = folder

    def mount(self) -> None:
        """Bring back the folder that is away."""
        if self.away:
            shutil.rmtree(self.away, ignore_errors=True)
            os.rename(f"{self.away}.away".replace("in/", ""), self.away)
            self.away = ""

    def write(self, item: Item) -> None:
        """Write an input's files; a changed one has another time, too."""
        for path, data in zip(item.paths, item.data(), strict=True):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            old = os.stat(path).st_mtime_ns if os.path.exists(path) else 0
            if old and Path(path).read_bytes() == data:
                continue
            Path(path).write_bytes(data)
            if old >= os.stat(path).st_mtime_ns:
                os.utime(path, ns=(old + 1_000_000, old + 1_000_000))

    # ---- what a call gets

    def is_away(self, item: Item) -> bool:
        """Return whether an input's file cannot be seen."""
        return item.folder == self.away

    def movable(self, *, alone: bool = True) -> list[Item]:
        """Return those that may be changed or removed: no folder is emptied by that."""
        here = [item for item in self.items if not self.is_away(item)]
        if not alone:
            return here
        return [one for one in here if sum(one.folder == each.folder for each in here) > 1]

    def listed(self) -> list[Item]:
        """Return the inputs in the order of a listing."""
        if self.kind in LISTED:
            return list(self.items)
        return sorted(self.items, key=lambda item: item.path)

    def source(self, item: Item) -> Any:
        """Return what the table calls an input."""
        if self.kind == "subset":
            return item.number
        if self.kind == "shards":
            return item.path.removeprefix("in/")
        if self.kind == "url":
            return f"file://{os.getcwd()}/{item.path}"
        return item.path

    def name(self, item: Item) -> str:
        """Return what `redo=` calls an input."""
        return f"{item.number}" if self.kind == "subset" else f"{item.stem}{item.suffix}"

    def key(self, item: Item) -> str:
        """Return what an input is known by."""
        return str(self.source(item))

    def columns(self, item: Item) -> dict[str, Any]:
        """Return an input's row; empty if it has none."""
        if self.kind == "rows2":
            return {"image": item.path, "mask": item.paths[1], "label": item.number}
        if self.kind == "rows":
            return {"path": item.path, "label": item.number}
        if self.kind == "csv":
            label = str(item.number) if self.call == "preprocess" else item.number
            return {"path": item.path, "label": label}
        return {}

    def argument(self) -> Any:
        """Return what a call is given: plain data; the driver makes objects of it."""
        items = self.listed()
        match self.kind:
            case "folder":
                return "in"
            case "glob":
                return "in/*/*.txt"
            case "url":
                return f"file://{os.getcwd()}/in/*/*.txt"
            case "str" | "path" | "dataset":
                return [item.path for item in items]
            case "subset":
                return [item.number for item in items]
            case "shards":
                return "in"
            case "rows" | "rows2":
                return [self.columns(item) for item in items]
            case "csv":
                with open(TABLE, "w", newline="") as file:
                    writer = csv.DictWriter(file, ["path", "label"])
                    writer.writeheader()
                    writer.writerows(self.columns(item) for item in items)
                return TABLE
        raise ValueError(self.kind)
