"""The server, the bucket with all formats, and runs of readers."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.bucket.shard_forms import FORMS
from benchmarks.bucket.stores import BUCKET, Samples
from benchmarks.call import Call
from benchmarks.measure import Ground
from kit.range_server import RangeServer

COUNT, QUICK_COUNT = 10_000, 2_000
# 30 ms to the first byte, a hundredth of the answers half a second later, 75 MB/s a connection.
LINK: dict[str, Any] = {
    "first_byte_s": 0.03,
    "spread": 0.3,
    "slow_share": 0.01,
    "slow_factor": 17.0,
    "rate": 75e6,
}
# And 75 MB/s for each core here, in all: a c6id.8xlarge of AWS has 49 for each of its 32.
SHARED: dict[str, Any] = LINK | {"link": 150e6}
LIMIT_S = 300.0


class Store:
    """A bucket that a server serves while the program runs.

    Args:
        root: Where its folder is made.
        count: Samples.
    """

    def __init__(self, root: Path, count: int) -> None:
        given = os.environ.get("BENCHMARK_BUCKET")  # a folder that an earlier run has filled
        self.root = Path(given) if given else root / "store"
        self.samples = Samples(count)
        self.failed: dict[str, str] = {}
        self.scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=root))
        self.server = RangeServer(self.root, **SHARED).__enter__()
        atexit.register(self.server.__exit__)

    def write(self, *forms: str) -> None:
        """Have the samples in some forms, if they can be written."""
        for form in forms:
            folder = self.root / BUCKET / form
            if not folder.exists() and form not in self.failed:
                self._write(form, folder)

    def _write(self, form: str, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        arguments = form, str(len(self.samples)), str(folder)
        module = "shard_forms" if form in FORMS else "stores"
        with Call(f"benchmarks.bucket.{module}", *arguments) as call:
            try:
                call.answer(LIMIT_S)
            except RuntimeError as error:
                self.failed[form] = reason(error)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the shards of forebay's cache."""
        folder = self.root / BUCKET / "forebay"
        return sum(path.stat().st_size for path in folder.glob("shard-*"))

    def run(self, name: str, **given: Any) -> dict[str, Any]:
        """Run a reader and return what it found.

        Raises:
            RuntimeError: It failed, or took too long.
        """
        scratch, limit_s = given.pop("scratch", None), given.pop("limit_s", LIMIT_S)
        own = scratch or tempfile.mkdtemp(dir=self.scratch)
        try:
            with self.started(name, scratch=own, **given) as call:
                most, until = 0, time.monotonic() + limit_s  # of the disk, at any time
                while "disk" in given.get("options", {}) and call.process.poll() is None:
                    if time.monotonic() > until:
                        raise RuntimeError(
                            f"did not end in {limit_s:g} s, and took {most / 1e6:,.0f} MB of disk"
                        )
                    most = max(most, disk_bytes(Path(own)))
                    time.sleep(0.1)
                return json.loads(call.answer(limit_s)) | {"most_disk": most}
        finally:
            if scratch is None:
                shutil.rmtree(own, ignore_errors=True)

    def started(self, name: str, **given: Any) -> Call:
        """Start a reader."""
        target = {"url": self.server.url, "folder": str(self.root), "count": len(self.samples)}
        return self.call("benchmarks.bucket.run", name, json.dumps(target | given))

    def call(self, module: str, *arguments: str) -> Call:
        """Start a program that reads the bucket."""
        return Call(module, *arguments, **self.environment)

    @property
    def environment(self) -> dict[str, str]:
        """What clients read from the environment."""
        return self.server.environment | {"OMP_NUM_THREADS": "1", "AWS_ALLOW_HTTP": "true"}


def disk_bytes(folder: Path) -> int:
    """Return the bytes of disk that a folder takes."""
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(at, name)).st_blocks * 512
    return total


_made: dict[Path, Store] = {}


def store_of(ground: Ground, quick: bool, forms: Iterable[str] = ("forebay",)) -> Store:
    """Return the bucket, whose forms are written when they are first needed."""
    if ground.root not in _made:
        _made[ground.root] = Store(ground.root, QUICK_COUNT if quick else COUNT)
    _made[ground.root].write(*forms)
    return _made[ground.root]


def reason(error: Exception) -> str:
    """Return why a run failed, in a line: the last exception that it printed."""
    if found := re.search(r"did not end in .*", str(error)):
        return found[0]
    lines = [line for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return (named or lines or [type(error).__name__])[-1][:120]
