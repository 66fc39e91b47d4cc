"""What a zygote and its workers do with signals that are sent to all processes of a program."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest
from test_zygote import Calls, is_there, start_daemon, tools, until

import forebay
from forebay.pools.events import WorkerDied
from kit.faults import Gate


@pytest.fixture
def new_interpreter():
    """Have the next zygote be a new interpreter, since this process has a second thread."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    tools.start = "auto"
    yield
    tools.start = "fork"
    over.set()
    thread.join()


@pytest.fixture
def handlers():
    """Let a test install handlers."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR2)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def test_what_workers_started_ends_with_a_zygote_that_is_told_to_end():
    """Also a daemon, which such a signal may not reach; and no task is to blame."""
    with tools.running(Calls()) as pool:
        daemon = tools.result(pool, start_daemon)
        os.kill(pool._zygote.pid, signal.SIGTERM)
        (death,) = tools.collect(pool, tools.died)
        assert isinstance(death, WorkerDied) and death.external
        until(lambda: not is_there(daemon))


def test_workers_of_a_new_interpreter_ignore_what_the_program_handles(new_interpreter, handlers):
    """Though it knows nothing of the program's handlers by itself."""
    signal.signal(signal.SIGUSR2, lambda *_: None)
    with tools.running(Calls()) as pool:
        worker = tools.result(pool, os.getpid)
        for each in (pool._zygote.pid, worker):
            os.kill(each, signal.SIGUSR2)
        assert tools.result(pool, os.getpid) == worker


INSTALLS = """
import signal

def note(number, frame):
    raise AssertionError("called in a worker")

for each in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(each, note)

def tell(path):
    return {each: repr(signal.getsignal(getattr(signal, each))) for each in ("SIGTERM", "SIGUSR2")}
"""


def test_a_handler_that_the_users_module_installs_is_for_the_program(
    tmp_path, monkeypatch, handlers
):
    """Workers import the module, too."""
    (tmp_path / "installs_handlers.py").write_text(INSTALLS)
    (tmp_path / "a").touch()
    monkeypatch.syspath_prepend(tmp_path)
    from installs_handlers import tell

    report = forebay.preprocess(
        tell, [tmp_path / "a"], tmp_path / "out", num_workers=1, progress=False
    )
    (row,) = report.metadata.drop(["source"]).to_pylist()
    assert "SIG_DFL" in row["SIGTERM"] and "SIG_IGN" in row["SIGUSR2"]
    del sys.modules["installs_handlers"]


def test_no_handler_is_called_in_a_zygote_that_begins(script, tmp_path):
    """It is a fork, and has the program's handlers for a moment; then the signal ends it."""
    code, out, err = script(
        """
        def handle(*_):
            os.write(1, b"called\\n")

        def begin_session():
            setsid()
            if not os.path.exists(sys.argv[1]):
                Path(sys.argv[1]).touch()
                os.kill(os.getpid(), signal.SIGTERM)

        setsid, os.setsid = os.setsid, begin_session
        signal.signal(signal.SIGTERM, handle)
        print(sum(len(each) for each in forebay.DataLoader(Numbers(40), 4, num_workers=2)))
        """,
        tmp_path / "marker",
    ).end()
    assert (code, out, err) == (0, "40\n", "")
    assert (tmp_path / "marker").exists()


WAITS = """
import os
from pathlib import Path
from forebay.base.process import is_worker
from kit.faults import Gate

if is_worker():
    Gate(Path(os.environ["GATE"])).wait()

def work(path):
    pass
"""


def test_a_zygote_that_imports_ends_with_its_driver(script, tmp_path):
    """At once, however long the import of the user's module takes."""
    (tmp_path / "waits.py").write_text(WAITS)
    gate = Gate(tmp_path)
    running = script(
        """
        os.environ["GATE"] = sys.argv[1]
        sys.path.insert(0, sys.argv[1])
        import waits
        over = threading.Event()
        threading.Thread(target=over.wait, daemon=True).start()
        forebay.preprocess(waits.work, sys.argv[1] + "/*.py", sys.argv[1] + "/out", progress=False)
        """,
        tmp_path,
    )
    gate.wait_reached()
    running.kill()
    assert running.end().code == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.full
def test_a_forkserver_that_is_killed_while_workers_begin_is_started_again(script, tmp_path):
    """What it was about to start has not failed."""
    code, out, err = script(
        """
        class Fatal(Numbers):
            def __setstate__(self, state):
                self.__dict__.update(state)
                if not os.path.exists(sys.argv[1]):
                    Path(sys.argv[1]).touch()
                    os.kill(os.getppid(), signal.SIGTERM)
                    os.kill(os.getpid(), signal.SIGTERM)

        if __name__ == "__main__":
            loader = forebay.DataLoader(
                Fatal(40), 4, num_workers=2, multiprocessing_context="forkserver"
            )
            print(sum(len(each) for each in loader))
        """,
        tmp_path / "marker",
    ).end()
    assert (code, out, err) == (0, "40\n", "")
    assert (tmp_path / "marker").exists()
