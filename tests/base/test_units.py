"""Durations, sizes and counts: few digits, in the unit that fits, also after rounding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.base.formatting import byte_size, byte_unit, counted, duration, short_number


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (3.2e-6, "3.2 us"),
        (0.0246, "24.6 ms"),
        (0.9996, "1 s"),
        (1.5, "1.5 s"),
        (59.94, "59.9 s"),
        (59.97, "1 min"),
        (200, "3 min 20 s"),
        (3599.6, "1 h"),
        (7500, "2 h 5 min"),
        (86_400, "1 d"),
        (1_000_000, "11 d 14 h"),
    ],
)
def test_a_duration_is_in_the_unit_that_fits(seconds: float, text: str) -> None:
    """Microseconds to days; a second unit from a minute on, unless there is nothing of it."""
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.34, "12 s"), (0.1234, "120 ms"), (0.000996, "1 ms"), (59.6, "1 min")]
)
def test_a_duration_can_have_fewer_digits(seconds: float, text: str) -> None:
    """As an estimate of the time left needs no more."""
    assert duration(seconds, digits=2) == text


@given(st.floats(1e-6, 1e8), st.floats(1e-6, 1e8))
def test_what_takes_longer_is_never_shown_as_less(one: float, two: float) -> None:
    """Rounding keeps the order, also from one unit to the next."""
    shown = [_seconds(duration(each)) for each in sorted((one, two))]
    assert shown == sorted(shown)


def _seconds(text: str) -> float:
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
    words = text.replace(",", "").split()
    return sum(float(n) * units[unit] for n, unit in zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (1_000_000, "1 MB"),
        (1_234_567, "1.23 MB"),
        (30e9, "30 GB"),
        (2e15, "2 PB"),
        (5e18, "5,000 PB"),
    ],
)
def test_a_size_is_in_units_of_a_thousand(nbytes: float, text: str) -> None:
    """As `buffer=` takes them."""
    assert byte_size(nbytes) == text


def test_a_size_is_shown_in_its_unit() -> None:
    """A chart's axis and its labels agree."""
    assert byte_unit(999_600) == ("MB", 1e6)
    assert byte_unit(12) == ("B", 1.0)


def test_a_count_has_its_noun() -> None:
    """One is singular; a number of cores may be a fraction."""
    assert [counted(number, "input") for number in (0, 1, 2000)] == [
        *("0 inputs", "1 input", "2,000 inputs")
    ]
    assert [counted(cores, "core") for cores in (1.0, 1.5)] == ["1 core", "1.5 cores"]


def test_a_number_is_short() -> None:
    """No more digits than a label has room for."""
    assert [short_number(each) for each in (0, 0.25, 12.345, 3400, 1.2e6)] == [
        *("0", "0.25", "12.3", "3,400", "1.2 M"),
    ]
