"""A buffer on a disk: the same batches, in a file without a name, also when the disk is full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Large
from same import assert_same
from streams import until

import forebay

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path):
    """A file system of four megabytes, busy to the last as long as any process has its file."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder]
    done = subprocess.run(mount, capture_output=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def loader_on(folder, count=12, **options):
    buffer = forebay.Buffer(max_batches=12, directory=folder)
    return forebay.DataLoader(Large(count), num_workers=2, buffer=buffer, **options)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_batches_lie_in_the_folder_and_are_the_same(tmp_path, method):
    """Nobody sees the file in it."""
    with loader_on(tmp_path, multiprocessing_context=method) as loader:
        batches = list(loader)
        file = os.fstat(loader._loader_progress.pipeline.feed._slots.slab.fileno())
        assert file.st_dev == os.stat(tmp_path).st_dev
        assert file.st_blocks * 512 >= 12 * MIB
        assert os.listdir(tmp_path) == []
    assert_same(batches, list(torch.utils.data.DataLoader(Large(12))))


@pytest.mark.slow
def test_on_a_full_disk_batches_travel_otherwise_and_the_user_is_told_once(small_disk):
    """No worker is killed for writing where there is no room, and no batch is lost or torn."""
    with loader_on(small_disk) as loader:
        with pytest.warns(RuntimeWarning) as caught:
            first, second = list(loader), list(loader)
        assert loader.statistics().restarts == 0
    assert_same(first, list(torch.utils.data.DataLoader(Large(12))))
    assert_same(second, first)
    (text,) = [str(each.message) for each in caught if each.category is RuntimeWarning]
    assert text.splitlines()[0] == (
        f"the buffer's disk is full: directory={str(small_disk)!r}, No space left on device"
    )
    assert "A batch of 1,04" in text and "bytes are free there" in text
    assert "kept in memory" in text and "max_bytes" in text


@pytest.mark.slow
def test_a_batch_that_a_collate_fn_made_travels_otherwise_too(small_disk):
    """It is copied into its slot, or not."""
    with loader_on(small_disk, collate_fn=as_arrays) as loader:
        with pytest.warns(RuntimeWarning, match="the buffer's disk is full"):
            batches = list(loader)
    assert [batch[0, 0, 0] for batch in batches] == list(range(12))
    assert {batch.sum() / batch[0, 0, 0] for batch in batches[1:]} == {256 * 1024}


def as_arrays(samples):
    return torch.stack(samples).numpy()


@pytest.mark.slow
def test_a_disk_with_room_again_is_used_again(small_disk):
    """What was kept in the slots is let go, and the slots go out once more."""
    with loader_on(small_disk) as loader:
        with pytest.warns(RuntimeWarning, match="the buffer's disk is full"):
            kept = list(loader)
        slab = loader._loader_progress.pipeline.feed._slots.slab
        assert sum(lies_in(slab, batch) for batch in kept) <= 4
        del kept
        # The second epoch may have been made before that; the third was made after it.
        assert any(lies_in(slab, batch) for _ in range(2) for batch in loader)


def lies_in(slab, tensor):
    start = torch.frombuffer(slab._extents[0], dtype=torch.uint8, count=1).data_ptr()
    return start <= tensor.data_ptr() < start + slab.extent


TRAINER = """if True:
    import sys
    import forebay
    from datasets import Large
    buffer = forebay.Buffer(max_batches=3, directory=sys.argv[1])
    batches = iter(forebay.DataLoader(Large(1000), num_workers=2, buffer=buffer))
    kept = next(batches)
    print("trains", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_trainer_leaves_no_file_and_no_byte_on_the_disk(small_disk):
    """The file system is as free as it was, and nobody is at work on it."""
    free = os.statvfs(small_disk).f_bfree
    here, source = Path(__file__).parent, Path(forebay.__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, small_disk],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{source}"},
    ) as trainer:
        assert trainer.stdout.readline() == b"trains\n"
        assert os.statvfs(small_disk).f_bfree < free
        assert os.listdir(small_disk) == []
        trainer.send_signal(signal.SIGKILL)
        # Workers have this pipe from the trainer: it ends with the last of them.
        assert trainer.stdout.read() == b""
    assert os.listdir(small_disk) == []
    # The system frees the file a moment after it has closed the pipe.
    until(lambda: os.statvfs(small_disk).f_bfree == free)


def test_a_folder_that_is_gone_is_an_error_before_any_worker_starts(tmp_path):
    """It was there when the buffer was described."""
    folder = tmp_path / "folder"
    folder.mkdir()
    loader = loader_on(folder)
    folder.rmdir()
    with pytest.raises(forebay.OptionError, match="no file for batches can be made in directory="):
        iter(loader)


def test_threads_have_no_buffer_on_a_disk(tmp_path):
    """Their batches are never in the slab, so the wish cannot be granted, and that is said."""
    with pytest.raises(forebay.OptionError, match="not possible with backend='thread'"):
        loader_on(tmp_path, backend="thread")
