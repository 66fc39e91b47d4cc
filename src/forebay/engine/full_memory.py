"""What to say when memory runs out because of the results that wait to be consumed.

Loaded only when there is something to say.
"""

from __future__ import annotations

import warnings

from forebay.base.formatting import byte_size
from forebay.engine.commands import LowerHighMark


def warn_of_full_memory(found: LowerHighMark) -> None:
    """Warn that a buffer is too large for the memory, and that less is buffered from now on."""
    did = (
        f"No batch failed and none is lost: at most {byte_size(found.most)} of batches are "
        "buffered from now on, and no worker starts until the rest was taken."
    )
    warnings.warn(full_memory(found, did), RuntimeWarning, stacklevel=2)


def full_memory(found: LowerHighMark, did: str) -> str:
    """Return the message.

    Args:
        did: What forebay did, as a sentence.
    """
    return (
        f"memory ran out, and a worker was killed: batches that are ready or in use take "
        f"{byte_size(found.held)} of the {byte_size(found.memory)} that this program may use\n"
        f"  {did}\n"
        f'  Set a smaller buffer, such as buffer="{found.most >> 20}MiB", or with directory= one '
        "on a disk; lower num_workers or prefetch_factor; or raise the limit of the container or "
        "job (memory.max, --memory, --mem)."
    )
