"""What the tests of `forebay.predict` share with those of the other verbs."""

from __future__ import annotations

import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

# Runs to be killed are those of preprocess.
sys.path.insert(0, str(Path(__file__).parents[1] / "preprocess"))


@pytest.fixture(autouse=True, scope="session")
def _what_torch_keeps():
    """Have torch start the thread that hands out descriptors, which it keeps from then on."""
    ForkingPickler.loads(ForkingPickler.dumps(torch.ones(1)))
