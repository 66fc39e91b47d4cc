"""The plain records that predict's rooms hand to each other."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any, NamedTuple


class Loaded(NamedTuple):
    """Samples that are ready for the model.

    Attributes:
        indices: Which, in dataset order; at least one.
        batch: What the collate function made of them.
    """

    indices: list[int]
    batch: Any


@dataclass(frozen=True, slots=True)
class LostSample:
    """A sample without a prediction: loading it failed, or the model failed on it alone.

    Attributes:
        index: Its place in the dataset.
        error: The error's type, such as "ValueError".
        message: The error's own words.
        traceback: Text; "" for those of one part beyond the first hundred.
    """

    index: int
    error: str
    message: str
    traceback: str

    @classmethod
    def of(cls, index: int, error: BaseException) -> LostSample:
        """Return the record of what was raised."""
        text = "".join(traceback.format_exception(error))
        return cls(index, type(error).__name__, str(error), text)

    def __str__(self) -> str:
        """Return it in one line."""
        words = self.message.splitlines()[0] if self.message else ""
        return f"sample {self.index}: {self.error}" + (f": {words}" if words else "")


class Found(NamedTuple):
    """What came of one batch of the plan: mostly one batch, and nothing lost."""

    loaded: list[Loaded]
    lost: list[LostSample]
