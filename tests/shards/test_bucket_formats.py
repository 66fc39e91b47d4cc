"""Shards of every format in a bucket: the same samples as of files, and few bytes."""

from __future__ import annotations

import numpy as np
import pytest
from test_formats import SAMPLES, WRITERS, opened

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _formats(root):
    """Write shards of each format to folders of the bucket."""
    for suffix, write in WRITERS.items():
        folder = root / "bucket" / suffix.removeprefix(".")
        folder.mkdir(exist_ok=True)
        for number in range(3):
            data = write(SAMPLES[30 * number : 30 * number + 30])
            (folder / f"part-{number}{suffix}").write_bytes(data)


@pytest.mark.parametrize("suffix", WRITERS)
def test_samples_in_a_bucket_are_those_of_files(suffix, endpoint):
    """At random, in order, and with some of the columns."""
    url = f"s3://bucket/{suffix.removeprefix('.')}"
    samples = opened(url)
    order = np.random.default_rng(0).permutation(len(SAMPLES)).tolist()
    assert [samples[at] for at in order[:20]] == [SAMPLES[at] for at in order[:20]]
    assert [*samples] == SAMPLES
    found = opened(url, columns=["score", "id"]).__getitems__([89, 0, 45])
    assert found == [{"score": at / 8, "id": at} for at in (89, 0, 45)]
