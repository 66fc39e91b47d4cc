"""Train until the scheduler takes the machine back; the same command then goes on where it was.

    python examples/train_until_preempted.py checkpoint.pt
    torchrun --nproc-per-node 2 examples/train_until_preempted.py checkpoint.pt

SIGTERM and SIGUSR1 set a flag. After the step in which a rank sees it, all ranks stop, and the
first one saves: model, optimizer, and the position of the loader. The same command goes on, also on
another number of ranks, with the batches that an uninterrupted run would have had.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

received = []  # signals; the loop looks after each step
for each in (signal.SIGTERM, signal.SIGUSR1):  # first: what follows takes seconds to import
    signal.signal(each, lambda number, _: received.append(number))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402

import forebay  # noqa: E402

TO_BE_CONTINUED = 75  # the exit status that asks for the same command again


class Points(Dataset):
    """Maps a number to (point, label): float32 (2,), and whether it lies within a circle."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        point = torch.rand(2, generator=torch.Generator().manual_seed(index))
        return point, (point.norm() < 0.8).float()


def is_any(flag):
    """Return whether the flag is set on any rank."""
    if not dist.is_initialized():
        return bool(flag)
    flags = torch.tensor(float(bool(flag)))
    dist.all_reduce(flags)
    return bool(flags)


def save(path, **parts):
    """Write a checkpoint; whoever reads it finds the earlier one or this one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(parts, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def main():
    """Train, or go on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="over all ranks")
    parser.add_argument("--num-workers", type=int, default=2)
    given = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = forebay.DataLoader(
        Points(given.samples),
        given.batch_size // ranks,
        shuffle=True,
        seed=0,
        world_size="auto",
        num_workers=given.num_workers,
        buffer="8MB",
    )
    if given.checkpoint.exists():
        known = torch.load(given.checkpoint, weights_only=True)
        model.load_state_dict(known["model"])
        optimizer.load_state_dict(known["optimizer"])
        loader.load_state_dict(known["loader"])

    while (epoch := loader.state_dict()["epoch"]) < given.epochs and not is_any(received):
        for points, labels in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(points)[:, 0], labels)
            optimizer.zero_grad()
            loss.backward()
            for each in model.parameters():
                if dist.is_initialized():
                    dist.all_reduce(each.grad)
                    each.grad /= ranks
            optimizer.step()
            if rank == 0:
                print(f"{loss.item():.6f}" if ranks == 1 else "step", flush=True)
            if is_any(received):
                break
        if rank == 0:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(given.checkpoint, **parts, loader=loader.state_dict())
    loader.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(0 if epoch == given.epochs else TO_BE_CONTINUED)


if __name__ == "__main__":
    main()
