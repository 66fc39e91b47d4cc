"""Words of any length in one batch: each batch is as wide as its own longest word.

    python examples/padded_words.py

`default_collate` stacks what has the same shape. For other samples use `collate_fn`: it gets the
list of a batch's samples, in a worker, and what it returns is the batch. `forebay.collate.pad`
returns a `collate_fn` that pads.
"""

import torch
from torch.utils.data import Dataset

import forebay

TEXT = "a mill by the river turns without haste because its forebay never runs dry"


class Words(Dataset):
    """Maps a number to a word: a tensor with a number for each letter."""

    def __init__(self, words):
        self.words = words

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return torch.tensor([ord(letter) - ord("a") + 1 for letter in self.words[index]])


# 0 is no letter's number: letters start at 1. The lengths let the model tell letters from padding:
# pack_padded_sequence takes them, and `batch.mask` is a mask.
padded = forebay.collate.pad(0, lengths=True)


def spelled(batch):
    """Return the words of a batch as strings."""
    rows = zip(batch.values.tolist(), batch.lengths.tolist(), strict=True)
    return ["".join(chr(number - 1 + ord("a")) for number in row[:length]) for row, length in rows]


def main():
    """Show the batches of one epoch."""
    with forebay.DataLoader(
        Words(TEXT.split()), batch_size=4, shuffle=True, num_workers=2, collate_fn=padded, seed=0
    ) as loader:
        for batch in loader:
            print(tuple(batch.values.shape), batch.lengths.tolist(), *spelled(batch))


if __name__ == "__main__":
    main()
