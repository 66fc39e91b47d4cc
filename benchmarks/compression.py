"""Caches with and without compression: their size, and the samples per second that are read.

Texts are the sources of Python's library, in pieces of 4,000 characters; tokens are the numbers of
their words by frequency, 2,048 uint16 in a sample; images are JPEGs that look like clouds, and the
same decoded. All in the page cache: what compression saves on a disk or a network comes on top.
"""

from __future__ import annotations

import io
import itertools
import re
import shutil
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import Ground
from benchmarks.preprocess import Rows, show

BATCH, WORKERS, SIDE = 64, 2, 224
# Of each kind so many are made, which come again and again until they have so many bytes: more than
# a process keeps decompressed.
KNOWN, QUICK_KNOWN = {"text": 8192, "tokens": 4096, "jpeg": 1024, "pixels": 256}, 64
NBYTES, QUICK_NBYTES = 768_000_000, 1_000_000
RANDOM, QUICK_RANDOM = 100, 20
BATCHES, QUICK_BATCHES = 100, 3
CODECS = (None, "lz4", "zstd")


class Samples:
    """Some samples in memory, again and again."""

    def __init__(self, samples: list[Any], count: int) -> None:
        self._samples, self._count = samples, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % len(self._samples)]


def _texts(count: int) -> list[str]:
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    paths = [path for path in paths if "site-packages" not in path.parts]
    pieces = (
        text[at : at + 4000]
        for text in (path.read_text(errors="replace") for path in paths)
        for at in range(0, len(text), 4000)
    )
    return [*itertools.islice(pieces, count)]


def _tokens(count: int) -> list[Any]:
    import numpy as np

    words = re.findall(r"\w+|\W", "".join(_texts(1 << 20)))
    numbers = {word: at for at, (word, _) in enumerate(Counter(words).most_common())}
    known = [min(numbers[word], 65_535) for word in words]
    starts = range(0, len(known) - 2048, max((len(known) - 2048) // count, 1))
    return [np.array(known[at : at + 2048], np.uint16) for at in starts][:count]


def _pixels(count: int) -> list[Any]:
    import numpy as np
    from PIL import Image

    noise, found = np.random.default_rng(0), []
    for _ in range(count):
        coarse = Image.fromarray(noise.integers(0, 256, (14, 14, 3), np.uint8))
        smooth = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.int16)
        grain = noise.integers(-4, 5, smooth.shape, np.int16)
        found.append((smooth + grain).clip(0, 255).astype(np.uint8))
    return found


def _jpegs(count: int) -> list[bytes]:
    from PIL import Image

    found = []
    for pixels in _pixels(count):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "jpeg", quality=90)
        found.append(file.getvalue())
    return found


KINDS: dict[str, Callable[[int], list[Any]]] = {
    "text": _texts,
    "tokens": _tokens,
    "jpeg": _jpegs,
    "pixels": _pixels,
}


def compression(ground: Ground, quick: bool) -> None:
    """Print size and rates of caches by codec and kind of sample."""
    import numpy as np

    import forebay

    print(f"Caches in a folder, {WORKERS} workers, batches of {BATCH}; samples per second")
    rows = Rows()
    for kind, make in KINDS.items():
        known = make(QUICK_KNOWN if quick else KNOWN[kind])
        each = sum(getattr(one, "nbytes", len(one)) for one in known) / len(known)
        samples = Samples(known, int((QUICK_NBYTES if quick else NBYTES) / each))
        picks = np.linspace(0, len(samples) - 1, QUICK_RANDOM if quick else RANDOM, dtype=int)
        some = np.random.default_rng(0).permutation(picks)  # of another block each
        plain = 0
        for codec in CODECS:
            folder = ground.root / f"compressed-{kind}-{codec}"
            began = time.perf_counter()
            cached = forebay.cache(
                samples, folder, compression=codec, num_workers=0, progress=False
            )
            made_s = time.perf_counter() - began
            size = sum(path.stat().st_size for path in folder.glob("*.arrow"))
            plain = plain or size
            at_random = _rate(len(some), partial(_read, cached, some.tolist()))
            cached = forebay.open_cache(folder)  # nothing is kept of it
            in_order = _rate(len(samples), partial(_read, cached, range(len(samples))))
            loaded = _loaded(cached, QUICK_BATCHES if quick else BATCHES)
            rows.append(
                (
                    *(kind, codec or "none", f"{size / 1e6:.0f} MB", f"{plain / size:.2f}"),
                    f"{made_s:.1f} s",
                    *(f"{rate:,.0f}" for rate in (at_random, in_order, loaded)),
                )
            )
            shutil.rmtree(folder)
    columns = ("samples", "codec", "files", "smaller", "made", "cached[i] at random")
    show((*columns, "in order", "loader"), rows)


def _read(cached: Any, indices: Any) -> None:
    for index in indices:
        cached[index]


def _rate(count: int, call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return count / (time.perf_counter() - began)


def _loaded(cached: Any, batches: int) -> float:
    """Return the samples per second of some batches, after the first one."""
    import forebay

    with forebay.DataLoader(
        *(cached, BATCH), shuffle=True, seed=0, num_workers=WORKERS, collate_fn=len
    ) as loader:
        coming = iter(loader)
        next(coming)
        return _rate(batches * BATCH, lambda: [*itertools.islice(coming, batches)])
