"""Memory stays flat however large a part or the whole is."""

from __future__ import annotations

import sys
import tracemalloc

import pyarrow as pa
import pytest
import torch
from models import Numbers

import forebay


@pytest.mark.slow
def test_a_part_is_written_as_it_comes(tmp_path):
    """Far more is predicted, in one part, than is ever held."""
    most = 0

    def model(batch):
        nonlocal most
        most = max(most, pa.total_allocated_bytes() + tracemalloc.get_traced_memory()[0])
        return torch.ones(len(batch), 50_000)

    tracemalloc.start()  # NumPy's arrays are among it
    try:
        report = forebay.predict(
            model, Numbers(800), tmp_path, num_workers=0, batch_size=10, progress=False
        )
    finally:
        tracemalloc.stop()
    assert report.done == 800
    assert most < 80 * 2**20 < 800 * 50_000 * 4
    assert sys.getsizeof(report) < 1000
