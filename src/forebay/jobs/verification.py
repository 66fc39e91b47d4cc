"""Compare an output folder with its ledger, for `forebay verify`. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of checking every output.

    Attributes:
        checked: Number of recorded outputs.
        missing: Names that are recorded but do not exist.
        altered: Name, recorded size and actual size in bytes.
        orphans: Names of files that are not recorded.
        damaged: Ordinals of the inputs with missing or altered outputs.
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
    """Compare the recorded outputs with the files in the folder.

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
