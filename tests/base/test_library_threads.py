"""Libraries use one thread in a worker, whenever they are loaded; what the user set is kept."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import types

import pytest

from forebay.base import libraries
from forebay.base.libraries import after_import, not_after_import, one_thread

PROGRAM = """
import json, os, sys
import torch
import forebay
{imports}

class Threads(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        import numpy, pyarrow, torch
        from threadpoolctl import threadpool_info
        blas = max(each["num_threads"] for each in threadpool_info())
        return torch.tensor([blas, pyarrow.cpu_count(), torch.get_num_threads()])

if __name__ == "__main__":
    before = torch.get_num_threads(), pyarrow_count()
    found = []
    for options in {ways}:
        with forebay.DataLoader(Threads(), batch_size=None, **options) as loader:
            found.append([each.tolist() for each in loader])
    print(json.dumps([found, before == (torch.get_num_threads(), pyarrow_count())]))
"""
IMPORTED = "import numpy, pyarrow\nnumpy.ones((300, 300)) @ numpy.ones((300, 300))\n"
COUNT = "def pyarrow_count():\n    import pyarrow\n    return pyarrow.cpu_count()\n"


def threads_of(folder, *ways, imports=IMPORTED, **variables):
    """Return what the libraries said in each sample, for each way, in a program of its own."""
    path = folder / "program.py"
    path.write_text(PROGRAM.format(imports=imports + COUNT, ways=ways))
    unset = {key: value for key, value in os.environ.items() if "NUM_THREADS" not in key}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", path],
        env=unset | variables,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    samples, unchanged = json.loads(done.stdout)
    assert unchanged
    return samples


ONE = [[1, 1, 1]] * 4
WORKER = {"num_workers": 1}


@pytest.mark.slow
def test_each_library_has_one_thread(tmp_path):
    """Inherited by a fork or loaded in the worker; and here, since batches must be the same."""
    methods = [WORKER | {"multiprocessing_context": each} for each in ("spawn", "fork")]
    assert threads_of(tmp_path, WORKER, *methods, {"num_workers": 0, "seed": 0}) == [ONE] * 4


@pytest.mark.slow
def test_a_library_that_is_imported_later_has_one_thread(tmp_path):
    """By the variables of the worker's environment."""
    assert threads_of(tmp_path, WORKER, imports="") == [ONE]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="OpenBLAS has at most a thread a core")
@pytest.mark.parametrize(
    ("variables", "kept"),
    [
        ({"OMP_NUM_THREADS": "2"}, [2, 2, 1]),
        ({"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": ""}, [2]),
    ],
    ids=["all", "one"],
)
def test_what_the_user_set_is_kept(tmp_path, variables, kept):
    """torch has one thread in a fork in any case: it would wait for those of its parent."""
    (found,) = threads_of(tmp_path, WORKER, **variables)
    assert [each[: len(kept)] for each in found] == [kept] * 4


def test_the_numbers_of_threads_are_restored():
    """Also if the block raises, and if the numbers are one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyError), one_thread():
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_every_thread_of_the_process_may_limit_them():
    """A pool may be started by a background thread, after the main thread has started one."""
    import numpy
    from threadpoolctl import threadpool_info

    numpy.ones((2, 2)) @ numpy.ones((2, 2))
    with one_thread():
        pass
    counts, before = [], [each["num_threads"] for each in threadpool_info()]

    def limit():
        with one_thread():
            counts.extend(each["num_threads"] for each in threadpool_info())

    thread = threading.Thread(target=limit)
    thread.start()
    thread.join()
    assert counts == [1] * len(before)
    assert [each["num_threads"] for each in threadpool_info()] == before


def test_a_fork_starts_no_thread():
    """It ends those of OpenBLAS, which would wait for work from the moment of their start."""
    import numpy

    numpy.ones((300, 300)) @ numpy.ones((300, 300))
    files = [each for each in libraries._shared_files() if "openblas" in each]
    if not all(hasattr(ctypes.CDLL(each), "blas_cpu_number") for each in files):
        pytest.skip("OpenBLAS 0.3.34 does not export its number of threads")
    with one_thread():
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        before = {*os.listdir("/proc/self/task")}
    # Those that the fork ended may still be listed above for a moment.
    assert {*os.listdir("/proc/self/task")} <= before


def test_files_of_other_libraries_are_left_alone(tmp_path, monkeypatch):
    """A name that begins in the same way, a folder, and a file that was removed are no library."""
    lines = [
        "/usr/lib/libc.so.6",
        "/opt/libgomp-1/other.so",
        "/opt/a folder/libompl.so.1",
        "/opt/libopenblas.so (deleted)",
        "[heap]",
        "/opt/libopenblas.so",
    ]
    maps = "".join(f"7f00-7f01 r-xp 00000000 08:01 12    {line}\n" for line in lines)
    monkeypatch.setattr(libraries, "read_proc", lambda *_: maps.encode())
    files = libraries._shared_files()
    assert files == [
        "/opt/a folder/libompl.so.1",
        "/opt/libopenblas.so",
        "/opt/libopenblas.so (deleted)",
    ]
    assert [libraries._threads_of(each, frozenset()) for each in files] == [None] * 3


def test_functions_are_called_after_an_import(tmp_path, monkeypatch):
    """Once for each import, in order; not after they were taken away."""
    (tmp_path / "imported_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    called, before = [], list(sys.meta_path)
    try:
        after_import("imported_late", called.append)
        after_import("imported_late", called.append)
        import imported_late

        assert called == [imported_late]
        assert imported_late.value == 1
        not_after_import("imported_late", called.append)
        del sys.modules["imported_late"]
        import imported_late

        assert len(called) == 1
        assert sys.meta_path == before
    finally:
        sys.modules.pop("imported_late", None)


def test_a_library_whose_files_are_hidden_is_found(monkeypatch):
    """OpenCV replaces its extension module by a package, so no new file ends in .so."""
    import numpy  # noqa: F401 - so that the libraries of this process are looked for

    with one_thread():
        pass
    library, counts = types.ModuleType("cv2"), [7]
    library.getNumThreads = lambda: counts[-1]
    library.setNumThreads = counts.append
    monkeypatch.setitem(sys.modules, "cv2", library)
    with one_thread():
        assert counts == [7, 1]
    assert counts == [7, 1, 7]
