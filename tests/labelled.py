"""Samples with an image and a label, of two kinds whose fields have names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Labelled(NamedTuple):
    """A sample that is a tuple."""

    image: Any
    label: Any


@dataclass
class Record:
    """A sample that is not a tuple."""

    image: Any
    label: Any
