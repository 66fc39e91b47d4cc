"""`forebay check-resume`: kill a training script, start it again, and compare its batches."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

DONE, FAILURES = 0, 3


@click.command(
    "check-resume",
    short_help="Kill a training script, and compare its batches.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--after",
    type=click.IntRange(1),
    multiple=True,
    help="After how many steps to kill it.  May be given several times.  Default: after a third "
    "and after two thirds of them.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds without a step until the script counts as hanging.",
)
@click.argument("script", metavar="TRAIN.py", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", metavar="[ARGUMENTS]", nargs=-1, type=click.UNPROCESSED)
def check_resume_command(
    script: str, arguments: tuple[str, ...], after: tuple[int, ...], timeout: float
) -> int:
    """Check that TRAIN.py, killed and started again, trains on exactly the remaining batches.

    {folder} in ARGUMENTS, in quotes, stands for the folder of its checkpoints: an empty one for
    each history. The script runs once without interruption; for each --after it is killed with
    SIGKILL before its next step, and the same command is given again. Let it train for few steps.

    A step is a call of a torch.nn.Module in training mode. The weights with which the script
    starts again show after which step its checkpoint was taken; from there it must train on the
    same batches, bit for bit, as the uninterrupted run, whatever loader made them. It needs seeds,
    a model that is restored exactly, and one process that trains, not several ranks.
    """
    from forebay.loading.script_resume import check_script

    with tempfile.TemporaryDirectory(
        prefix="forebay-check-", ignore_cleanup_errors=True
    ) as scratch:
        check = check_script(script, arguments, Path(scratch), kills=after, timeout=timeout)
    click.echo(str(check))
    return DONE if check else FAILURES
