"""Grain: a worker process of `mp_prefetch` is killed, as the kernel does when memory runs out.

Expected: all batches, or an error. If nothing comes within a minute, this ends with status 1.
"""

import os
import signal

import grain


def with_process(number: int) -> tuple[int, int]:
    return int(number), os.getpid()


if __name__ == "__main__":
    dataset = grain.MapDataset.source(range(480)).map(with_process)
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
    batches = dataset.to_iter_dataset().batch(4).mp_prefetch(options)
    signal.signal(signal.SIGALRM, lambda *_: (print("got nothing in 60 s"), os._exit(1)))
    print("expected all of 120 batches, or an error")
    for count, (_, processes) in enumerate(batches, 1):
        if count == 3:
            os.kill(int(processes[0]), signal.SIGKILL)
        signal.alarm(60)
        print(f"got batch {count}")
