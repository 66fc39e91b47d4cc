"""The Ray pool against the conformance suite, and what is particular to it."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.engine.job import Job
from forebay.engine.pools.base import Pool
from forebay.engine.pools.ray.host import PlainHosting
from forebay.engine.pools.ray.pool import RayPool
from forebay.engine.pools.ray.preflight import Proof
from forebay.engine.pools.ray.shipping import shipped
from forebay.options import Ray
from forebay.testing.conformance import PoolTests


def pool_of(job: Job, **arguments: Any) -> RayPool:
    payload = shipped(job)
    return RayPool(PlainHosting(payload), Ray(), Proof(payload), None, say=print, **arguments)


@pytest.mark.usefixtures("cluster")
class TestRay(PoolTests):
    """Workers under hosts on a cluster of two nodes."""

    def make_pool(self, job: Job) -> Pool:
        return pool_of(job)
