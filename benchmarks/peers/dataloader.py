"""torch's DataLoader, without batches, over a Dataset whose `__getitem__` does the work."""

from __future__ import annotations

from torch.utils.data import DataLoader, Dataset

from benchmarks.peers import WORKERS
from benchmarks.work import Into


class Work(Dataset):
    def __init__(self, task: str, sources: list[str], folder: str) -> None:
        self.work = Into(task, folder)
        self.sources = sources

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> dict[str, int]:
        return self.work(self.sources[index])


def run(task: str, sources: list[str], folder: str) -> int:
    loader = DataLoader(
        Work(task, sources, folder), batch_size=None, num_workers=WORKERS, prefetch_factor=32
    )
    return sum(1 for _ in loader)
