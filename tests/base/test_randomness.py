"""The generators of the process: seeded, left as they were found, and shared by threads."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

from forebay.base import randomness
from forebay.base.draw_detection import ThreadTurns
from forebay.base.randomness import (
    PrivateGenerators,
    generators_kept,
    generators_lent,
    generators_locked,
    generators_restored,
    seed_generators,
    seed_of_text,
    seed_on_import,
)

PATIENCE_S = 180  # longer than any of these takes; a call that hangs fails the test


@pytest.fixture(autouse=True)
def _generators():
    """Begin with known generators."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def draw():
    """Draw from all three generators."""
    return random.random(), np.random.random(), torch.rand(()).item()


def states():
    """Return the states of all three, to compare."""
    _, keys, *rest = np.random.get_state()
    return random.getstate(), keys.tolist(), rest, torch.get_rng_state().tolist()


def alone(seed):
    """Return what a call draws that runs alone."""
    with generators_kept():
        seed_generators(seed)
        return draw()


def drawing(seed, calls=None):
    """Return a call that draws; each time that it is made is noted in `calls`."""

    def call(seeds):
        seeds(seed)
        if calls is not None:
            calls.append(seed)
        return draw()

    return call


def started(function):
    """Call a function in a thread; one that hangs does not keep the test run from its end."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def together(*functions):
    """Call each function in a thread of its own, and return what they return."""
    returned = {}

    def keep(number):
        returned[number] = functions[number]()

    threads = [started(partial(keep, number)) for number in range(len(functions))]
    for thread in threads:
        thread.join(PATIENCE_S)
    return [returned[number] for number in range(len(functions))]


def run_in_pairs(turns):
    """Make two calls that end only if both are inside at the same time."""
    barrier = threading.Barrier(2)
    call = [lambda: turns.run(lambda seeds: barrier.wait(PATIENCE_S))] * 2
    assert sorted(together(*call)) == [0, 1]


# ---- seeds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 5, 2**64 - 1])
def test_all_three_generators_are_seeded(seed):
    """From any 64 bits, as the documented parts of them; torch's seed fits into an int64."""
    seed_generators(seed)
    seeded = draw()
    random.seed(seed)
    np.random.seed(seed >> 32)
    torch.manual_seed(seed % 2**63)
    assert seeded == draw()
    assert torch.tensor(torch.initial_seed()) == seed % 2**63


def test_the_seed_of_a_string_is_the_same_everywhere():
    """64 bits, also of a file name that is no text: these numbers never change."""
    assert seed_of_text("a.wav") == 8175102505230246214
    assert seed_of_text("\udcff.wav") == 14487394398020164187


IMPORT = """
import sys
from forebay.base.randomness import seed_generators, seed_on_import
assert not {"numpy", "torch"} & set(sys.modules)
seed_on_import(sys.argv[1] == "on")
seed_generators(int(sys.argv[2]))
import numpy
print(numpy.random.random())
if sys.argv[3:] == ["torch"]:
    import torch
    print(torch.rand(()).item())
"""


