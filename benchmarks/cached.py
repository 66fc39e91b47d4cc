"""Samples prepared once and read for many epochs: forebay.cache, memory, JPEGs, other libraries.

Every peer returns the same samples, 3x224x224 uint8 and a label, shuffled, in batches of 64, from
two persistent workers. Each runs in a separate process, and the peers take turns. forebay's
DataLoader reads the first three, and each other library reads its own format. As a program:
`python -m benchmarks.cached prepare|rate PEER FOLDER AMOUNT`.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.call import Call
from benchmarks.measure import Ground, Missing
from benchmarks.preprocess import Rows, show

BATCH, WORKERS = 64, 2
SIDE = 224
# 308 MB as tensors. A peer that reads one file after another has several.
SAMPLES, QUICK_SAMPLES = 2048, 512
SECONDS, QUICK_S = 4.0, 0.5
ROUNDS = 3
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to keep samples and to load them.

    Attributes:
        title: Its name in the table.
        prepare: Writes the files that it reads to a folder, from a folder of JPEGs.
        load: Returns the iterable that is iterated once per epoch.
        distribution: The package whose version is shown.
    """

    title: str
    prepare: Callable[[Path, Path], None]
    load: Callable[[Path, Path], Iterable[Any]]
    distribution: str | None = None


class Jpegs:
    """Images decoded each time."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import numpy as np
        import torch
        from PIL import Image

        with Image.open(self._paths[index]) as image:
            pixels = np.array(image)
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), index


class InMemory:
    """Images decoded beforehand and held, one tensor each."""

    def __init__(self, folder: Path) -> None:
        images = Jpegs(folder)
        self._samples = [images[at] for at in range(len(images))]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._samples[index]


def nothing(_: Path, __: Path) -> None:
    """Prepare nothing."""


def by_forebay(dataset: Any) -> Iterable[Any]:
    """Return forebay's DataLoader, the same for all datasets."""
    import forebay

    return forebay.DataLoader(
        dataset, batch_size=BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True
    )


def make_cache(jpegs: Path, folder: Path) -> None:
    """Cache the images."""
    import forebay

    forebay.cache(Jpegs(jpegs), folder, num_workers=WORKERS, progress=False)


def load_cache(_: Path, folder: Path) -> Iterable[Any]:
    """Read forebay's cache."""
    import forebay

    return by_forebay(forebay.open_cache(folder))


def make_litdata(jpegs: Path, folder: Path) -> None:
    """Write litdata's chunks."""
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # the check needs the network
    import litdata

    litdata.optimize(
        Jpegs(jpegs).__getitem__,
        list(range(len(Jpegs(jpegs)))),
        str(folder),
        num_workers=WORKERS,
        chunk_bytes="64MB",
    )


def load_litdata(_: Path, folder: Path) -> Iterable[Any]:
    """Stream litdata's chunks from the local disk."""
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    import litdata

    dataset = litdata.StreamingDataset(str(folder), shuffle=True)
    return litdata.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True
    )


def make_webdataset(jpegs: Path, folder: Path) -> None:
    """Write the decoded pixels to tar files, without compression."""
    import webdataset

    folder.mkdir()
    images = Jpegs(jpegs)
    with webdataset.ShardWriter(f"{folder}/%04d.tar", maxsize=64 * 2**20, verbose=0) as sink:
        for at in range(len(images)):
            image, label = images[at]
            sink.write({"__key__": f"{at:07}", "npy": image.numpy(), "cls": label})


def load_webdataset(_: Path, folder: Path) -> Iterable[Any]:
    """Read the tars in random order, through a buffer that shuffles."""
    import numpy as np
    import torch
    import webdataset

    def sample(found: dict[str, bytes]) -> tuple[Any, int]:
        # Faster than its built-in decoder of .npy files.
        pixels = np.load(io.BytesIO(found["npy"]))
        return torch.from_numpy(pixels), int(found["cls"])

    tars = sorted(map(str, folder.glob("*.tar")))
    dataset = webdataset.WebDataset(tars, shardshuffle=len(tars)).shuffle(500).map(sample)
    return torch.utils.data.DataLoader(
        dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True
    )


PEERS = {
    "memory": Peer(
        "held in memory, forebay.DataLoader", nothing, lambda jpegs, _: by_forebay(InMemory(jpegs))
    ),
    "cache": Peer("forebay.cache, forebay.DataLoader", make_cache, load_cache),
    "jpegs": Peer(
        "JPEGs decoded, forebay.DataLoader", nothing, lambda jpegs, _: by_forebay(Jpegs(jpegs))
    ),
    "litdata": Peer("litdata StreamingDataset", make_litdata, load_litdata, "litdata"),
    "webdataset": Peer("WebDataset, tars", make_webdataset, load_webdataset, "webdataset"),
}
BASE = "memory"


