"""The README's picture: a training loop over time, with torch's loader and with forebay's.

`python -m benchmarks.timeline` draws `docs/pictures/waiting.svg` from `waiting.json` beside it;
with `--record` it measures first. The training is the pattern `epochs` of the benchmark of waits:
samples and steps sleep, so the picture shows when the loop waits, not the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.loading.patterns import BATCH, PATTERNS
from benchmarks.loading.peers import WORKERS
from benchmarks.loading.turns import once
from benchmarks.machine import versions
from benchmarks.measure import Ground
from benchmarks.svg import picture, rectangle, words

DATA = Path("docs", "pictures", "waiting.json")
PATTERN = "epochs"
# By peer: how it is run, and its title.
LOADERS = {
    "torch": ("wait", "before: torch.utils.data.DataLoader"),
    "forebay": ("deep", 'after: forebay.DataLoader(…, buffer="2GB")'),
}
SHOWN_S = 4.0
WIDTH, MARGIN, LANE, BAR, SEPARATOR = 760, 20, 64, 30, 0.6


def record() -> dict[str, Any]:
    """Train with each loader and return when its steps began and ended, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        ground = Ground(Path(folder), 0)
        found = {
            peer: once(what, peer, PATTERN, ground, SHOWN_S) for peer, (what, _) in LOADERS.items()
        }
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions("forebay", "torch"),
        "training": f"{PATTERNS[PATTERN].title}; batch {BATCH}; {WORKERS} workers",
        "steps": {
            peer: [[round(each, 4) for each in step] for step in each["steps"]]
            for peer, each in found.items()
        },
    }


def draw(recorded: dict[str, Any], seconds: float = SHOWN_S) -> str:
    """Return the picture of the first seconds of a recording."""
    scale = (WIDTH - 2 * MARGIN) / seconds
    parts = [words(MARGIN, 24, f"the first {seconds:g} seconds of a training loop")]
    legend = ((WIDTH - 244, "main", "a training step"), (WIDTH - 92, "wait", "waiting"))
    for x, kind, text in legend:
        parts += [rectangle(x, 13, 12, 12, kind), words(x + 18, 24, text)]
    for number, (peer, (_, title)) in enumerate(LOADERS.items()):
        top = 44 + number * LANE
        steps = [
            (begin, min(end, seconds)) for begin, end in recorded["steps"][peer] if begin < seconds
        ]
        # What follows the last step of a recording that ended early is not known to be a wait.
        ended = seconds if recorded["steps"][peer][-1][1] >= seconds else steps[-1][1]
        waited = 1 - sum(end - begin for begin, end in steps) / ended
        note = f"waits {waited:.0%} of the time, {len(steps)} steps"
        parts += [
            words(MARGIN, top + 12, title),
            words(WIDTH - MARGIN, top + 12, note, "note", "end"),
            rectangle(MARGIN, top + 20, ended * scale, BAR, "wait"),
        ]
        for begin, end in steps:
            left, right = round(MARGIN + begin * scale, 2), round(MARGIN + end * scale, 2)
            parts.append(rectangle(left, top + 20, right - left, BAR, "main"))
            parts.append(rectangle(right - SEPARATOR, top + 20, SEPARATOR, BAR, "page"))
    height = 44 + len(LOADERS) * LANE + 40
    libraries = ", ".join(f"{name} {version}" for name, version in recorded["versions"].items())
    parts += [
        words(MARGIN, height - 30, recorded["training"], "note"),
        words(MARGIN, height - 12, f"{recorded['cores']} cores; {libraries}", "note"),
    ]
    return picture("A training loop, waiting for data and not", WIDTH, height, parts)


def main() -> None:
    """Draw the picture, after measuring with `--record`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__)
    parser.add_argument("--record", action="store_true", help="measure first")
    if parser.parse_args().record:
        DATA.write_text(json.dumps(record()) + "\n", encoding="utf-8")
    recorded = json.loads(DATA.read_text(encoding="utf-8"))
    DATA.with_suffix(".svg").write_text(draw(recorded), encoding="utf-8")


if __name__ == "__main__":
    main()
