"""Which cases of the suite run together: a pure function of their names, marks and values.

    quick   the first case of each test that is not slow
    test    all cases of tests that are not slow, and the first case of those that are
    rest    what `full` has beside `test`
    full    all but what is thorough: the default
    all     everything

A case is left out of `quick` and `test` by the mark `full`, and of all but `all` by `thorough`. Of
a slow test that is tried with every combination of two lists of values or more, only `all` has all:
the others have each value at least once, since lives (`tests/lives/`) try what crosses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import NamedTuple

TIERS = ("quick", "test", "rest", "full", "all")


class Case(NamedTuple):
    """A case of a test: its ID, its marks, and its value of each list that the test has."""

    name: str
    marks: Set[str]
    values: Mapping[str, Hashable]

    @property
    def test(self) -> str:
        """The ID of its test."""
        return self.name.partition("[")[0]


def chosen(tier: str, cases: Sequence[Case]) -> list[bool]:
    """Return which cases are of a tier.

    Args:
        tier: One of `TIERS`.
        cases: All cases, in the order in which they were collected.
    """
    covering = _covering([each for each in cases if "thorough" not in each.marks])
    found, begun = [], set()
    for case in cases:
        is_slow = "slow" in case.marks
        is_full = "thorough" not in case.marks and (case.name in covering or not is_slow)
        is_everyday = is_full and "full" not in case.marks
        is_first = is_everyday and case.test not in begun
        if is_first:
            begun.add(case.test)
        is_test = is_everyday and (is_first or not is_slow)
        found.append(
            {
                "quick": is_first and not is_slow,
                "test": is_test,
                "rest": is_full and not is_test,
                "full": is_full,
                "all": True,
            }[tier]
        )
    return found


def _covering(cases: Sequence[Case]) -> set[str]:
    """Return the names of cases that have each value: diagonals, and what is not on these."""
    tests = defaultdict(list)
    for case in cases:
        tests[case.test].append(case)
    found = set()
    for its in tests.values():
        lists = {key: [*dict.fromkeys(each.values[key] for each in its)] for key in its[0].values}
        most = max(map(len, lists.values()), default=1)
        diagonal = [
            {key: values[at % len(values)] for key, values in lists.items()} for at in range(most)
        ]
        missing = {(key, value) for key, values in lists.items() for value in values}
        for case in sorted(its, key=lambda case: case.values not in diagonal):
            if case.values in diagonal or missing.intersection(case.values.items()):
                found.add(case.name)
                missing.difference_update(case.values.items())
    return found
