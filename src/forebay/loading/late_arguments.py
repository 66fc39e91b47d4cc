"""Arguments that a loader gets after it was made, from a library that prepares it."""

from __future__ import annotations

from typing import Any

from forebay.errors import OptionError
from forebay.loading.kinds import check_arguments
from forebay.ranks import Ranks


def check_ranks(loader: Any, ranks: Ranks, library: str) -> None:
    """Refuse a loader that was made for other ranks than those of a library."""
    own = loader._ranks
    if own is not None and own != ranks:
        raise OptionError(
            "the loader was made for rank {1} of {0}, and this is process {3} of {2} of "
            "{4}\n"
            "  Nothing was prepared. Make it without world_size=, which {4} sets.".format(
                *own, *ranks, library
            )
        )


def values_of_ranks(loader: Any, ranks: Ranks) -> dict[str, Any]:
    """Return the arguments that divide a loader among ranks; none if it is divided, or alone."""
    if ranks.world_size == 1 or loader._ranks is not None:
        return {}
    return {**ranks._asdict(), "seed": 0 if loader.seed is None else loader.seed}


def set_arguments(loader: Any, values: dict[str, Any]) -> None:
    """Change arguments of a loader, which stays where it is; or refuse them, and change none."""
    progress = loader._loader_progress
    has_begun = progress.pipeline is not None or progress.resumed is not None
    state, before = loader.state_dict() if has_begun else None, dict(vars(loader))
    vars(loader).update(values)
    try:
        check_arguments(loader._kind())
        if state is not None:
            loader.load_state_dict(state)
    except BaseException:
        vars(loader).clear()
        vars(loader).update(before)
        raise
