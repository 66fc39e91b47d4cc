"""forebay on a Ray cluster, compared with Ray's own APIs and a local pool: `make bench-ray`.

All tables of a run share one cluster of two CPUs, so they are measured only on request. Importing
this package does not import Ray.
"""

from __future__ import annotations

from benchmarks.ray.batches import batches
from benchmarks.ray.death import death
from benchmarks.ray.inputs import slow, tiny

TABLES = {"ray-tiny": tiny, "ray-slow": slow, "ray-batches": batches, "ray-death": death}
