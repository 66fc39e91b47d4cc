"""forebay on a Ray cluster, beside Ray's own ways and this machine's pool: `make bench-ray`.

All tables of a run share one cluster of two CPUs, so they are measured only when they are asked
for. Importing this imports no Ray.
"""

from __future__ import annotations

from benchmarks.ray.batches import batches
from benchmarks.ray.death import death
from benchmarks.ray.inputs import slow, tiny

TABLES = {"ray-tiny": tiny, "ray-slow": slow, "ray-batches": batches, "ray-death": death}
