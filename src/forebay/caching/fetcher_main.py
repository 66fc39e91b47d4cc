"""How the process that fetches blocks begins and ends."""

from __future__ import annotations

import fcntl
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

from forebay.base.process import (
    OOM_AFTER_WORKERS,
    SENT_TO_ALL,
    continue_when_driver_ends,
    die_when_memory_runs_out,
)
from forebay.caching.link import accepted, error_as_sent, packed_message
from forebay.errors import ForebayError, InputError, shown_location


def run_fetcher(lock: int, incoming: int, config: int) -> NoReturn:
    """Run the process; the lock is released when it ends, however it does."""
    for each in SENT_TO_ALL:
        signal.signal(each, signal.SIG_IGN)  # it ends with the process that opened the cache
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SENT_TO_ALL)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    except OSError:  # another one was faster
        os._exit(0)
    die_when_memory_runs_out(OOM_AFTER_WORKERS)
    with suppress(OSError, ValueError):  # each reader takes one, and each request
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    continue_when_driver_ends(incoming)
    source = socket.socket(fileno=incoming)
    try:
        where = "the folder"
        try:
            # With the lock: what follows takes a while to import.
            from forebay.caching.fetcher import Fetcher

            with os.fdopen(config, "rb") as file:
                file.seek(0)
                place = pickle.load(file)  # noqa: S301 - of the process that started this one
            where = shown_location(place.url)
            fetcher = Fetcher(place, source)
        except Exception as error:  # noqa: BLE001 - of the disk, for example
            if not isinstance(error, ForebayError):
                traceback.print_exc()
                error = InputError(
                    f"{where}: the process that fetches its blocks cannot "
                    f"start: {type(error).__name__}: {error}\n"
                    "  Nothing was fetched. Its traceback is on stderr; another call tries again."
                )
            _refuse_all(source, error)
        else:
            fetcher.run()
    except BaseException:  # noqa: BLE001 - readers start another, which may say more
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


def _refuse_all(incoming: socket.socket, error: ForebayError) -> None:
    """Tell those who wait for an answer why there is none."""
    message = packed_message(error_as_sent(error))
    while (connection := accepted(incoming)[0]) is not None:
        with connection, suppress(OSError):
            connection.sendall(message)
