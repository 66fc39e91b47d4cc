"""A program whose processes all get a signal, again and again, while it loads or runs a job.

    python preempted.py SIGNAL WHAT FOLDER

It prints the process ID of each call of its handler, and then what came of its work.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

import forebay

SETTINGS = {
    "torch's arguments": {},
    "seed": {"shuffle": True, "seed": 0},
    "buffer": {"shuffle": True, "seed": 0, "buffer": "1MB"},
}


def handle(number, frame):
    """Say in which process it is called."""
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


def signal_all(number, program):
    """Send a signal to each process of a program, as a scheduler does."""
    for each in sorted(processes(program)):
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


class Signalling(Squares):
    """The same, with signals in between."""

    def __init__(self, folder):
        self.folder = folder

    def __getitem__(self, index):
        if index in (20, 21, 60):
            signal_once(self.folder / f"{index}.marker")
        return super().__getitem__(index)


def tell_size(path):
    """Return a row; at some inputs, with signals in between."""
    if path.stem in ("20", "21", "40"):
        signal_once(path.with_suffix(".marker"))
    return {"size": path.stat().st_size}


def load(settings, number):
    """Return the samples of two epochs."""
    samples = []
    with forebay.DataLoader(Squares(), 4, num_workers=2, **settings) as loader:
        for _ in range(2):
            batches = iter(loader)
            signal_all(number, os.getpid())  # while the workers start, or an epoch ends
            for at, batch in enumerate(batches):
                samples += batch.flatten().tolist()
                if at in (3, 4, 23):
                    signal_all(number, os.getpid())
    return samples


def main():
    """Run the work, with signals in between."""
    name, what, folder = *sys.argv[1:3], Path(sys.argv[3])
    number = getattr(signal, name)
    signal.signal(number, handle)
    os.environ.update(SIGNAL=name, PROGRAM=str(os.getpid()))
    options = {"num_workers": 2, "progress": False}
    if what in SETTINGS:
        result = load(SETTINGS[what], number)
    elif what == "preprocess":
        report = forebay.preprocess(tell_size, folder / "*.txt", folder / "out", **options)
        result = [report.done, report.failed]
    elif what == "cache":
        result = [
            each.item() for each in forebay.cache(Signalling(folder), folder / "out", **options)
        ]
    else:
        dataset = Signalling(folder)
        report = forebay.predict(
            torch.nn.Identity(), dataset, folder / "out", batch_size=4, **options
        )
        result = [report.done, report.failed]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
