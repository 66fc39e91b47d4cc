"""Functions that fork, and leave the fork to itself, as `os.fork` and some libraries do."""

from __future__ import annotations

import os
import sys
from functools import partial

import pytest
from driving import make_inputs, published

import forebay

# On Python 3.12 and newer, a fork beside threads is warned of.
pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def forks(source, out, end):
    """Copy a file; return the exit code of a fork that leaves the function, too."""
    (out / source.name).write_bytes(source.read_bytes())
    child = os.fork()
    if not child:
        if end == "exits":
            sys.exit(3)
        if end == "raises":
            raise ValueError("in the fork")
        return {"code": None}
    return {"code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}


WAYS = {"here": {"num_workers": 0}, "workers": {}, "threads": {"backend": "thread"}}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("end", "code"), [("returns", 0), ("exits", 3), ("raises", 1)])
def test_a_fork_that_leaves_the_function_ends(tmp_path, end, code, options):
    """It ends as its program would; it answers nothing, and touches no output."""
    inputs = make_inputs(tmp_path / "in", 3)
    work = partial(forks, end=end)
    options = {"num_workers": 1, **options}
    report = forebay.preprocess(work, inputs, tmp_path / "out", progress=False, **options)
    assert (report.done, report.failures) == (3, ())
    assert report.metadata.column("code").to_pylist() == [code] * 3
    files = {name: data for name, data in published(tmp_path / "out").items() if "meta" not in name}
    assert files == {each.name: each.read_bytes() for each in sorted(inputs.iterdir())}


class Forks:
    """A dataset whose `__getitem__` forks."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        child = os.fork()
        return {"code": -1 if not child else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}


def test_a_fork_that_leaves_a_dataset_ends(tmp_path):
    """In a run over its samples, and in a loader's worker."""
    report = forebay.preprocess(Forks(), output=tmp_path / "out", num_workers=1, progress=False)
    assert report.metadata.column("code").to_pylist() == [0] * 3
    with forebay.DataLoader(Forks(), batch_size=3, num_workers=1) as loader:
        assert [batch["code"].tolist() for batch in loader] == [[0, 0, 0]]