def drawn_after_import(*arguments):
    """Return what numpy, and torch if it is named, draw in a process that imports them late."""
    command = [sys.executable, "-c", IMPORT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return tuple(map(float, done.stdout.split()))


@pytest.mark.slow
def test_a_library_is_seeded_where_user_code_imports_it():
    """It draws as if it had been imported before the seed; without the hook it does not."""
    seed = seed_of_text("input")
    _, *expected = alone(seed)
    assert drawn_after_import("on", str(seed), "torch") == tuple(expected)
    assert drawn_after_import("off", str(seed))[0] != expected[0]


def test_the_hook_for_imports_is_there_once_or_not_at_all():
    """However often it is asked for."""
    before = list(sys.meta_path)
    seed_on_import(True)
    seed_on_import(True)
    assert len(sys.meta_path) == len(before) + 1
    seed_on_import(False)
    seed_on_import(False)
    assert sys.meta_path == before


# ---- left as they were found -------------------------------------------------------------------


@pytest.mark.parametrize("block", [generators_kept, generators_restored, PrivateGenerators(7)])
@pytest.mark.parametrize("raises", [False, True])
def test_generators_are_as_before_after_the_block(block, raises):
    """Also where it raises."""
    before = states()
    with pytest.raises(KeyError) if raises else generators_restored():
        with block():
            seed_generators(4)
            draw()
            assert states() != before
            if raises:
                raise KeyError
    assert states() == before


def test_the_states_that_a_block_leaves_can_be_chosen():
    """As one does who loads a state."""
    seed_generators(4)
    with generators_kept() as four:
        pass
    expected = draw()
    with generators_kept() as kept:
        kept.states = four.states
    assert draw() == expected


def test_blocks_may_be_within_each_other():
    """One thread need not wait for itself, and each block leaves what it found."""
    before = states()
    with generators_kept():
        seed_generators(4)
        inner = states()
        with generators_locked(), generators_kept():
            draw()
        assert states() == inner
    assert states() == before


@pytest.mark.parametrize("block", [generators_kept, generators_locked])
def test_a_block_keeps_calls_of_threads_out(block):
    """One that begins meanwhile waits until the block has ended."""
    log, turns = [], ThreadTurns()
    with block():
        thread = started(partial(turns.run, lambda seeds: log.append("call")))
        thread.join(0.1)  # if the block excludes no thread, the call is made now
        log.append("block")
    thread.join(PATIENCE_S)
    assert log == ["block", "call"]


def test_generators_restored_excludes_no_thread():
    """Another thread can use them within the block, as workers in threads do."""
    with generators_restored():
        assert together(lambda: alone(4)) == [alone(4)]


def test_private_generators_continue_where_the_last_block_ended():
    """As if nothing had been drawn between the blocks."""
    private, other = PrivateGenerators(5), PrivateGenerators(6)
    drawn = []
    for _ in range(3):
        with private():
            drawn.append(draw())
        with other():
            draw()
        draw()
    seed_generators(5)
    assert drawn == [draw() for _ in range(3)]


def test_private_generators_continue_after_an_error():
    """What was drawn before it was drawn."""
    private = PrivateGenerators(5)
    with pytest.raises(KeyError), private():
        draw()
        raise KeyError
    seed_generators(5)
    draw()
    with private():
        own = draw()
    assert own == draw()


# ---- threads -----------------------------------------------------------------------------------


def test_calls_that_do_not_draw_run_side_by_side():
    """Each of two waits for the other to be inside, as often as it is tried."""
    turns, before = ThreadTurns(), states()
    for _ in range(3):
        run_in_pairs(turns)
    assert states() == before


@pytest.mark.parametrize(
    "library",
    [random.random, random.gauss, np.random.random, np.random.normal, lambda: torch.rand(1)],
    ids=["random", "random.gauss", "numpy", "numpy.normal", "torch"],
)
def test_a_call_that_draws_is_made_again_alone(library):
    """From any of the libraries, once; later ones are made alone from the start."""
    turns, before, calls, undone = ThreadTurns(), states(), [], []

    def call(seeds):
        seeds(4)
        calls.append(library())
        return calls[-1]

    assert turns.run(call, lambda: undone.append(len(calls))) == calls[1]
    assert undone == [1]
    assert states() == before
    assert turns.run(call, lambda: undone.append("again")) == calls[2] == calls[1] != calls[0]
    assert undone == [1]
    assert states() == before


def test_a_draw_is_seen_before_another_seed():
    """A call may seed for each sample, and the last of them need not draw."""
    turns, calls = ThreadTurns(), []

    def call(seeds):
        calls.append(drawing(4)(seeds))
        seeds(5)

    turns.run(call)
    turns.run(call)
    assert calls[1:] == [alone(4)] * 2


def test_two_calls_that_draw_at_the_same_time_are_each_made_again():
    """Neither sees the numbers of the other, and the generators are as before."""
    turns, barrier, before = ThreadTurns(), threading.Barrier(2), states()

    def run(seed):
        calls = []

        def call(seeds):
            if not calls:
                barrier.wait(PATIENCE_S)
            return drawing(seed, calls)(seeds)

        return turns.run(call, lambda: barrier.wait(PATIENCE_S)), len(calls)

    found = together(lambda: run(4), lambda: run(5))
    assert found == [(alone(4), 2), (alone(5), 2)]
    assert states() == before


@pytest.mark.parametrize("draws", [False, True])
def test_what_a_call_raises_is_raised(draws):
    """Once; a call that drew is made again first, since the error may depend on the numbers."""
    turns, calls, undone = ThreadTurns(), [], []

    def call(seeds):
        seeds(4)
        calls.append(draw() if draws else None)
        raise ValueError(f"attempt {len(calls)}")

    with pytest.raises(ValueError, match="attempt 2" if draws else "attempt 1"):
        turns.run(call, lambda: undone.append(1))
    assert undone == [1] * draws
    if not draws:
        run_in_pairs(turns)


def test_an_error_by_chance_is_not_raised():
    """Where the numbers of the call's own seed raise none."""
    turns = ThreadTurns()

    def call(seeds):
        seeds(4)
        if (drawn := draw()) != alone(4):
            raise ValueError("these are not the numbers")
        return drawn

    assert turns.run(call) == alone(4)


def test_a_call_that_is_interrupted_leaves_its_turn():
    """Others go on after a KeyboardInterrupt."""
    turns = ThreadTurns()

    def call(seeds):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        turns.run(call)
    run_in_pairs(turns)
    with generators_kept():
        draw()


def test_the_generators_are_left_as_the_first_call_found_them():
    """Another call may begin, and end, after the first one drew and before that is undone."""
    turns, before = ThreadTurns(), states()

    def undo():
        assert together(lambda: turns.run(drawing(5))) == [alone(5)]

    assert turns.run(drawing(4), undo) == alone(4)
    assert states() == before


def test_a_draw_is_seen_though_another_thread_sets_the_generators_back():
    """To what they were before it, so that they look as if nothing had been drawn."""
    turns, calls, before = ThreadTurns(), [], states()
    with generators_kept() as first:
        found = first.states

    def set_back():
        with generators_kept() as kept:
            kept.states = found

    def call(seeds):
        drawing(4, calls)(seeds)
        with generators_lent():
            together(set_back)
        return calls[-1]

    turns.run(call)
    assert len(calls) == 2
    assert states() == before


def test_a_call_may_use_the_generators_while_another_thread_waits_for_its_end():
    """That thread is the next to run alone, once no call runs beside others any more."""
    turns, inside = ThreadTurns(), threading.Event()

    def use():
        assert inside.wait(PATIENCE_S)
        with generators_kept():
            pass
        return 1

    def call(seeds):
        inside.set()
        # Nothing else shows that it waits.
        while randomness.process_turns._alone is None:
            time.sleep(0.001)
        return alone(4)

    assert together(use, lambda: turns.run(call)) == [1, alone(4)]


def test_a_call_may_use_the_generators_by_itself():
    """It does not wait for those beside it, and has not drawn if it leaves them as they were."""
    turns, inside, over, calls = ThreadTurns(), threading.Event(), threading.Event(), []

    def waits(seeds):
        inside.set()
        assert over.wait(PATIENCE_S)

    def uses(seeds):
        calls.append(1)
        assert inside.wait(PATIENCE_S)
        drawn = alone(4)
        over.set()
        return drawn

    assert together(lambda: turns.run(waits), lambda: turns.run(uses)) == [None, alone(4)]
    assert calls == [1]


def test_draws_of_the_trainer_stay():
    """They are not undone, and calls go on side by side: it was none of them that drew."""
    turns, inside, drawn, calls = ThreadTurns(), threading.Event(), threading.Event(), []

    def call(seeds):
        seeds(4)
        calls.append(1)
        inside.set()
        assert drawn.wait(PATIENCE_S)
        return "returned"

    with generators_kept():
        draw()
        expected = draw()

    def trainer():
        assert inside.wait(PATIENCE_S)
        draw()
        drawn.set()

    assert together(lambda: turns.run(call), trainer) == ["returned", None]
    assert draw() == expected
    assert len(calls) == 2
    run_in_pairs(turns)


# ---- threads that hang, and forks --------------------------------------------------------------


class Hanging:
    """A thread that hangs in a call, or in a block that uses the generators, until `over`."""

    def __init__(self, turns):
        self.inside, self.over = threading.Event(), threading.Event()
        self.thread = started(partial(turns.run, self))
        assert self.inside.wait(PATIENCE_S)

    def __call__(self, seeds):
        self.inside.set()
        assert self.over.wait(PATIENCE_S)

    def end(self):
        self.over.set()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


def test_the_turn_of_a_thread_that_hangs_beside_others_is_freed():
    """Nothing waits for it any more, and it is distinguished from one that only waited."""
    turns, before = ThreadTurns(), states()
    hanging = Hanging(turns)
    assert turns.abandon(hanging.thread) is False
    assert turns.run(drawing(4)) == alone(4)
    hanging.end()
    assert states() == before


def test_the_turn_of_a_thread_that_hangs_alone_is_freed():
    """When it comes back at last, it leaves the generators to those who use them by then."""
    turns, before = ThreadTurns(), states()
    turns.run(drawing(4))  # from here on, each call is alone
    hanging = Hanging(turns)
    assert turns.abandon(hanging.thread) is False
    with generators_kept():
        seed_generators(5)
        hanging.end()
        drawn = draw()
    assert drawn == alone(5)
    assert states() == before
    assert turns.run(drawing(6)) == alone(6)


def test_a_thread_that_only_waited_is_told_from_one_that_hangs():
    """A thread whose call is to be made again, but is not yet, is not to blame."""
    turns, undoing, go_on = ThreadTurns(), threading.Event(), threading.Event()
    hanging = Hanging(turns)

    def undo():
        undoing.set()
        assert go_on.wait(PATIENCE_S)

    found = []
    waiting = started(lambda: found.append(turns.run(drawing(4), undo)))
    assert undoing.wait(PATIENCE_S)
    assert turns.abandon(waiting) is True
    assert turns.abandon(hanging.thread) is False
    go_on.set()
    waiting.join(PATIENCE_S)
    assert found == [alone(4)]
    hanging.end()


def test_a_thread_that_waits_for_a_block_only_waited():
    """Such as for the trainer, who begins an epoch."""
    turns, calls = ThreadTurns(), []
    with generators_locked():
        waiting = started(partial(turns.run, calls.append))
        assert turns.abandon(waiting) is True
        assert calls == []
    waiting.join(PATIENCE_S)
    assert len(calls) == 1


def test_a_block_that_is_interrupted_before_it_begins_keeps_no_thread_out():
    """Ctrl-C while the block waits for a call that hangs; other calls go on beside that one."""
    turns, trainer = ThreadTurns(), threading.get_ident()
    hanging = Hanging(turns)

    def interrupt():
        while not randomness.process_turns.is_taken_by(trainer):
            time.sleep(0.001)
        signal.pthread_kill(trainer, signal.SIGINT)

    interrupting = started(interrupt)
    with pytest.raises(KeyboardInterrupt), generators_locked():
        pytest.fail("the block began")
    interrupting.join(PATIENCE_S)
    run_in_pairs(turns)
    hanging.end()


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_that_is_forked_meanwhile_can_use_the_generators(is_alone):
    """No thread came along that could give its turn back."""
    turns = ThreadTurns()
    if is_alone:
        turns.run(drawing(4))
    hanging = Hanging(turns)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(PATIENCE_S)
            if turns.run(drawing(5)) == ThreadTurns().run(drawing(5)) == alone(5):
                code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    hanging.end()
    assert os.waitstatus_to_exitcode(status) == 0
