"""The index of a finished cache: a small JSON file, written last, that lists the shards.

Without it, the cache is not finished. A second call reads only this file.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.caching import columns
from forebay.caching import sample_layout as layout
from forebay.caching.columns import Spec
from forebay.caching.sample_layout import Node
from forebay.errors import InputError, shortened

NAME = "cache.json"
FORMAT = 1
# Exceptions of wrong types, missing keys, huge numbers and deep nesting.
_DAMAGES = (KeyError, TypeError, ValueError, ArithmeticError, RecursionError)


def shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"shard-{number:05}.arrow"


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How a dataset is divided into shards.

    Attributes:
        samples: Number of samples.
        per_shard: Samples of a shard; the last one may have fewer.
        structure: The structure of every sample.
        specs: The types of their leaves, as far as known before all samples were read.
    """

    samples: int
    per_shard: int
    structure: Node
    specs: list[Spec]

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.samples // self.per_shard)

    def names(self) -> list[str]:
        """Return the names of the shards, in order."""
        return [shard_name(at) for at in range(self.shards)]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "samples": self.samples,
            "per_shard": self.per_shard,
            "structure": layout.to_json(self.structure),
            "columns": [columns.to_json(spec) for spec in self.specs],
        }

    @classmethod
    def from_json(cls, found: Any) -> CachePlan:
        """Return the plan that `to_json` described.

        Raises:
            ValueError: It describes no plan; or KeyError, TypeError, OverflowError, RecursionError.
        """
        specs = [columns.from_json(spec) for spec in found["columns"]]
        samples, per_shard = int(found["samples"]), int(found["per_shard"])
        if not 1 <= samples <= sys.maxsize or per_shard < 1:
            raise ValueError(f"{samples} samples, {per_shard} in a shard")
        structure = layout.from_json(found["structure"])
        if len(leaves := layout.names_of(structure)) != len(specs):
            raise ValueError(f"{len(specs)} columns for {len(leaves)} leaves")
        return cls(samples, per_shard, structure, specs)


@dataclass(frozen=True, slots=True)
class Index:
    """A finished cache.

    Attributes:
        plan: How it is divided into shards.
        sizes: The size of each shard in bytes.
        fingerprint: The description of the dataset, as in the ledger.
        version: The user's name for the state of the dataset, if any.
    """

    plan: CachePlan
    sizes: tuple[int, ...]
    fingerprint: str
    version: str | None

    def write(self, private: Path) -> None:
        """Write it to forebay's own folder, atomically."""
        record = {
            "format": FORMAT,
            "plan": self.plan.to_json(),
            "sizes": list(self.sizes),
            "fingerprint": self.fingerprint,
            "version": self.version,
        }
        staged = private / f"{NAME}.new"
        with staged.open("w", encoding="utf-8") as file:
            json.dump(record, file)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(private / NAME)

    @classmethod
    def read(cls, private: Path) -> Index | None:
        """Return the index in forebay's own folder; None if the cache is not finished.

        Raises:
            InputError: It is damaged, or of another version of forebay.
        """
        path = private / NAME
        if path.exists() and not path.is_file():
            raise InputError(
                f"{str(path)!r} is not a file\n  Remove it and call forebay.cache again."
            )
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise InputError(
                    f"{str(path)!r} has format {found['format']}; this forebay reads format "
                    f"{FORMAT}\n"
                    "  Use the forebay that wrote it, or call forebay.cache(..., resume=False)."
                )
            sizes = tuple(map(int, found["sizes"]))
            plan = CachePlan.from_json(found["plan"])
            index = cls(plan, sizes, str(found["fingerprint"]), found["version"])
            if len(sizes) != plan.shards:
                raise ValueError(f"{len(sizes)} sizes")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except InputError:
            raise
        except _DAMAGES as error:
            raise InputError(
                f"{str(path)!r} is damaged: {shortened(error)}\n"
                "  Remove it and call forebay.cache again: completed shards are kept."
            ) from error
        return index

    @staticmethod
    def remove(private: Path) -> None:
        """Remove the index, if there is one."""
        (private / NAME).unlink(missing_ok=True)

    def missing(self, folder: Path) -> list[str]:
        """Return the shards that the folder lacks.

        Raises:
            InputError: A shard has the wrong size, or belongs to another cache.
        """
        names, found = self.plan.names(), {}
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("shard-") and entry.name.endswith(".arrow"):
                    with suppress(FileNotFoundError):  # a link to what is no longer there
                        found[entry.name] = entry.stat().st_size
        lost = []
        for name, size in zip(names, self.sizes, strict=True):
            there = found.pop(name, None)
            if there is None:
                lost.append(name)
            else:
                check_size(folder / name, there, size)
        if found:
            raise InputError(
                f"{str(folder / min(found))!r} does not belong to this cache, which has "
                f"{len(names)} shards\n"
                "  Nothing can be added to a cache. Remove the file, or make a cache of both "
                "datasets in another directory."
            )
        return lost


def check_size(path: Path, there: int, written: int) -> None:
    """Raise InputError if a shard does not have the size that was written."""
    if there != written:
        raise InputError(
            f"{str(path)!r} has {there:,} bytes instead of the {written:,} that were written\n"
            "  It is truncated, or something else wrote to it. Remove it and call forebay.cache "
            "again, with the same dataset and directory: it writes that shard again."
        )
