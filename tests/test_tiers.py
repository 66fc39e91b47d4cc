"""The tiers of the suite: what each runs, and that nothing is left out of all of them."""

from __future__ import annotations

from itertools import product

from tiers import TIERS, Case, chosen

MARKS = {
    "test_plain": set(),
    "test_cheap[1]": set(),
    "test_cheap[2]": set(),
    "test_slow[0]": {"slow", "full"},
    "test_slow[1]": {"slow"},
    "test_slow[2]": {"slow"},
    "test_of_a_benchmark": {"full"},
    "test_large[1]": {"parametrize"},
    "test_large[9]": {"thorough"},
}
CASES = [
    Case(name, marks, {"n": name.partition("[")[2]} if "[" in name else {})
    for name, marks in MARKS.items()
]


def names(tier, cases=CASES):
    """Return the cases of a tier, as one text."""
    is_chosen = chosen(tier, cases)
    return " ".join(
        each.name.removeprefix("test_") for each, here in zip(cases, is_chosen, strict=True) if here
    )


def table(marks=frozenset(), thorough=()):
    """Return cases of a test with each combination of two values of one list, three of another."""
    return [
        Case(
            f"test_pair[{x}{y}]",
            {*marks, *(["thorough"] if f"{x}{y}" in thorough else [])},
            {"x": x, "y": y},
        )
        for x, y in product("ab", "123")
    ]


def test_each_test_has_a_case_every_day_unless_it_is_marked():
    """`make test` leaves out what costs and tells least; `make quick` all that costs."""
    assert names("test") == "plain cheap[1] cheap[2] slow[1] large[1]"
    assert names("quick") == "plain cheap[1] large[1]"


def test_what_make_test_leaves_out_is_the_rest():
    """Together they run each case of `full` once."""
    assert names("rest") == "slow[0] slow[2] of_a_benchmark"
    assert sorted(f"{names('test')} {names('rest')}".split()) == sorted(names("full").split())


def test_of_combinations_that_are_slow_each_value_occurs():
    """In as few cases as there can be; if one of these is thorough, in others."""
    assert names("full", table({"slow"})) == "pair[a1] pair[a3] pair[b2]"
    assert names("test", table({"slow"})) == "pair[a1]"
    assert names("rest", table({"slow"})) == "pair[a3] pair[b2]"
    without = names("full", table({"slow"}, thorough={"b2"})).split()
    assert without == ["pair[a1]", "pair[a2]", "pair[a3]", "pair[b1]"]
    assert len(names("full", table()).split()) == 6


def test_only_all_has_everything():
    """Each other tier is a part of it."""
    for cases in (CASES, table({"slow"})):
        assert names("all", cases).split() == [each.name.removeprefix("test_") for each in cases]
    assert [tier for tier in TIERS if "large[9]" in names(tier)] == ["all"]
