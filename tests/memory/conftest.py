"""The slab that the tests of memory share."""

from __future__ import annotations

import pytest

from forebay.memory.slab import Slab


@pytest.fixture
def slab():
    """A slab of its own for each test."""
    slab = Slab()
    yield slab
    slab.close()
