"""SIGKILL of the driver half way: the same call again goes on, and leaves the same files."""

from __future__ import annotations

import signal
from pathlib import Path

import cached
import pytest
from driving import published

import forebay

SCRIPT = Path(cached.__file__)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 0])
def test_a_killed_run_is_continued(trainers, tmp_path, num_workers):
    """Return whether it works by itself or has workers; nothing that was done is done again."""
    whole = forebay.cache(cached.Noise(), tmp_path / "whole", num_workers=0, progress=False)
    folder = tmp_path / "killed"
    code, _, err = trainers.run(SCRIPT, folder, num_workers, cwd=tmp_path)
    assert code == -signal.SIGKILL, err
    trainers.await_none_left()
    with pytest.raises(forebay.InputError, match="no finished cache"):
        forebay.open_cache(folder)
    done = {path: path.stat().st_ino for path in folder.glob("*.arrow")}

    again = forebay.cache(cached.Noise(), folder, num_workers=0, progress=False)
    assert published(folder) == published(tmp_path / "whole")
    assert len(published(folder)) == 125
    assert done == {path: path.stat().st_ino for path in done}
    assert again[999][0].equal(whole[999][0])
    if num_workers == 0:  # it commits now and then; with the driver's own hands, about as it goes
        assert len(done) < 125
