"""A program whose processes all get a signal, again and again, while it loads or runs jobs.

    python preempted.py SIGNAL WHAT FOLDER

It prints the process ID of each call of its handler, and then what came of its work.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import forebay

SETTINGS = {
    "torch's arguments": {},
    "persistent": {"persistent_workers": True},
    "seed": {"shuffle": True, "seed": 0},
    "buffer": {"shuffle": True, "seed": 0, "buffer": "1MB"},
    "disk": {"shuffle": True, "seed": 0, "buffer": "1MB", "persistent_workers": True},
    "stream": {"seed": 0},
    "spawn": {"shuffle": True, "seed": 0, "multiprocessing_context": "spawn"},
    "forkserver": {"shuffle": True, "seed": 0, "multiprocessing_context": "forkserver"},
}
# Those whose workers import torch.
SLOW = ("spawn", "forkserver")
received = []


def handle(number, frame):
    """Say in which process it is called."""
    received.append(number)
    os.write(1, f"{os.getpid()}\n".encode())


def processes(ancestor):
    """Return a process and all that descend from it."""
    parents = {}
    for each in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{each}/stat").read_text()
        except OSError:
            continue
        parents[int(each)] = int(stat.rpartition(")")[2].split()[1])
    found, last = {ancestor}, set()
    while found != last:
        found, last = found | {each for each, parent in parents.items() if parent in found}, found
    return found


def signal_all(number, program, *, workers_first=False):
    """Send a signal to each process of a program, as a scheduler does."""
    for each in sorted(processes(program), reverse=workers_first):
        try:
            os.kill(each, number)
        except ProcessLookupError:
            continue


def signal_once(marker):
    """Do that from within a worker, but not when its work is done again: that may have ended it."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    signal_all(getattr(signal, os.environ["SIGNAL"]), int(os.environ["PROGRAM"]))


class Squares(torch.utils.data.Dataset):
    """Maps a number to its square."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.tensor([float(index) ** 2])


class SquareStream(torch.utils.data.IterableDataset):
    """Yields the same, each worker its part."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        yield from (torch.tensor([float(each) ** 2]) for each in range(96)[worker.id :: 2])


class Signalling(Squares):
    """The same, with signals in between."""

    def __init__(self, folder):
        self.folder = folder

    def __getitem__(self, index):
        if index in (20, 60):
            signal_once(self.folder / f"{index}.marker")
        return super().__getitem__(index)


def tell_size(path):
    """Return a row; at some inputs, with signals in between."""
    if path.stem in ("20", "21", "40"):
        signal_once(path.with_suffix(".marker"))
    return {"size": path.stat().st_size}


def load(name, folder, interrupt):
    """Return the samples of two epochs.

    Args:
        name: Of the settings.
        interrupt: Called while the workers start, in mid-epoch, with the last batch, and while an
            epoch ends and the next one begins.
    """
    samples, settings, is_slow = [], SETTINGS[name], name in SLOW
    if name == "disk":
        settings = settings | {"buffer": forebay.Buffer("1MB", directory=folder)}
    dataset = SquareStream() if name == "stream" else Squares()
    with forebay.DataLoader(dataset, 4, num_workers=2, **settings) as loader:
        for epoch in range(2):
            batches = iter(loader)
            if not (is_slow and epoch):
                interrupt()
            for at, batch in enumerate(batches):
                samples += batch.flatten().tolist()
                if at in ((4,) if is_slow else (3, 4, 23)):
                    interrupt(workers_first=at == 4)
    return samples


def run(folder):
    """Return what became of the inputs or samples of each job."""
    options = {"num_workers": 2, "retries": 0, "progress": False}
    report = forebay.preprocess(tell_size, folder / "*.txt", folder / "rows", **options)
    rows = [report.done, report.failed]
    del options["retries"]
    dataset, model = Signalling(folder), torch.nn.Identity()
    report = forebay.predict(model, dataset, folder / "predicted", batch_size=4, **options)
    for each in folder.glob("*.marker"):
        each.unlink()
    cached = forebay.cache(dataset, folder / "cached", **options)
    return [rows, [report.done, report.failed], [each.item() for each in cached]]


def main():
    """Do the work, with signals in between."""
    name, what, folder = *sys.argv[1:3], Path(sys.argv[3])
    number, sent = getattr(signal, name), 0
    signal.signal(number, handle)
    os.environ.update(SIGNAL=name, PROGRAM=str(os.getpid()))

    def interrupt(**order):
        nonlocal sent
        signal_all(number, os.getpid(), **order)
        sent += 1
        while len(received) < sent:  # another thread may have got it
            time.sleep(0)

    if what == "jobs":
        result = run(folder)
    else:
        result = {each: load(each, folder, interrupt) for each in what.split(",")}
        result["signals"] = sent
    print(json.dumps([os.getpid(), result]))


if __name__ == "__main__":
    main()
