"""What the function of a preprocess worker receives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from forebay.outputs.folder import OutputFolder
from forebay.pools.events import Assignment
from forebay.runs.job import PreprocessJob


def test_the_function_gets_the_path_that_pathlib_makes_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders are parsed once for several inputs, which changes no path."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("a/x", "a/y", "a/b/x", "x", "..x"):
        Path(name).write_text(name)
    absolute = f"{tmp_path}/a/x"
    sources = ["a/x", "a/y", "a//y", "./a/x", "a/./y", "a/b/../x", "x", "./x", "a/b/x", "..x"]
    sources += [absolute, f"/{absolute}", f"//{absolute}", "x"]
    seen: list[Path] = []

    def work(path: Path, out: Any) -> None:
        seen.append(path)
        assert path.read_text().endswith(path.name)

    job = PreprocessJob(work, "paths", OutputFolder(tmp_path / "out").staging())
    job.open(1, 0)
    for number, source in enumerate(sources):
        job.run(Assignment(number, 1, (source, None)))
    job.close()

    assert [str(each) for each in seen] == [str(Path(source)) for source in sources]
    assert seen == [Path(source) for source in sources]


@pytest.mark.parametrize("seeds_owned", [True, False])
def test_work_that_seeds_its_own_generators_is_left_to_do_so(
    tmp_path: Path, seeds_owned: bool
) -> None:
    """A cache seeds for each sample, of which an input has many."""
    rng = random.Random(1)
    expected = random.Random(1).random()
    drawn: list[float] = []

    def work(path: Path, out: Any) -> None:
        drawn.append(rng.random())

    (tmp_path / "x").write_text("x")
    job = PreprocessJob(
        work, "paths", OutputFolder(tmp_path / "out").staging(), seeds_owned=seeds_owned
    )
    job.open(1, 0)
    job.run(Assignment(1, 1, (str(tmp_path / "x"), None)))
    job.close()
    assert (drawn == [expected]) is not seeds_owned
