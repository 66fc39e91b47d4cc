"""Steps of loader lives about shards that are replaced, orders that change, and refused states."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from . import loader_data, loader_sets
from .life import Say, WrongError
from .loader_oracle import STREAMS, Oracle, Position
from .loader_plans import Plan
from .loader_trainer import Trainer

STEPS = ("reorder", "other_workers", "rewrite", "other_shards")
_SHARDS = ("tar", "parquet", "jsonl", "arrow")
_ALL = 1000


class MoreSteps:
    """What `History` has besides."""

    setup: dict[str, str]
    folder: Path
    oracle: Oracle
    say: Say
    saved: tuple[str, Position, dict[str, str]] | None
    is_open: bool

    def _trainer(self) -> Trainer:
        raise NotImplementedError

    def _right(self, answer: Any) -> Any:
        raise NotImplementedError

    def _refused(self, answer: Any) -> None:
        raise NotImplementedError

    def _state(self, draw: int) -> None:
        raise NotImplementedError

    def _continue(self, setup: dict[str, str], draw: int) -> None:
        raise NotImplementedError

    def _restart(self) -> None:
        raise NotImplementedError

    def _take_most(self, most: int) -> None:
        raise NotImplementedError

    def _reorder(self, draw: int) -> None:
        """The user gives a sampler another order, between epochs."""
        if self.is_open or self.setup["sampler"] != "fixed" or self.setup["holder"] == "sampler":
            return
        at = self.oracle.at
        at.order, at.is_clean = 1 + draw % 5, False
        self._right(self._trainer().ask("set_order", at.order))

    def _other_workers(self, draw: int) -> None:
        """A stream's state is refused by a loader with another number of workers."""
        others = {"1": "3", "3": "1"}
        if self.setup["data"] not in STREAMS or self.setup["workers"] not in others:
            return
        self._state(draw)
        if self.saved and self.saved[1].batch:
            state, position, setup = self.saved
            setup = {**setup, "workers": others[setup["workers"]]}
            plan = Plan(setup, self.folder, told=position.told, version=position.version)
            self._refused(self._trainer().ask("open", plan, state, None))
            self._continue(dict(self.saved[2]), 0)

    def _rewrite(self, draw: int) -> None:
        """A shard is written anew, with other samples: it is not used, as it was or an error."""
        if self.setup["data"] not in _SHARDS or self.setup["failing"] == "skip":
            return
        self._take_most(1)
        path = self._shards()[draw % 3]
        before, status = path.read_bytes(), path.stat()
        numbers = loader_sets.PARTS[draw % 3]
        other = self._written(draw % 3, [self._other_sample(each) for each in numbers])
        # A shard that is decoded is read into other memory, so it may even be written in place.
        if self.setup["place"] == "compressed" or self.setup["data"] == "parquet":
            path.write_bytes(other.read_bytes())
            other.unlink()
        else:
            other.replace(path)
        self.say(f"  {path.name} has other samples now")
        took = self._right(self._trainer().ask("take", _ALL))
        for _ in range(4):  # what was fetched before lasts for some epochs
            if not took.raised:
                took = self._right(self._trainer().ask("take", _ALL))
        if took.raised:
            self.say(f"  {took.raised.kinds[0]}: {took.raised.message.splitlines()[0]}")
            if "ChangedError" not in took.raised.kinds:
                raise WrongError(f"a shard was replaced, and the loader raised\n{took.raised.text}")
        path.write_bytes(before)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        trainer = self._trainer()
        self._right(trainer.ask("close"))
        trainer.finish()
        self.saved = None
        self._restart()

    def _other_shards(self, draw: int) -> None:
        """A state in mid-epoch is refused if its samples are in other shards now."""
        if self.setup["data"] not in _SHARDS or self.setup["failing"] == "skip":
            return
        self._take_most(1)
        self._state(draw)
        if not self.saved or not self.saved[1].batch:
            return
        state, position, setup = self.saved
        paths = self._shards()
        before = [(path.read_bytes(), path.stat()) for path in paths]
        layout = loader_sets.layout_of(self.setup["data"], self.setup["place"])
        for number, part in enumerate((range(5), range(5, 16), range(16, loader_data.COUNT))):
            samples = [loader_data.stored_sample(each, layout) for each in part]
            self._written(number, samples).replace(paths[number])
        trainer = self._trainer()
        self._right(trainer.ask("close"))
        plan = Plan(setup, self.folder, told=position.told, version=position.version)
        self._refused(trainer.ask("open", plan, state, None))
        self._right(trainer.ask("close"))
        for path, (data, status) in zip(paths, before, strict=True):
            path.write_bytes(data)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        self._continue(dict(setup), 0)

    def _shards(self) -> list[Path]:
        return sorted((self.folder / "data" / "set").iterdir())

    def _other_sample(self, number: int) -> dict[str, Any]:
        """Return a sample of the same size and another content."""
        layout = loader_sets.layout_of(self.setup["data"], self.setup["place"])
        sample = loader_data.stored_sample(number, layout)
        if layout == "tar":
            return sample | {"bin": b"x" * len(sample["bin"])}
        return sample | {"name": f"x{number}"}

    def _written(self, number: int, samples: list[dict[str, Any]]) -> Path:
        """Write a shard beside the others' folder; return where."""
        folder = self.folder / "data" / "other"
        folder.mkdir(exist_ok=True)
        is_small = self.setup["place"] == "compressed"
        loader_sets.write_shard(self.setup["data"], folder, number, samples, is_small=is_small)
        (found,) = folder.iterdir()
        return found
