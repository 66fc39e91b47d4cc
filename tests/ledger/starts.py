"""Many drivers that start at once on one output folder, on file systems that do and do not lock.

    python starts.py FOLDER MODE ROUNDS

Each round forks DRIVERS processes and lets them go together. The one that has the folder keeps it
until all have said how they fared; in turns it then closes it, and is killed. Prints a JSON list:
for each round, for each driver its process id and what came of it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from forebay.errors import BusyError
from forebay.outputs.folder import OutputFolder

DRIVERS = 30


def no_flock(*_: object) -> None:
    """Fail as file systems without locks do."""
    raise OSError(errno.ENOLCK, "No locks available")


def false_flock(*_: object) -> None:
    """Grant every lock, as file systems do that lock on one node alone."""


def drive(folder: Path, go: int, tell: int, leave: int, *, killed: bool) -> NoReturn:
    """Start a run when `go` ends; keep the folder until `leave` ends."""
    os.read(go, 1)
    code = 1
    try:
        try:
            with OutputFolder(folder).ledger() as ledger:
                ledger.set_meta("driver", str(os.getpid()))
                _say(tell, "held")
                os.read(leave, 1)
                if killed:
                    os.kill(os.getpid(), signal.SIGKILL)
        except BusyError as error:
            _say(tell, f"busy: {error}")
        except Exception as error:  # noqa: BLE001 - the test is told of it
            _say(tell, repr(error))
        code = 0
    finally:
        os._exit(code)


def _say(tell: int, words: str) -> None:
    os.write(tell, json.dumps([os.getpid(), words]).encode() + b"\n")


def play(folder: Path, *, killed: bool) -> list[tuple[int, str]]:
    """Play one round."""
    go, told, leave = os.pipe(), os.pipe(), os.pipe()
    for _ in range(DRIVERS):
        if os.fork() == 0:
            for descriptor in (go[1], told[0], leave[1]):
                os.close(descriptor)
            drive(folder, go[0], told[1], leave[0], killed=killed)
    os.close(told[1])
    os.close(go[1])
    with open(told[0], "rb") as file:
        said = [json.loads(file.readline()) for _ in range(DRIVERS)]
    os.close(leave[1])
    for _ in range(DRIVERS):
        os.wait()
    os.close(go[0])
    os.close(leave[0])
    return said


def main() -> None:
    folder, mode, rounds = sys.argv[1:]
    fcntl.flock = {"flock": fcntl.flock, "none": no_flock, "false": false_flock}[mode]
    print(json.dumps([play(Path(folder), killed=bool(at % 2)) for at in range(int(rounds))]))


if __name__ == "__main__":
    main()