def cached(ground: Ground, quick: bool) -> None:
    """Print the table."""
    print(f"images 3x{SIDE}x{SIDE} uint8, shuffled, batch {BATCH}, 2 workers, several epochs")
    samples = QUICK_SAMPLES if quick else SAMPLES
    _once("draw", BASE, ground, samples)
    words: dict[str, str] = {}
    prepared: dict[str, float] = {}
    found: dict[str, list[dict[str, float]]] = {}
    for peer in PEERS:
        try:
            prepared[peer] = _once("prepare", peer, ground, samples)["seconds"]
        except Missing:
            words[peer] = "not installed"
    os.sync()
    for _turn in range(1 if quick else ROUNDS):
        for peer in prepared:
            run = _once("rate", peer, ground, QUICK_S if quick else SECONDS)
            found.setdefault(peer, []).append(run)
            if run["numbers"] != found[BASE][0]["numbers"]:
                raise RuntimeError(f"{peer} gave other samples than {BASE}: {run}")
    base = _median(found[BASE])
    rows = Rows()
    for peer, each in PEERS.items():
        if peer in words:
            rows.append((_title(each), words[peer]))
            continue
        rate, among = _median(found[peer]), [run["rate"] for run in found[peer]]
        spread = f"{min(among):,.0f}-{max(among):,.0f}"
        made = f"{prepared[peer]:.1f} s" if each.prepare is not nothing else ""
        rows.append((_title(each), f"{rate:,.0f}", f"{rate / base:.2f}", spread, made))
    show(("", "images/s", "x memory", "slowest-fastest", "preparing"), rows)
    print(f"{samples:,} samples; forebay.cache / JPEGs: {_of(found, 'cache', 'jpegs'):.1f}")


def _of(found: dict[str, list[dict[str, float]]], one: str, other: str) -> float:
    return _median(found[one]) / _median(found[other])


def _median(runs: list[dict[str, float]]) -> float:
    return statistics.median(run["rate"] for run in runs)


def _title(peer: Peer) -> str:
    if peer.distribution is None:
        return peer.title
    try:
        return f"{peer.title} {version(peer.distribution)}"
    except PackageNotFoundError:
        return peer.title


def _once(what: str, peer: str, ground: Ground, amount: float) -> dict[str, float]:
    with Call("benchmarks.cached", what, peer, str(ground.root), str(amount)) as call:
        found = dict(json.loads(call.answer(LIMIT_S)))
    if "missing" in found:
        raise Missing(found["missing"])
    return found


def draw(_: Peer, root: Path, samples: float) -> dict[str, float]:
    """Write JPEGs that look like clouds."""
    import numpy as np
    from PIL import Image

    (root / "jpegs").mkdir()
    noise = np.random.default_rng(0)
    for at in range(int(samples)):
        coarse = Image.fromarray(noise.integers(0, 256, (14, 14, 3), np.uint8))
        smooth = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.int16)
        grain = noise.integers(-16, 17, smooth.shape, np.int16)
        picture = Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))
        picture.save(root / "jpegs" / f"{at:05}.jpg", quality=95)
    return {}


def prepare(peer: Peer, root: Path, _: float) -> dict[str, float]:
    """Write the files that a peer reads."""
    began = time.perf_counter()
    peer.prepare(root / "jpegs", _folder(peer, root))
    return {"seconds": time.perf_counter() - began}


def rate(peer: Peer, root: Path, seconds: float) -> dict[str, Any]:
    """Count images for some seconds; the first epoch is a warm-up, and its samples are checked."""
    loading = peer.load(root / "jpegs", _folder(peer, root))
    numbers = [0, 0, 0]
    for images, labels in loading:
        numbers[0] += len(labels)
        numbers[1] += int(labels.sum())
        numbers[2] += int(images.sum())
    images_seen, elapsed = 0, 0.0
    began = time.perf_counter()
    for images, _ in _endless(loading):
        images_seen += len(images)
        elapsed = time.perf_counter() - began
        if elapsed >= seconds:
            break
    return {"rate": images_seen / elapsed, "numbers": numbers}


def _endless(loading: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loading


def _folder(peer: Peer, root: Path) -> Path:
    name = next(name for name, each in PEERS.items() if each is peer)
    return root / f"cached-{name}"


WHATS = {each.__name__: each for each in (draw, prepare, rate)}


def main(what: str, peer: str, root: str, amount: str) -> None:
    """Do one run and print its result."""
    try:
        found = WHATS[what](PEERS[peer], Path(root), float(amount))
    except ModuleNotFoundError as error:
        if error.name not in (PEERS[peer].distribution, "PIL"):
            raise
        found = {"missing": error.name}
    print()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
