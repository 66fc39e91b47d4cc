"""The faults that are planted to prove that lives see them fit the source as it is now."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from lives.planted import SOURCE, Fault, faults


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_a_planted_fault_still_applies(fault: Fault) -> None:
    """What it replaces is in the source once, and what it puts there is Python."""
    text = (SOURCE / "forebay" / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1
    ast.parse(text.replace(fault.old, fault.new))


def test_there_are_fifty_faults_of_different_names() -> None:
    """None is left out because lives do not find it."""
    names = Counter(fault.name for fault in faults())
    assert len(names) == names.total() == 50
