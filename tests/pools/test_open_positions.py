"""A file that the caller has open for reading is read by each worker at a position of its own."""

from __future__ import annotations

import os

import pytest
import torch

import forebay

pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]
SIZE = 40


class Raw(torch.utils.data.Dataset):
    """Samples of a file that stays open: which process read, and where it was in the file."""

    def __init__(self, path):
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115
        self.file.seek(7)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        at = self.file.tell()
        self.file.read(1)
        return torch.tensor([os.getpid(), at])


def assert_own_positions(found, dataset):
    """Each process read one byte after the other, from where the caller was."""
    by_process = {}
    for process, at in sorted(map(tuple, found)):
        by_process.setdefault(process, []).append(at)
    assert sum(map(len, by_process.values())) == SIZE
    for read in by_process.values():
        assert read == [*range(7, 7 + len(read))]
    assert dataset.file.tell() == 7
    dataset.file.close()


@pytest.fixture
def raw(tmp_path):
    (tmp_path / "raw").write_bytes(bytes(1000))
    return Raw(tmp_path / "raw")


def test_predict_reads_a_shared_file_at_own_positions(tmp_path, raw):
    """Otherwise what one worker seeks moves the position of the others, and rows are wrong."""
    forebay.predict(
        lambda batch: batch, raw, tmp_path / "out", num_workers=2, batch_size=4, progress=False
    )
    table = forebay.from_table(tmp_path / "out", columns=["prediction"])
    assert_own_positions([table[at]["prediction"].tolist() for at in range(SIZE)], raw)


def test_a_loader_reads_a_shared_file_at_own_positions(raw):
    """As `predict` does."""
    loader = forebay.DataLoader(raw, batch_size=4, num_workers=2)
    assert_own_positions(torch.cat([*loader]).tolist(), raw)
