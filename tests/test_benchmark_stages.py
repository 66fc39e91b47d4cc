"""The functions that the benchmark of an input's life names as stages."""

from __future__ import annotations

import importlib
from operator import attrgetter

import pytest
from benchmarks.life import DRIVER, WORKER

pytestmark = pytest.mark.full

PLACES = [place for table in (DRIVER, WORKER) for places in table.values() for place in places]


@pytest.mark.parametrize("place", PLACES)
def test_a_stage_is_a_function_of_forebay(place):
    """It is wrapped by its name, so a new name there has to be one here."""
    module, _, path = place.partition(":")
    assert callable(attrgetter(path)(importlib.import_module(module)))
