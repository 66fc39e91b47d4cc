"""Libraries that people use make the same batches in each way, with one thread in a worker.

Those that forebay's own tests need are tried here each day; the others are skipped where they are
not installed: `pip install --group libraries` installs all.
"""

from __future__ import annotations

import pytest
from library_datasets import AUGMENTING, COMPUTING, READING
from library_program import digest, results

from forebay import DataLoader

pytestmark = pytest.mark.full

EVERYDAY = {name: COMPUTING[name] for name in ("numpy", "pandas", "pyarrow", "PIL")} | {
    name: READING[name] for name in ("sqlite3", "soundfile")
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYDAY)
def test_workers_make_the_same_batches(name, tmp_path):
    """Also from a connection that was opened and used before the fork, and here after it."""
    dataset = EVERYDAY[name](tmp_path)
    found = []
    for workers in (0, 2, 0):
        with DataLoader(dataset, batch_size=3, seed=0, num_workers=workers) as loader:
            found.append(digest(loader))
    assert found == [found[0]] * 3


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", COMPUTING)
def test_a_worker_computes_the_same_with_one_thread(name, tmp_path):
    """Return whether the worker imports the library, or has inherited it after it was used."""
    found = results("computed", name, tmp_path)
    assert len({digest for digest, _ in found.values()}) == 1, found
    assert [threads for way, (_, threads) in found.items() if way != "here"] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", READING)
def test_a_file_opened_before_the_fork_reads_right(name, tmp_path):
    """In the workers, and afterwards in the process that opened it."""
    found = results("read", name, tmp_path)
    assert len(found) == 4
    assert len({digest for digest, _ in found.values()}) == 1, found


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", AUGMENTING)
def test_augmentations_are_functions_of_the_seed(name, tmp_path):
    """However batches are made, and after a resume; caches and outputs byte for byte."""
    found = results("augmented", name, tmp_path)
    for kind in ("cache", "preprocess"):
        (one, files), (three, _) = (found.pop(f"{kind}, {count} workers") for count in (1, 3))
        assert one == three, found
        assert files > 0
    assert len({digest for digest, _ in found.values()}) == 1, found
    assert {different for _, different in found.values()} == {4}  # no two batches are the same
