"""`resume-check`: kill a training script, start it again, and compare its batches."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from resume_check.scripts import check_script
from resume_check.words import OptionError

EXACT, DIFFERS, IMPOSSIBLE = 0, 3, 2

_ABOUT = """\
Check that TRAIN.py, killed and started again, trains on exactly the remaining batches.

{folder} in ARGUMENTS, in quotes, stands for the folder of its checkpoints: an empty one for
each history. The script runs once without interruption; for each --after it is killed with
SIGKILL before its next step, and the same command is given again. Let it train for few steps.

A step is a call of a torch.nn.Module in training mode. The weights with which the script
starts again show after which step its checkpoint was taken; from there it must train on the
same batches, bit for bit, as the uninterrupted run, whatever loader made them. It needs seeds,
a model that is restored exactly, and one process that trains, not several ranks.

The exit code is 0 if each run continued with the batches that were left, and 3 if not.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        "resume-check", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--after",
        type=int,
        action="append",
        default=[],
        metavar="STEPS",
        help="after how many steps to kill it; may be given several times; by default after a "
        "third and after two thirds of them",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="seconds without a step until the script counts as hanging; by default 300",
    )
    parser.add_argument("script", metavar="TRAIN.py", help="the training script")
    parser.add_argument(
        "arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="those of the script"
    )
    given = parser.parse_args(arguments)
    if not Path(given.script).is_file():
        parser.error(f"there is no file {given.script}")
    with tempfile.TemporaryDirectory(prefix="resume-check-", ignore_cleanup_errors=True) as scratch:
        kills, timeout = given.after, given.timeout
        try:
            check = check_script(
                given.script, given.arguments, Path(scratch), kills=kills, timeout=timeout
            )
        except OptionError as error:
            sys.stderr.write(f"resume-check: {error}\n")
            return IMPOSSIBLE
    sys.stdout.write(f"{check}\n")
    return EXACT if check else DIFFERS
