"""`import forebay` is light: what takes seconds or may be missing is imported when it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("fsspec", "pyarrow", "ray", "torch", "IPython", "tqdm")


def heavy_after(code: str) -> list[str]:
    """Return the heavy packages that a fresh interpreter has loaded after running `code`."""
    script = f"{code}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "code",
    [
        "import forebay",
        "from forebay import preprocess",
        "import forebay.cli",
        "from forebay.testing.leaks import no_leaks",
    ],
)
def test_an_import_loads_nothing_heavy(code: str) -> None:
    """The public doors load neither torch, ray, pyarrow nor fsspec."""
    assert heavy_after(code) == []


def test_a_heavy_import_would_be_seen() -> None:
    """The test of the test: a package that is loaded is named."""
    assert heavy_after("import fsspec") == ["fsspec"]
