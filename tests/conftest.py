"""What holds for every test: it leaves nothing behind."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator

import pytest
from pyarrow import csv

from forebay.testing.leaks import no_leaks


@pytest.fixture(autouse=True, scope="session")
def _what_libraries_keep() -> None:
    """Have pyarrow open the pipe for signals that it keeps from its first CSV file on."""
    csv.read_csv(io.BytesIO(b"a\n1\n"))


@pytest.fixture(autouse=True, scope="session")
def _heed_ctrl_c() -> None:
    """Heed Ctrl-C where a shell ran the suite in its background: children inherit to ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a thread, a descriptor or shared memory."""
    with no_leaks():
        yield
