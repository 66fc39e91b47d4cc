"""Quitting never hangs: ends of scripts, Ctrl-C, kills, forgotten iterators, forks."""

from __future__ import annotations

import signal

import pytest

from kit.faults import Gate

MODES = {
    "plain": "num_workers=2",
    "persistent": "num_workers=2, persistent_workers=True",
    "seed": "num_workers=2, seed=0",
    "buffer": "num_workers=2, buffer='20MB'",
    "thread": "num_workers=2, backend='thread'",
    "thread, buffer": "num_workers=2, backend='thread', buffer='20MB'",
    "none": "num_workers=0, seed=0",
}
PROCESSES = ["plain", "persistent", "seed", "buffer"]

THOROUGH = pytest.mark.thorough

every_mode = pytest.mark.parametrize("options", MODES.values(), ids=MODES)
with_processes = pytest.mark.parametrize(
    "options", [MODES[name] for name in PROCESSES], ids=PROCESSES
)


# ---- the end of a script ------------------------------------------------------------------------


@pytest.mark.slow
@every_mode
def test_a_script_may_end_with_everything_alive(script, options):
    """A loader, an iterator at work, another loader's iterator in a cycle, and batches."""
    ending = script(f"""
        loader = forebay.DataLoader(Numbers(1000), batch_size=2, {options})
        iterator = iter(loader)
        kept = [next(iterator) for _ in range(3)]
        other = forebay.DataLoader(Numbers(1000), batch_size=2, {options})
        cycle = [iter(other)]
        cycle.append(cycle)
        print(next(cycle[0]).tolist()[0][0])
    """).end()
    assert ending == (0, "0.0\n", "")


@pytest.mark.slow
@every_mode
def test_an_exception_in_the_loop_ends_the_script_as_any_exception_does(script, options):
    """One traceback, exit code 1, nothing else."""
    code, out, err = script(f"""
        for batch in forebay.DataLoader(Numbers(1000), batch_size=2, {options}):
            raise ValueError("mine")
    """).end()
    assert (code, out) == (1, "")
    assert err.count("Traceback") == 1
    assert err.endswith("ValueError: mine\n")


@pytest.mark.slow
@every_mode
def test_sys_exit_in_the_loop_ends_the_script(script, options):
    """With its code, and without a word."""
    ending = script(f"""
        loader = forebay.DataLoader(Numbers(1000), batch_size=2, {options})
        for batch in loader:
            sys.exit(7)
    """).end()
    assert ending == (7, "", "")


@pytest.mark.slow
@every_mode
def test_a_loader_that_is_finalised_with_the_interpreter_says_nothing(script, options):
    """Held by a module, by an object with a `__del__` that looks at it, and by a thread's frame."""
    ending = script(f"""
        class Holder:
            def __del__(self):
                next(self.iterator, None) if sys.is_finalizing() is None else self.iterator
                self.loader.close()
        holder = Holder()
        holder.loader = forebay.DataLoader(Numbers(1000), batch_size=2, {options})
        holder.iterator = iter(holder.loader)
        next(holder.iterator)
        sys.kept = holder
        def look(iterator=iter(forebay.DataLoader(Numbers(1000), batch_size=2, {options}))):
            next(iterator)
            done.set()
            threading.Event().wait()
        done = threading.Event()
        threading.Thread(target=look, daemon=True).start()
        done.wait()
    """).end()
    assert ending == (0, "", "")


@pytest.mark.slow
@every_mode
def test_a_daemon_thread_that_iterates_at_the_end_says_nothing(script, options):
    """Nobody could read a traceback of it."""
    ending = script(f"""
        def read():
            for number, _ in enumerate(forebay.DataLoader(Numbers(10**7), 2, {options})):
                if number == 3:
                    reached.set()
        reached = threading.Event()
        threading.Thread(target=read, daemon=True).start()
        reached.wait()
    """).end()
    assert ending == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 2])
