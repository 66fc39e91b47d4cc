"""How often Python looks for reference cycles during a run."""

from __future__ import annotations

import gc

import pytest

from forebay.base.process import fewer_collections


@pytest.fixture(autouse=True)
def _restored():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_it_is_seldom_during_a_run_and_as_before_afterwards() -> None:
    """However the run ends; a second run beside the first changes nothing."""
    gc.set_threshold(700, 10, 5)
    with pytest.raises(ZeroDivisionError), fewer_collections():
        assert gc.get_threshold() == (50_000, 10, 5)
        with fewer_collections():
            gc.set_threshold(700, 10, 5)  # the first ends before the second
        assert gc.get_threshold() == (700, 10, 5)
        raise ZeroDivisionError
    assert gc.get_threshold() == (700, 10, 5)


@pytest.mark.parametrize("threshold", [0, 50_000])
def test_the_users_own_setting_stays(threshold) -> None:
    """Off is off, and seldom enough is left as it is."""
    gc.set_threshold(threshold, 10, 10)
    with fewer_collections():
        assert gc.get_threshold()[0] == threshold
