"""Which function of a library calls: libraries ask a loader for an attribute, and not what for."""

from __future__ import annotations

import sys
from typing import Any

# Where Ray Train prepares loaders.
RAY_TRAIN = "ray.train.torch.train_loop_utils"


def library_call(module: str, function: str | None, depth: int) -> dict[str, Any] | None:
    """Return the variables of the nearest call of a library's function above the caller's caller.

    Args:
        module: How the name of the function's module begins.
        function: Its name; None for any function of such a module.
        depth: How many calls to look at; 1 for that of the caller's caller alone.

    Returns:
        Its variables by name; None if there is no such call.
    """
    frame = sys._getframe(1).f_back
    for _ in range(depth):
        if frame is None:
            break
        if function in (None, frame.f_code.co_name):
            name = frame.f_globals.get("__name__")
            if isinstance(name, str) and name.startswith(module):
                return frame.f_locals
        frame = frame.f_back
    return None