def test_the_end_waits_for_a_thread_within_an_operation_of_torch(script, concurrency):
    """The process would abort where the operation returns to an interpreter that is gone."""
    ending = script(f"""
        import time
        import forebay.base.process
        forebay.base.process.EXIT_S = 60.0
        torch.set_num_threads(1)
        values = torch.rand(8_000_000)
        begun, ended = [], []
        class Sorted(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                begun.append(index)
                found = len(values.sort().values)
                ended.append(index)
                return found
        class Last:
            def __del__(self, begun=begun, ended=ended, sleep=time.sleep):
                while len(ended) < len(begun):
                    sleep(0.01)
        sys.kept = Last()
        loader = forebay.DataLoader(
            Sorted(), 4, num_workers=1, backend="thread", buffer="1MB", concurrency={concurrency}
        )
        iterator = iter(loader)
        while not begun:
            time.sleep(0.01)
    """).end()
    assert ending == (0, "", "")


# ---- close in another thread --------------------------------------------------------------------


@pytest.mark.slow
@with_processes
def test_closed_while_another_thread_waits_it_says_so(script, options, tmp_path):
    """That thread has every batch that the state counts, and stops with words."""
    running = script(
        f"""
        loader = forebay.DataLoader(Gated(1000, 8, Gate(Path(sys.argv[1]))), 2, {options})
        iterator, taken = iter(loader), []
        def read():
            try:
                for batch in iterator:
                    taken.append(batch)
            except RuntimeError as error:
                print(error)
        thread = threading.Thread(target=read)
        thread.start()
        Gate(Path(sys.argv[1])).wait_reached()
        loader.close()
        thread.join()
        print(len(taken) == loader.state_dict()["batch"])
        """,
        tmp_path,
    )
    words = "this iterator was closed, with its loader or with its workers\n"
    advice = "  It returns no more batches. Begin a new epoch: iter(loader).\n"
    assert running.end() == (0, f"{words}{advice}True\n", "")


# ---- kill -9 ------------------------------------------------------------------------------------


@with_processes
def test_a_killed_trainer_takes_everything_along(script, options, tmp_path):
    """Workers in the midst of a sample, what they had started, and a second loader's."""
    gate = Gate(tmp_path)
    running = script(
        f"""
        class Starts(Gated):
            def __getitem__(self, index):
                if index == self.at:
                    import subprocess
                    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
                    if os.fork() == 0:
                        hang()
                return super().__getitem__(index)
        kept = []
        for _ in range(2):
            loader = forebay.DataLoader(
                Starts(1000, 9, Gate(Path(sys.argv[1]))), batch_size=2, {options}
            )
            kept.append([loader, iter(loader)])
            next(kept[-1][1])
        Gate(Path(sys.argv[1]), "trainer").wait()
        """,
        tmp_path,
    )
    Gate(tmp_path, "trainer").wait_reached()
    gate.wait_reached()
    running.kill()
    assert running.end().code == -signal.SIGKILL


# ---- Ctrl-C -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "whom"),
    [
        pytest.param(
            MODES[name],
            whom,
            # Sent to the process alone: with processes and with threads, as they come from a shell.
            marks=() if whom == "group" or name in ("plain", "thread, buffer") else THOROUGH,
            id=f"{name}-{whom}",
        )
        for name in MODES
        for whom in ("group", "process")
    ],
)
def test_ctrl_c_ends_a_script_that_waits_for_a_batch(script, options, whom, tmp_path):
    """KeyboardInterrupt and nothing more, whether or not the workers are sent it too."""
    gate = Gate(tmp_path)
    running = script(
        f"""
        loader = forebay.DataLoader(Gated(50, 9, Gate(Path(sys.argv[1]))), batch_size=2, {options})
        for batch in loader:
            pass
        """,
        tmp_path,
    )
    gate.wait_reached()
    running.interrupt_group() if whom == "group" else running.kill(signal.SIGINT)
    code, out, err = running.end()
    assert (code, out) == (-signal.SIGINT, "")
    assert err.count("Traceback") == 1
    assert err.endswith("KeyboardInterrupt\n")


@pytest.mark.slow
@every_mode
def test_ctrl_c_that_does_not_interrupt_the_wait_ends_it_in_seconds(script, options, tmp_path):
    """As one that arrives just before the wait; here another thread is sent it."""
    Gate(tmp_path)
    code, out, err = script(
        f"""
        gate = Gate(Path(sys.argv[1]))

        def interrupt():
            gate.wait_reached()
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        for batch in forebay.DataLoader(Gated(50, 9, gate), batch_size=2, {options}):
            pass
        """,
        tmp_path,
    ).end()
    assert (code, out) == (-signal.SIGINT, "")
    assert err.endswith("KeyboardInterrupt\n")
