"""What holds for every test: it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.testing.leaks import no_leaks


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a thread, a descriptor or shared memory."""
    with no_leaks():
        yield
