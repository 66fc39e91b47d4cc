"""A Dataset whose samples are counted as they are loaded, and of which some are refused."""

from __future__ import annotations

from torch.utils.data import Dataset


class Watched(Dataset):
    """Samples that `sample` makes; which of them were loaded is known."""

    loaded: list = []  # noqa: RUF012 - of all of them
    refused: set = set()  # noqa: RUF012

    def __init__(self, name, length):
        self.name, self.length = name, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        index = range(self.length)[index]
        type(self).loaded.append((self.name, index))
        if index in type(self).refused:
            raise ValueError(f"{self.name} {index} is refused")
        return self.sample(index)
