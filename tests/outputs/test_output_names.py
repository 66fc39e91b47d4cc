"""The names of outputs: one rule for what is asked for, and for what a ledger holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.base.output_names import asked_name, folders_of, normalized, recorded_name, staged_name
from forebay.errors import LedgerError, OutputError

PARTS = st.sampled_from(["", ".", "..", "a", "b.c", "...", "..a", ".forebay", "metadata.csv", "\0"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a", "a"),
        ("a/b", "a/b"),
        ("./a//b/./c", "a/b/c"),
        (Path("a") / "b", "a/b"),
        ("..a", "..a"),
        (".hidden", ".hidden"),
        ("a\\..\\b", "a\\..\\b"),
        ("\udcff", "\udcff"),
    ],
)
def test_a_name_has_one_spelling(name, expected):
    """It is that of a path without detours."""
    assert asked_name(name) == expected
    assert recorded_name(expected) == expected


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/", "/a", "//a", "../a", "a/..", "a/../..", "a/../../b", "a\0", None, 7],
)
def test_what_is_no_name_in_the_folder_is_refused_at_every_door(name):
    """In the words of each."""
    with pytest.raises(ValueError, match=r"name|NUL|leave"):
        normalized(name)
    with pytest.raises(OutputError, match=r"out\.file\("):
        asked_name(name)
    for check in (recorded_name, staged_name):
        with pytest.raises(LedgerError, match="the ledger names an output"):
            check(name)


@pytest.mark.parametrize("name", ["./a", "a//b", "a/", "a/./b"])
def test_a_ledger_holds_names_in_their_one_spelling(name):
    """Two spellings would be two names of one file."""
    with pytest.raises(LedgerError, match="normal form"):
        recorded_name(name)


def test_outputs_cannot_have_forebays_own_names():
    """Its folder, and its tables; only what waits there may be called so."""
    for name in (".forebay", ".forebay/x", "metadata.csv", "metadata.parquet/x", "METADATA.jsonl"):
        with pytest.raises(OutputError, match="reserved for forebay"):
            asked_name(name)
    with pytest.raises(LedgerError):
        recorded_name(".forebay/staging/x")
    assert staged_name(".forebay/staging/x") == ".forebay/staging/x"
    for name in ("x", ".forebay/x", ".forebay/staging", ".forebay/stagings/x"):
        with pytest.raises(LedgerError):
            staged_name(name)


@given(st.lists(PARTS, min_size=1, max_size=6))
def test_no_name_that_is_accepted_leaves_the_folder(parts):
    """Whatever it is made of, it is a path below the folder that is not the folder itself."""
    name = "/".join(parts)
    for check in (asked_name, recorded_name):
        try:
            final = check(name)
        except (OutputError, LedgerError):
            continue
        path = os.path.normpath(os.path.join("/out", final))
        assert path == f"/out/{final}"
        assert folders_of(final) == [str(one) for one in reversed(Path(final).parents)][1:]
