"""The bytes of a tensor, of any stride. Does not import torch: a worker may need none."""

from __future__ import annotations

import sys
from typing import Any

_modules: dict[str, Any] = sys.modules


def tensor_bytes(tensor: Any) -> Any:
    """Return the numbers of a strided tensor, in order, as a NumPy array of bytes.

    They are a copy if the tensor has gaps, is on a device, or is the view of a conjugate.
    """
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # torch takes a tensor of one element as contiguous, whatever its stride.
    return flat.as_strided(flat.shape, (1,)).view(_modules["torch"].uint8).numpy()
