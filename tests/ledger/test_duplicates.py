"""Inputs that are listed twice, found without all keys in memory."""

from __future__ import annotations

import pytest

from forebay.ledger import enrolment
from forebay.ledger.enrolment import Duplicate, find_duplicate

LISTED = [f"in/{number % 990}" for number in range(1000)]


def find(keys):
    return find_duplicate(lambda: ((at, key, None) for at, key in enumerate(keys, 1)))


@pytest.mark.parametrize("in_memory", [8, 1 << 21])
def test_the_first_that_is_listed_twice_is_found(monkeypatch, in_memory):
    """With its places, and how many others there are; in memory, or with a temporary file."""
    monkeypatch.setattr(enrolment, "_IN_MEMORY", in_memory)
    assert find(LISTED) == Duplicate(1, 991, 9, "in/0", False)
    assert find(LISTED[:990]) is None


def test_keys_with_one_hash_are_no_duplicates(monkeypatch):
    """The keys themselves are compared."""
    monkeypatch.setattr(enrolment, "hash", len, raising=False)
    assert find(["a", "b", "cd"]) is None
    assert find(["a", "b", "cd", "b"]) == Duplicate(2, 4, 0, "b", False)
