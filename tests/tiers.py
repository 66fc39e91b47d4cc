"""Which cases of the suite run together: a pure function of their names and marks.

    quick   the first case of each test that is not slow
    test    all cases of tests that are not slow, and the first case of those that are
    rest    what `full` has beside `test`
    full    all but what is thorough: the default
    all     everything

A case is left out of `quick` and `test` by the mark `full`, and of all but `all` by `thorough`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

TIERS = ("quick", "test", "rest", "full", "all")


def chosen(tier: str, cases: Sequence[tuple[str, Set[str]]]) -> list[bool]:
    """Return which cases are of a tier.

    Args:
        tier: One of `TIERS`.
        cases: The ID and the marks of each, in the order in which they were collected.
    """
    found, begun = [], set()
    for name, marks in cases:
        is_full = "thorough" not in marks
        is_everyday = is_full and "full" not in marks
        test = name.partition("[")[0]
        is_first = is_everyday and test not in begun
        if is_first:
            begun.add(test)
        is_slow = "slow" in marks
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
