"""A training script that is killed and started again: does it go on with the batches left?

uninterrupted   steps 0 1 2 3 4 5 6 7
killed          steps 0 1 2 3 4 | SIGKILL          its checkpoint may be older: after step 2
started again             3 4 5 6 7                its weights say which step it goes on from
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from resume_check.comparison import LoaderRun, ReceivedBatch, difference_after
from resume_check.digests import not_compared, unread
from resume_check.processes import received_from
from resume_check.recording import TrainingStep
from resume_check.words import OptionError, counted, one_line

# What stands in a script's arguments for the folder of its checkpoints.
FOLDER = "{folder}"
_MOST_STEPS = 100_000
_LOG_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ScriptResume:
    """What one kill showed.

    Attributes:
        after: After how many steps the script was killed.
        continued: After how many steps it continued; None if that is not known.
        what: What differs, or what cannot be said; "" if nothing.
        note: What differs beside the batches.
    """

    after: int
    continued: int | None
    what: str = ""
    note: str = ""

    def __str__(self) -> str:
        """Return the answer as a sentence."""
        where = f"killed after {counted(self.after, 'step')}: "
        if self.continued is None:
            return where + self.what
        begun = f"continued after {counted(self.continued, 'step')}"
        if not self.continued:
            begun = "began anew"
        if self.what:
            return f"{where}{begun}: {self.what}"
        again = self.after - self.continued
        if again and self.continued:
            begun += f" ({counted(again, 'step')} again, from an older checkpoint)"
        return f"{where}{begun}, with the batches that were left{self.note}"


@dataclass(frozen=True, slots=True)
class ScriptCheck:
    """What `resume-check` found; false if batches differ, or nothing was shown."""

    steps: int
    kills: tuple[ScriptResume, ...]
    what: str = ""

    def __bool__(self) -> bool:
        """Return whether each run continued with the batches that were left."""
        return not self.what and not any(each.what for each in self.kills)

    def __str__(self) -> str:
        """Return the answer as sentences."""
        steps = counted(self.steps, "step")
        if not self.kills:
            return f"{steps}; {self.what}"
        lines = [f"{steps} without interruption:", *(f"  {each}" for each in self.kills)]
        return "\n".join([*lines, *filter(None, [self.what])])


def check_script(
    script: str,
    arguments: Sequence[str],
    scratch: Path,
    *,
    kills: Sequence[int],
    timeout: float,
) -> ScriptCheck:
    """Run a training script without interruption, and killed and started again; compare the steps.

    Args:
        arguments: `FOLDER` in them is replaced by an empty folder, one for each history.
        scratch: An empty folder.
        kills: After how many steps it is killed, each in a history of its own; empty for a third
            and two thirds of them.
        timeout: Seconds without a step after which a process counts as hanging.
    """
    if not any(FOLDER in each for each in arguments):
        raise OptionError(
            f"no argument of {script} has {FOLDER}, the folder of its checkpoints\n"
            "  Nothing was started: each run needs a folder of its own, or one would continue "
            f"another. Write for example: {script} --checkpoints '{FOLDER}'"
        )

    def run(history: str, *, stop_before: int = -1, most: int = _MOST_STEPS) -> LoaderRun:
        folder, log = scratch / history, scratch / f"{history}.txt"
        folder.mkdir(exist_ok=True)
        given = [each.replace(FOLDER, str(folder)) for each in arguments]
        target = partial(_begin_script, log, [str(stop_before), str(most), script, *given])
        found = received_from(target, timeout, kill=stop_before >= 0)
        if found.error:
            found.error += _last_line(log)
        return found

    whole = run("whole")
    steps: list[TrainingStep] = whole.batches
    if whole.error:
        return ScriptCheck(len(steps), (), f"uninterrupted, {whole.error}")
    if len(steps) < 2:
        return ScriptCheck(
            len(steps),
            (),
            "Nothing was killed: it needs at least two steps, calls of a torch.nn.Module in "
            "training mode, in the process of the script",
        )
    if opaque := dict.fromkeys(
        f"{path} ({kind})" for each in steps for path, kind in not_compared(each.batch.content)
    ):
        return ScriptCheck(len(steps), (), unread(opaque))
    chosen = sorted({*kills} or {max(len(steps) // 3, 1), max(2 * len(steps) // 3, 1)})
    if not 1 <= chosen[0] <= chosen[-1] < len(steps):
        raise OptionError(f"it can be killed after 1 to {len(steps) - 1} steps; got {chosen}")
    found = []
    for after in chosen:
        killed = run(f"killed-{after}", stop_before=after)
        if killed.error or len(killed.batches) <= after:
            ended = killed.error or f"it ended after {counted(len(killed.batches), 'step')}"
            found.append(ScriptResume(after, None, f"not killed: {ended}"))
            continue
        again = run(f"killed-{after}", most=2 * len(steps))
        found.append(judged(steps, killed.batches, again))
    if any(each.what for each in found):
        second = run("whole-again")
        if differs := difference_after(_batches(steps), 0, _of_batches(second)):
            what = f"two runs without interruption differ, so nothing can be said: {differs}"
            return ScriptCheck(len(steps), (), f"{what}; set seeds")
    what = ""
    if not any(each.continued or each.what for each in found):
        what = "It continued from no checkpoint, so that nothing was shown: kill it later"
    return ScriptCheck(len(steps), tuple(found), what)


def judged(
    whole: Sequence[TrainingStep], killed: Sequence[TrainingStep], again: LoaderRun
) -> ScriptResume:
    """Compare the steps of a script that was started again with those of the other runs.

    Args:
        killed: The steps before it was killed, and the one in which it was, which is not done.
    """
    after, steps = len(killed) - 1, again.batches
    if not steps:
        return ScriptResume(after, None, again.error or "started again, it ended without a step")
    first, batches = steps[0], _of_batches(again)
    same = [
        at
        for at, each in enumerate(killed)
        if first.weights and (each.module, each.weights) == (first.module, first.weights)
    ]
    if not same:
        return ScriptResume(
            after,
            None,
            "started again, its first weights are those of no step of the killed run, so it is "
            "unknown from which step it continued: it does not restore the model, or not every bit",
        )
    # Between two updates the weights are equal: a checkpoint is taken right after one.
    updated = [at for at in same if not at or killed[at].updates > killed[at - 1].updates]
    reference = _batches(whole)
    for at in updated:
        if not difference_after(reference, at, batches):
            return ScriptResume(after, at, note=_other_weights(whole, killed, at, steps))
    for at in same:
        if not difference_after(reference, at, batches):
            what = (
                f"weights that are equal from step {same[0]} to {same[-1]}, so that nobody can say"
            )
            return ScriptResume(after, at, f"{what} whether batches were lost or repeated")
    at = (updated or same)[-1]
    return ScriptResume(after, at, difference_after(reference, at, batches))


def _other_weights(
    whole: Sequence[TrainingStep],
    killed: Sequence[TrainingStep],
    at: int,
    steps: Sequence[TrainingStep],
) -> str:
    if any(one.weights != two.weights for one, two in zip(whole, killed, strict=False)):
        return ""  # they differ without a kill, too
    for right, step in zip(whole[at:], steps, strict=False):
        if right.weights != step.weights:
            return (
                f"; from step {right.batch.number} on its weights are others: an optimizer, a "
                "scheduler or a random generator is not restored"
            )
    return ""


def _batches(steps: Sequence[TrainingStep]) -> list[ReceivedBatch]:
    return [each.batch for each in steps]


def _of_batches(run: LoaderRun) -> LoaderRun:
    return LoaderRun(_batches(run.batches), run.state, run.error)


def _begin_script(log: Path, arguments: list[str], connection: Connection) -> None:
    """Become the process of the script; what it prints goes into a file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(connection.fileno(), True)
    program = "from resume_check.recording import run_script; run_script()"
    command = [sys.executable, "-c", program, str(connection.fileno()), *arguments]
    os.execv(sys.executable, command)  # noqa: S606


def _last_line(log: Path) -> str:
    """Return the last line that a script printed, in parentheses; "" if there is none."""
    if not log.exists():
        return ""
    lines = log.read_bytes()[-_LOG_BYTES:].decode(errors="replace").split("\n")
    last = next((each for each in reversed(lines) if each.strip()), "")
    return last and f" ({one_line(last, 200)})"
