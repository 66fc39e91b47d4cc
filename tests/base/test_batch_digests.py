"""Digests of samples and batches: they differ where a bit differs, and say what cannot be read."""

from __future__ import annotations

import pickle
from array import array
from collections import deque
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from forebay.base.batch_digests import differing, digested, not_compared


@dataclass
class Boxes:
    corners: torch.Tensor


class Graph:
    def __init__(self, edges):
        self.edges = edges


class Named(dict):
    def __init__(self, name):
        super().__init__(a=1)
        self.name = name


class Slotted:
    __slots__ = ("other", "value")

    def __init__(self, value):
        self.value, self.other = value, self


class Undecided:
    """Has an `__eq__` that has no answer, as a table's."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        raise ValueError("the truth value is ambiguous")

    __hash__ = None


class Always(Graph):
    """Is equal to any other, and has what pickle saves."""

    def __eq__(self, other):
        return True

    __hash__ = None


def image(bit):
    whole = Image.new("P", (2, 2))
    whole.putpalette([int(bit)] * 3)
    return whole


@pytest.mark.parametrize(
    "make",
    [
        lambda bit: torch.tensor([1.0, bit]),
        lambda bit: torch.tensor([1.0, bit], dtype=torch.bfloat16),
        lambda bit: torch.tensor([1.0, bit]).to_sparse(),
        torch.tensor,
        lambda bit: torch.empty(int(bit), device="meta"),
        lambda bit: np.array([bit, float("nan")]),
        lambda bit: np.array([bit, "text"], dtype=object),
        lambda bit: bytes([int(bit)]),
        lambda bit: Boxes(torch.tensor(bit)),
        lambda bit: Graph([torch.tensor(bit)]),
        lambda bit: ("text", bit, None),
        lambda bit: {"a", bit, "b"},
        lambda bit: deque([torch.tensor(bit)]),
        Named,
        Slotted,
        Undecided,
        Always,
        image,
        lambda bit: array("d", [bit]),
        lambda bit: pd.DataFrame({"x": [bit], "y": ["text"]}),
        lambda bit: Path(str(bit)),
        lambda bit: [int, len, image, date(2026, 1, int(bit))],
        lambda bit: partial(image, bit),
        lambda bit: np.random.default_rng(int(bit)),
        lambda bit: torch.Generator().manual_seed(int(bit)),
    ],
)
def test_digests_differ_where_a_bit_differs(make):
    """Equal values have equal digests, also those of objects that cannot be compared."""
    assert digested(make(1.0)) == digested(make(1.0))
    assert digested(make(1.0)) != digested(make(2.0))
    assert not [*not_compared(digested(make(1.0)))]
    assert digested(make(1.0)) == pickle.loads(pickle.dumps(digested(make(1.0))))


def test_the_path_to_what_differs_is_named():
    """Keys, indices, fields and attributes; what a class keeps without a name is itself."""

    def make(bit):
        deep = {"graph": Graph([1, {"x": bit}]), "when": date(2026, 1, bit)}
        return {"boxes": [Boxes(torch.tensor(bit))], 3: deep}

    assert [*differing(digested(make(1)), digested(make(2)))] == [
        "['boxes'][0].corners",
        "[3]['graph'].edges[1]['x']",
        "[3]['when']",
    ]
    assert [*differing(digested([1, 2]), digested([1, 2, 3]))] == [""]
    assert [*differing(digested(1), digested(True))] == [""]


def test_what_has_no_state_to_read_is_named():
    """Also what contains itself, which no walk ends."""
    endless = []
    endless.append(endless)
    assert [*not_compared(digested({"a": [iter([]), (x for x in ())], "b": Graph(open)}))] == [
        ("['a'][1]", "generator")
    ]
    ((path, kind),) = not_compared(digested(endless))
    assert (path, kind) == ("", "list that contains itself, or is nested too deeply")
