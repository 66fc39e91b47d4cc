"""Proof that an output folder holds what its ledger says, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verification:
    """What a look at every output found.

    Attributes:
        checked: Recorded outputs looked at.
        missing: Names recorded and not there.
        altered: Name, bytes recorded, bytes found.
        orphans: Names there and not recorded.
        damaged: The inputs behind what is missing or altered, by ordinal.
    """

    checked: int
    missing: tuple[str, ...]
    altered: tuple[tuple[str, int, int], ...]
    orphans: tuple[str, ...]
    damaged: tuple[int, ...]

    @property
    def is_sound(self) -> bool:
        """Whether everything is as recorded."""
        return not (self.missing or self.altered or self.orphans)


def verify(
    recorded: Iterable[tuple[str, int, int]],
    found: Sequence[tuple[str, int]],
    own: frozenset[str],
) -> Verification:
    """Hold what is recorded against what is there.

    Args:
        recorded: Name, bytes and ordinal of every recorded output.
        found: Name and bytes of every file in the folder.
        own: Names of forebay's own tables, neither outputs nor orphans.
    """
    sizes = dict(found)
    checked = 0
    missing: list[str] = []
    altered: list[tuple[str, int, int]] = []
    damaged: dict[int, None] = {}
    for name, size, ordinal in recorded:
        checked += 1
        actual = sizes.pop(name, None)
        if actual is None:
            missing.append(name)
        elif actual != size:
            altered.append((name, size, actual))
        else:
            continue
        damaged[ordinal] = None
    orphans = tuple(sorted(name for name in sizes if name not in own))
    return Verification(checked, tuple(missing), tuple(altered), orphans, tuple(damaged))
