"""The two classes that every test here runs on: torch's own DataLoader, and forebay's."""

from __future__ import annotations

import random
from multiprocessing.reduction import ForkingPickler

import numpy
import pytest
import torch.utils.data


@pytest.fixture(autouse=True, scope="session")
def _what_torch_keeps():
    """Have torch start the thread that hands out descriptors, which it keeps from then on."""
    ForkingPickler.loads(ForkingPickler.dumps(torch.ones(1)))


@pytest.fixture(params=[pytest.param("torch", marks=pytest.mark.thorough), "forebay"])
def loader_class(request):
    """The class under test; what holds for torch's has to hold for forebay's.

    The pinned torch was tried when it was pinned; `make test-all` and `.ci/matrix` try its class.
    """
    if request.param == "torch":
        return torch.utils.data.DataLoader
    from forebay import DataLoader

    return DataLoader


@pytest.fixture(params=[0, 2], ids=["main", "workers"])
def num_workers(request):
    """Loading in the main process, and in two workers."""
    return request.param


@pytest.fixture
def _generators():
    """Put the global random generators back to where they were."""
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    numpy.random.set_state(before[2])
