"""`import forebay` is light: what takes seconds or may be missing is imported when it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("fsspec", "pyarrow", "ray", "torch", "IPython", "tqdm")


def heavy_after(code: str, heavy: tuple[str, ...] = HEAVY) -> list[str]:
    """Return the heavy packages that a fresh interpreter has loaded after running `code`."""
    script = f"{code}\nimport sys\nprint(*(name for name in {heavy} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import forebay",
        "from forebay import preprocess",
        "import forebay.cli",
    ],
)
def test_an_import_loads_nothing_heavy(code: str) -> None:
    """The public doors load neither torch, ray, pyarrow nor fsspec."""
    assert heavy_after(code) == []


@pytest.mark.slow
def test_a_table_is_written_without_pandas(tmp_path) -> None:
    """pyarrow would import it to convert a list, in each process, where it is installed."""
    code = (
        "import numpy, forebay\n"
        "from forebay.base.arrow_arrays import array_of_numpy\n"
        "forebay.preprocess(lambda row, out: {'tags': ['a', None], 'size': 1.5}, [{'n': 1}], "
        f"{str(tmp_path / 'out')!r}, num_workers=0, progress=False)\n"
        "array_of_numpy(numpy.ones((2, 3)))\n"
    )
    assert heavy_after(code, ("pandas", "pyarrow")) == ["pyarrow"]


def test_a_run_begins_without_numpy() -> None:
    """numpy starts threads, and workers are forked only from a driver without any."""
    assert heavy_after("import forebay.runs.run", ("numpy",)) == []


def test_a_worker_begins_without_what_the_driver_needs() -> None:
    """If the caller has threads, the workers' process is a new interpreter that imports it all."""
    worker = "import forebay.pools.zygote, forebay.base.files"
    slow = ("dataclasses", "inspect", "sqlite3", "tempfile", "forebay.options")
    needed = "import ctypes, hashlib, json, pathlib, pickle, random, socket, threading, traceback"
    assert set(heavy_after(worker, slow)) <= set(heavy_after(needed, slow))


def test_a_host_of_a_cluster_begins_without_torch() -> None:
    """Its worker imports it, too, and starts only after the host."""
    assert heavy_after("import forebay.loading.remote", ("torch",)) == []


def test_a_heavy_import_would_be_seen() -> None:
    """The test of the test: a package that is loaded is named."""
    assert heavy_after("import fsspec") == ["fsspec"]
