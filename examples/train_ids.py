"""Train and validate on a dataset of IDs: one file each, named in a partition.

    python examples/train_ids.py

`partition` says which IDs are for training and which for validation, `labels` says what each is,
and `data/ID.pt` holds its tensor. Both loaders exist during the whole training.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import forebay

FEATURES = 32


class Samples(Dataset):
    """Maps a number to (tensor, label) of the ID at that place in a list."""

    def __init__(self, folder, ids, labels):
        self.folder = folder
        self.ids = ids
        self.labels = labels

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        identity = self.ids[index]
        # weights_only: a tensor is all that is read, so an untrusted file cannot run code.
        tensor = torch.load(self.folder / f"{identity}.pt", weights_only=True)
        return tensor, self.labels[identity]


def make_data(folder, count):
    """Write `count` tensors into a folder, every fourth for validation.

    Returns:
        The partition, the IDs of "train" and "validation", and the labels, a number for each ID.
    """
    noise = torch.Generator().manual_seed(0)
    partition = {"train": [], "validation": []}
    labels = {}
    for number in range(count):
        identity = f"id-{number:04d}"
        part = "validation" if number % 4 == 3 else "train"
        partition[part].append(identity)
        labels[identity] = int(torch.randint(2, (), generator=noise))
        tensor = torch.randn(FEATURES, generator=noise) + 0.5 * labels[identity]
        torch.save(tensor, Path(folder, f"{identity}.pt"))
    return partition, labels


def train(model, loader, optimizer):
    """Train for one epoch, and return the mean loss of its batches."""
    model.train()
    losses = []
    for tensors, labels in loader:
        loss = nn.functional.cross_entropy(model(tensors), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.inference_mode()
def validate(model, loader):
    """Return the accuracy in percent, and the number of samples."""
    model.eval()
    right = seen = 0
    for tensors, labels in loader:
        right += int((model(tensors).argmax(dim=1) == labels).sum())
        seen += len(labels)
    return 100 * right / seen, seen


def main():
    """Train for some epochs, and validate after each."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--count", type=int, default=512, help="files to make")
    options.add_argument("--epochs", type=int, default=4)
    options.add_argument("--num-workers", type=int, default=2)
    chosen = options.parse_args()
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tempfile.TemporaryDirectory() as data:
        partition, labels = make_data(data, chosen.count)
        datasets = {part: Samples(Path(data), ids, labels) for part, ids in partition.items()}
        # Each loader has its own buffer. While one is used the other fills: validation starts at
        # once when an epoch ends, and so does the next epoch when validation ends.
        with (
            forebay.DataLoader(
                datasets["train"],
                batch_size=32,
                shuffle=True,
                num_workers=chosen.num_workers,
                buffer="64MB",
                seed=0,
            ) as training,
            forebay.DataLoader(
                datasets["validation"],
                batch_size=64,
                num_workers=chosen.num_workers,
                buffer="16MB",
            ) as validation,
        ):
            for epoch in range(chosen.epochs):
                loss = train(model, training, optimizer)
                right, seen = validate(model, validation)
                print(f"epoch {epoch}: mean loss {loss:.4f}, {right:.1f} % of {seen} right")


if __name__ == "__main__":
    main()
