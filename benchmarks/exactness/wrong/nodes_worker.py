"""torchdata.nodes: a worker process of ParallelMapper is killed, as when memory runs out.

Expected: all batches, or an error. If nothing comes within a minute, this ends with status 1. It
may take several runs: it depends on what the worker does at that moment.
"""

import os
import signal

from torchdata.nodes import Batcher, IterableWrapper, Loader, ParallelMapper


def with_process(number: int) -> tuple[int, int]:
    return number, os.getpid()


if __name__ == "__main__":
    node = ParallelMapper(IterableWrapper(range(480)), with_process, 2, method="process")
    signal.signal(signal.SIGALRM, lambda *_: (print("got nothing in 60 s"), os._exit(1)))
    print("expected all of 120 batches, or an error")
    for count, batch in enumerate(Loader(Batcher(node, 4)), 1):
        if count == 3:
            os.kill(batch[0][1], signal.SIGKILL)
        signal.alarm(60)
        print(f"got batch {count}")
