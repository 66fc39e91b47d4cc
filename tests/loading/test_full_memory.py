"""Memory that runs out because of a buffer: no batch is to blame, and less is buffered."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from streams import until

import forebay
from forebay.base import machine
from kit.control_groups import memory_group

MIB = 1 << 20


class Killed:
    """Arrays of a MiB; the worker is killed, as if for its memory, when it makes one of them."""

    def __init__(self, count, at, folder, always=False):
        self.count, self.at, self.folder, self.always = count, at, folder, always

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        mark = self.folder / str(index)
        if index in self.at and (self.always or not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(MIB, index % 256, np.uint8)


@pytest.fixture
def small_machine(monkeypatch):
    """A machine with 20 MiB of memory, which counts no kills."""
    monkeypatch.setattr("forebay.pools.processes.usable_memory", lambda: 20 * MIB)
    monkeypatch.setattr("forebay.pools.processes.memory_kills", lambda: None)


def test_a_kill_while_the_buffer_takes_most_of_the_memory_empties_the_buffer(
    small_machine, tmp_path
):
    """No batch fails; at most half is buffered from then on; the warning says what to set."""
    dataset = Killed(60, [14], tmp_path)
    with forebay.DataLoader(dataset, num_workers=1, buffer="16MiB") as loader:
        batches = iter(loader)
        feed = loader._loader_progress.pipeline.feed
        with pytest.warns(RuntimeWarning, match="memory ran out") as caught:
            until(lambda: loader.statistics().restarts == 1)
        assert [int(batch[0, 0]) for batch in batches] == list(range(60))
        assert loader.statistics().restarts == 1
        assert feed._engine.flow.limits.max_bytes < 9 * MIB
    (text,) = [str(each.message) for each in caught]
    assert 'buffer="' in text and "directory=" in text and "No batch failed" in text


def test_a_sample_that_is_killed_with_little_buffered_is_to_blame(small_machine, tmp_path):
    """The sample needs the memory itself: it fails, as ever."""
    dataset = Killed(6, [4], tmp_path, always=True)
    with forebay.DataLoader(dataset, num_workers=1, buffer="2MiB") as loader:
        batches = iter(loader)
        assert [int(next(batches)[0, 0]) for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(forebay.WorkerDiedError, match="usually the machine ran out of memory"):
            next(batches)
        assert int(next(batches)[0, 0]) == 5


@pytest.mark.parametrize("version", [1, 2])
def test_kills_for_memory_are_counted_where_the_system_counts_them(tmp_path, version):
    """Of the innermost group that counts, of either version; otherwise of the machine."""
    (tmp_path / "self").mkdir()
    (tmp_path / "vmstat").write_text("nr_free 9\noom_kill 7\n")
    assert machine.memory_kills(tmp_path, tmp_path) == 7
    name, line = (
        ("memory.oom_control", "4:memory:/a/b\n")
        if version == 1
        else ("memory.events", "0::/a/b\n")
    )
    (tmp_path / "self" / "cgroup").write_text(line)
    inner = tmp_path / ("memory/a/b" if version == 1 else "a/b")
    inner.mkdir(parents=True)
    (inner.parent / name).write_text("oom_kill 5\n")
    assert machine.memory_kills(tmp_path, tmp_path) == 5
    (inner / name).write_text("low 0\noom 4\noom_kill 3\n")
    assert machine.memory_kills(tmp_path, tmp_path) == 3
    assert machine.memory_kills(tmp_path / "none", tmp_path) is None


@pytest.fixture
def small_group():
    """A real control group of 600 MiB, as its file that takes processes."""
    with memory_group(600 * MIB) as processes:
        yield processes


@pytest.mark.slow
def test_in_a_full_control_group_training_goes_on_with_less(small_group, script):
    """The kernel kills workers while the buffer fills; every batch comes, once, as it is."""
    ending = script(
        """
        import warnings
        Path(sys.argv[1]).write_text(str(os.getpid()))
        class Images(Numbers):
            def __getitem__(self, index):
                return torch.full((4 << 20,), index, dtype=torch.uint8)
        warnings.simplefilter("always")
        with warnings.catch_warnings(record=True) as caught:
            loader = forebay.DataLoader(
                Images(250), 1, num_workers=2, buffer="2GB"
            )
            batches, found = iter(loader), []
            import time
            until = time.monotonic() + 60
            while loader.statistics().restarts == 0 and time.monotonic() < until:
                time.sleep(0.1)
            for batch in batches:
                found.append(int(batch[0, -1]))
        text = next(str(each.message) for each in caught if "memory ran out" in str(each.message))
        print(found == list(range(250)), len(loader.failures))
        print(text)
        """,
        small_group,
    ).end()
    assert ending.code == 0, ending.err
    first, *words = ending.out.splitlines()
    assert first == "True 0"
    assert "of the 629 MB that this program may use" in words[0]
