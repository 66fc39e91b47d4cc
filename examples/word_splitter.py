"""A Dataset that does the work in `__getitem__`: it splits the word in a file into parts.

dataset = WordSplitter(files("examples/words/dataset.csv"))
dataset[0]      # ['sim', 'imp', 'mpl', 'ple']
"""

import csv
from pathlib import Path

from torch.utils.data import Dataset


def files(manifest):
    """Return the files that a manifest's column `input` names, in its folder `inputs`."""
    with open(manifest, newline="", encoding="utf-8") as table:
        return [Path(manifest).parent / "inputs" / row["input"] for row in csv.DictReader(table)]


class WordSplitter(Dataset):
    """Maps the number of a file to the parts of the word in it."""

    def __init__(self, files, num_chars=3, overlap=2):
        self.files = list(files)
        self.num_chars = num_chars
        self.overlap = overlap

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        word = self.files[index].read_text(encoding="utf-8").strip()
        starts = range(0, len(word) - self.overlap, self.num_chars - self.overlap)
        return [word[start : start + self.num_chars] for start in starts]

    def source_of(self, index):
        """Return the file of a sample: the column `source` of forebay's table."""
        return self.files[index]
