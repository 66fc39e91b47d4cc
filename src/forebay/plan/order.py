"""The order of an epoch's samples, the same on every machine and with every version. PURE."""

from __future__ import annotations

import numpy as np

from forebay.plan.seeds import ORDER, seed_of


def shuffled(length: int, seed: int, epoch: int) -> list[int]:
    """Return the numbers below `length` in the order of one epoch.

    Random 64-bit keys are drawn by Philox (Salmon et al., "Parallel random numbers: as easy as 1,
    2, 3", 2011) and sorted. numpy promises its raw bits for all versions, which it does not for
    `permutation`.
    """
    keys = np.random.Philox(key=seed_of(seed, ORDER, epoch)).random_raw(length)
    order: list[int] = np.argsort(np.atleast_1d(keys), kind="stable").tolist()
    return order
