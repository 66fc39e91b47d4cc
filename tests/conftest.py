"""What holds for every test: it leaves nothing behind. Stores for outputs; scripts with torch."""

from __future__ import annotations

import gc
import io
import signal
import sys
from collections.abc import Iterator

import hypothesis
import pytest
from pyarrow import csv

from buckets import bucket_server, empty_memory, new_bucket
from forebay.pools import zygote_handle
from kit.leaks import let_go, no_leaks
from large_pages import use_large_pages
from tiers import TIERS, Case, chosen
from trainers import Trainers

# Longest wait for what a test ended to be gone, on a loaded machine.
ENDING_S = 60.0

# No example fails for being slow: the machine may be busy. `make test-all` takes the other profile.
hypothesis.settings.register_profile("forebay", deadline=None, max_examples=40)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=300)
hypothesis.settings.load_profile("forebay")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of make's targets."""
    parser.addoption(
        "--tier", choices=TIERS, default="full", help="which cases run; see tests/tiers.py"
    )


@pytest.hookimpl(trylast=True)  # marks have been added
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is not of the tier."""
    is_chosen = chosen(config.getoption("--tier"), [*map(_case, items)])
    left_out = [item for item, here in zip(items, is_chosen, strict=True) if not here]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item, here in zip(items, is_chosen, strict=True) if here]


def _case(item: pytest.Item) -> Case:
    """Return what the tier of a case depends on."""
    left = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    values = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        values[str(names)] = tuple(id(left.pop(name.strip(), None)) for name in names)
    values |= {name: id(value) for name, value in left.items()}  # of fixtures
    return Case(item.nodeid, {mark.name for mark in item.iter_markers()}, values)


def pytest_collection_finish() -> None:
    """Keep the collector from visiting what lives to the end: torch is a million objects.

    And have it in large pages, where the system has them: a test with workers takes more than half
    of its processor time for copies of this process's page tables.
    """
    gc.collect()
    gc.freeze()
    use_large_pages()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Let go of what a failed test holds, as its report is written: a loader, a fetcher.

    Its fixtures would wait in vain until that has ended. pytest keeps the error for debuggers.
    """
    let_go(getattr(sys, "last_value", None))


@pytest.fixture(autouse=True, scope="session")
def _what_libraries_keep() -> None:
    """Have pyarrow open the pipe for signals that it keeps from its first CSV file on."""
    csv.read_csv(io.BytesIO(b"a\n1\n"))


@pytest.fixture(autouse=True, scope="session")
def _heed_ctrl_c() -> None:
    """Heed Ctrl-C where a shell ran the suite in its background: children inherit to ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the ledgers of outputs that are URLs out of the user's home, and those there out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a thread, a descriptor or shared memory."""
    with no_leaks(wait_s=ENDING_S):
        yield


@pytest.fixture
def forked_workers(monkeypatch):
    """Fork the workers of a run, though this process has threads: those of pyarrow, without work.

    A new interpreter, which is started beside threads, imports everything once more. It has tests
    of its own: in `tests/pools/`, and those of runs that are not marked.
    """

    def fork(control, answers, payload, keep):
        return zygote_handle.fork(control, answers, payload, zygote_handle.driver_ends)

    monkeypatch.setattr(zygote_handle, "execute", fork)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a way to move to another machine, as far as the ledger knows machines."""

    def move_to(name):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / name))

    move_to("here")
    return move_to


@pytest.fixture
def memory():
    """Return the memory file system, empty before and after."""
    with empty_memory() as system:
        yield system


@pytest.fixture(scope="session")
def trainers():
    """Run scripts that use torch, which is imported once for all of them."""
    server = Trainers()
    yield server
    server.close()


@pytest.fixture
def script(trainers, tmp_path):
    """Start a script; whatever it leaves behind fails the test."""
    yield lambda source, *arguments: trainers.start(source, tmp_path, *arguments)
    try:
        trainers.await_none_left()
    finally:
        trainers.kill_all()


@pytest.fixture(scope="session")
def server():
    """Serve buckets; return what a client's environment must say."""
    with bucket_server() as environment:
        yield environment


@pytest.fixture
def bucket(server, monkeypatch, request):
    """Make an empty bucket, named after its test."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    with new_bucket(request.node.name) as bucket:
        yield bucket
