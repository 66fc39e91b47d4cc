"""What the tests of `forebay.cache` share with those of the other verbs."""

from __future__ import annotations

import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

# Runs to be killed are those of preprocess; batches are compared as the loader's are.
sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("preprocess", "loading")]


@pytest.fixture(autouse=True, scope="session")
def _what_torch_keeps():
    """Have torch start the thread that hands out descriptors, which it keeps from then on."""
    ForkingPickler.loads(ForkingPickler.dumps(torch.ones(1)))
