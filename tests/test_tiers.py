"""The tiers of the suite: what each runs, and that nothing is left out of all of them."""

from __future__ import annotations

from tiers import TIERS, chosen

CASES = {
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


def names(tier):
    """Return the cases of a tier, as one text."""
    is_chosen = chosen(tier, [*CASES.items()])
    return " ".join(
        name.removeprefix("test_") for name, here in zip(CASES, is_chosen, strict=True) if here
    )


def test_each_test_has_a_case_every_day_unless_it_is_marked():
    """`make test` leaves out what costs and tells least; `make quick` all that costs."""
    assert names("test") == "plain cheap[1] cheap[2] slow[1] large[1]"
    assert names("quick") == "plain cheap[1] large[1]"


def test_what_make_test_leaves_out_is_the_rest():
    """Together they run each case of `full` once."""
    assert names("rest") == "slow[0] slow[2] of_a_benchmark"
    assert sorted(f"{names('test')} {names('rest')}".split()) == sorted(names("full").split())


def test_only_all_has_what_is_thorough():
    """And it has everything; each other tier is a part of it."""
    assert names("all").split() == [name.removeprefix("test_") for name in CASES]
    assert [tier for tier in TIERS if "large[9]" in names(tier)] == ["all"]
