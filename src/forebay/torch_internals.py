"""Every part of torch that forebay uses and torch does not promise, in one place.

Each of them has a test in `tests/test_torch_internals.py` that fails, with a sentence, when a new
version of torch changes it.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.utils.data._utils.worker as _worker
from torch._C._autograd import _profiler_enabled
from torch._utils import ExceptionWrapper
from torch.storage import TypedStorage, UntypedStorage
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data.dataloader import _BaseDataLoaderIter

from forebay.failures import without_middle

__all__ = ["TypedStorage", "UntypedStorage"]

# What libraries check an iterator of a DataLoader against.
BaseIterator: Any = _BaseDataLoaderIter


# Whether somebody profiles this process, for whom each batch is a record of its own.
profiler_is_on: Callable[[], bool] = _profiler_enabled


def become_worker(worker_id: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Have `torch.utils.data.get_worker_info()` describe this process as a worker."""
    info: Any = _worker.WorkerInfo
    _worker._worker_info = info(id=worker_id, num_workers=num_workers, seed=seed, dataset=dataset)


def wrapped(error: BaseException, where: str) -> Any:
    """Return what raises an exception again, with its traceback as text, in another process.

    It raises one of the same class; or of the nearest base class, if that class has no name that
    `pickle` finds, or cannot be made of a message and shown.

    Args:
        error: The exception.
        where: In which worker it was raised, for the message.
    """
    wrapper: Any = ExceptionWrapper
    made = wrapper((type(error), error, error.__traceback__), where=where)
    made.exc_msg = without_middle(made.exc_msg)
    for kind in type(error).__mro__:
        made.exc_type = kind
        if _can_be_raised(made):
            break
    return made


def _can_be_raised(wrapper: Any) -> bool:
    try:
        pickle.dumps(wrapper.exc_type)
        wrapper.reraise()
    except Exception as error:  # noqa: BLE001 - whatever the user's class raises
        # If the class takes other arguments, torch itself raises a RuntimeError.
        is_made = type(error) in (wrapper.exc_type, RuntimeError)
        with suppress(Exception):
            return is_made and bool(str(error))
    return False


def numpy_seed(base_seed: int, worker_id: int) -> Any:
    """Return what torch seeds numpy's generator of a worker with."""
    generate: Any = _worker._generate_state
    return generate(base_seed, worker_id)


def replace_tensor_collation(
    replace: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[[], None]:
    """Put another function in the place of the one by which default_collate stacks tensors.

    Args:
        replace: Called with torch's function; returns the other one.

    Returns:
        A function that undoes it.
    """
    original = default_collate_fn_map[torch.Tensor]
    default_collate_fn_map[torch.Tensor] = replace(original)

    def undo() -> None:
        default_collate_fn_map[torch.Tensor] = original

    return undo


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a COO tensor, coalesced or not."""
    return tensor._indices(), tensor._values()


def quantized(numbers: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Return a quantized tensor of its stored numbers."""
    return torch._make_per_tensor_quantized_tensor(numbers, scale, zero_point)


def untyped(storage: TypedStorage) -> UntypedStorage:
    """Return the bytes of a typed storage, without the warning that it is deprecated."""
    return storage._untyped_storage


def typed(storage: UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    """Return a typed storage over bytes, likewise."""
    kind: Any = TypedStorage
    whole: TypedStorage = kind(wrap_storage=storage, dtype=dtype, _internal=True)
    return whole


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to in place."""
    return -1 if tensor.is_inference() else tensor._version


def accepts(argument: str) -> bool:
    """Tell whether the installed torch's DataLoader has an argument."""
    return argument in inspect.signature(DataLoader.__init__).parameters


def seed_as_worker(base_seed: int, worker_id: int) -> int:
    """Seed all generators of a worker as torch seeds those of its own; return the seed."""
    import random

    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(numpy_seed(base_seed, worker_id))
    return seed
