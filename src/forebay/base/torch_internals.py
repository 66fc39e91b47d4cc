"""All private parts of torch that forebay uses, and which function of a library calls.

Each of them has a test in `tests/base/test_torch_internals.py` that fails, and says why, when a new
version of torch changes it.
"""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy.random  # numpy itself imports it when it is first used, which would be in each worker
import torch
import torch.utils.data._utils.worker as _worker
from torch._C._autograd import _profiler_enabled
from torch._utils import ExceptionWrapper
from torch.storage import TypedStorage, UntypedStorage
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data._utils.collate import default_collate, default_collate_fn_map
from torch.utils.data.dataloader import _BaseDataLoaderIter

from forebay.errors import OptionError, without_credentials, without_middle

__all__ = ["TypedStorage", "UntypedStorage"]

# Where Ray Train prepares loaders.
RAY_TRAIN = "ray.train.torch.train_loop_utils"

# The class that libraries expect an iterator of a DataLoader to have.
BaseIterator: Any = _BaseDataLoaderIter


# Whether torch's profiler is on, which records each batch.
profiler_is_on: Callable[[], bool] = _profiler_enabled


class _AskedInfo(_worker.WorkerInfo):
    """A WorkerInfo that records whether it was asked which of how many workers this is."""

    __slots__ = ()
    was_asked = seed_is_current = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("id", "num_workers"):
            _AskedInfo.was_asked = True
        if name == "seed" and _AskedInfo.seed_is_current:
            return torch.initial_seed()
        return super().__getattribute__(name)


def set_worker_info(
    worker_id: int, num_workers: int, seed: int, dataset: Any, *, seed_is_current: bool = False
) -> None:
    """Make `torch.utils.data.get_worker_info()` describe this process as a worker.

    Args:
        seed_is_current: Whether its seed is that of the sample that is made.
    """
    info: Any = _AskedInfo
    # Of this worker, not of a process that it was forked from.
    info.was_asked, info.seed_is_current = False, seed_is_current
    _worker._worker_info = info(id=worker_id, num_workers=num_workers, seed=seed, dataset=dataset)


def set_worker_seed(seed: int) -> None:
    """Make `get_worker_info().seed` that of an epoch, in a worker."""
    if (info := _worker._worker_info) is not None:
        object.__setattr__(info, "seed", seed)


def asked_for_worker() -> bool:
    """Return whether any code of this worker asked which of how many workers it is."""
    return _AskedInfo.was_asked


def wrapped_error(error: BaseException, where: str) -> Any:
    """Wrap an exception so that another process can raise it, with its traceback as a string.

    It is raised with the same class; or with the nearest base class, if that class cannot be
    pickled by name, or cannot be created from a message and shown.
    """
    wrapper: Any = ExceptionWrapper
    made = wrapper((type(error), error, error.__traceback__), where=where)
    made.exc_msg = without_middle(without_credentials(made.exc_msg))
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
    """Return the seed that torch gives to numpy's generator of a worker."""
    generate: Any = _worker._generate_state
    return generate(base_seed, worker_id)


def replace_tensor_collation(
    replace: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[[], None]:
    """Replace the function with which default_collate stacks tensors, unless it is the user's."""
    original = default_collate_fn_map[torch.Tensor]
    if original.__module__ != default_collate.__module__:
        return lambda: None
    default_collate_fn_map[torch.Tensor] = replace(original)

    def undo() -> None:
        default_collate_fn_map[torch.Tensor] = original

    return undo


def collates_as_usual() -> bool:
    """Return whether default_collate does with numbers, tensors, arrays and containers as it came.

    Users register functions of their own in torch's `default_collate_fn_map`.
    """
    for kinds, function in list(default_collate_fn_map.items()):
        if function.__module__ == default_collate.__module__:
            continue
        if function.__module__.startswith("forebay."):  # in a worker: with the same result
            continue
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if any(kind.__module__ in ("builtins", "numpy", "torch") for kind in kinds):
            return False
    return True


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a COO tensor, coalesced or not."""
    return tensor._indices(), tensor._values()


def quantized(numbers: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Return a quantized tensor with the given stored numbers."""
    return torch._make_per_tensor_quantized_tensor(numbers, scale, zero_point)


def untyped(storage: TypedStorage) -> UntypedStorage:
    """Return the bytes of a typed storage, without torch's deprecation warning."""
    return storage._untyped_storage


def typed(storage: UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    """Return a typed storage over bytes, without torch's deprecation warning."""
    kind: Any = TypedStorage
    whole: TypedStorage = kind(wrap_storage=storage, dtype=dtype, _internal=True)
    return whole


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to in place; -1 for inference tensors."""
    return -1 if tensor.is_inference() else tensor._version


def torch_init() -> Any:
    """Return the original `torch.utils.data.DataLoader.__init__`.

    While Lightning calls a hook, it replaces the `__init__` of every loader class with one that
    records the arguments, to create the loader again. If forebay is first imported in that hook,
    the replacement of torch's `__init__` would record the arguments that forebay passes to torch.
    """
    init: Any = DataLoader.__init__
    while "lightning" in getattr(init, "__globals__", {}).get("__name__", ""):
        init = init.__wrapped__
    return init


def library_call(
    module: str | tuple[str, ...], function: str | None, depth: int
) -> dict[str, Any] | None:
    """Return the variables of the nearest call of a library's function above the caller's caller.

    Args:
        module: How the name of the function's module begins; or several such beginnings.
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


def lightning_is_imported() -> bool:
    """Return whether the program has imported Lightning, which has two names."""
    return "lightning.pytorch" in sys.modules or "pytorch_lightning" in sys.modules


def refuse_stock_loader() -> None:
    """Raise an error if a plain torch DataLoader iterates a sampler of forebay, which calls it."""
    found = library_call("torch.utils.data.dataloader", None, 8)
    if found is None or type(found.get("self")).__module__.startswith("forebay."):
        return
    raise OptionError(
        "a plain torch DataLoader was made with the sampler of a forebay.DataLoader, so "
        "buffer=, seed=, world_size= and the state would be lost\n"
        "  No batch was returned. With transformers, call forebay.use(trainer); with "
        "Accelerate, pass the loader to accelerator.prepare() and no other function; "
        "otherwise use world_size='auto' and do not hand the loader to the library's "
        "prepare() (docs/how-to/frameworks.md)."
    )


def is_unread(iterator: Any) -> bool:
    """Return whether an iterator is that of torch's BatchSampler, and has yielded nothing."""
    code = getattr(iterator, "gi_code", None)
    is_torchs = code is BatchSampler.__iter__.__code__
    return is_torchs and inspect.getgeneratorstate(iterator) == inspect.GEN_CREATED


def seed_as_worker(base_seed: int, worker_id: int, *, with_devices: bool = True) -> int:
    """Seed all generators as torch does in its own workers; return the seed.

    Args:
        with_devices: Whether those of devices are seeded, too.
    """
    import random

    seed = base_seed + worker_id
    random.seed(seed)
    if with_devices:
        with _short_stacks():
            torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    numpy.random.seed(numpy_seed(base_seed, worker_id))
    return seed


@contextmanager
def _short_stacks() -> Iterator[None]:
    """Have nobody read the source of the frames of a stack.

    torch does where it seeds a device that was not used yet: for its message if the device cannot
    be used later, which then has no stack. Each worker would read it again, of the trainer's frames
    below its own, too.
    """
    limit = vars(sys).get("tracebacklimit")
    sys.tracebacklimit = 0
    try:
        yield
    finally:
        if limit is None:
            del sys.tracebacklimit
        else:
            sys.tracebacklimit = limit
