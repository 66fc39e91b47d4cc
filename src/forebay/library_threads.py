"""One thread for each library in a worker: as many workers as cores use all the cores already.

    inherited by a fork      `one_thread()` around the fork: threadpoolctl, and their own functions
    imported later           variables of the environment, and functions after the import
    num_workers=0, seed      `one_thread()`: the results of BLAS depend on the number of threads

What the user set in the environment is kept. It is always one thread, not a share of the cores: a
batch must not depend on the number of workers.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from forebay.import_hooks import after_import

# Libraries follow the variable of OpenMP if their own is not set. They read it when they are
# loaded.
_OPENMP = "OMP_NUM_THREADS"
_OWN = {
    "openblas": "OPENBLAS_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
    "numexpr": "NUMEXPR_NUM_THREADS",
    "numba": "NUMBA_NUM_THREADS",
    "torch": "MKL_NUM_THREADS",
    "pyarrow": _OPENMP,
}
# These do not follow it.
_ALONE = {
    "polars": "POLARS_MAX_THREADS",
    "rayon": "RAYON_NUM_THREADS",
    "cv2": "OPENCV_FOR_THREADS_NUM",
}
_TOKENIZERS = "TOKENIZERS_PARALLELISM"

_modules: dict[str, Any] = sys.modules


class _Threads(NamedTuple):
    """How to read and set the number of threads of a library."""

    get: Callable[[], int]
    set: Callable[[int], object]


# For the module of a library: its functions. Those of BLAS and OpenMP are found by threadpoolctl.
_FUNCTIONS: dict[str, Callable[[Any], _Threads]] = {
    "torch": lambda torch: _Threads(torch.get_num_threads, torch.set_num_threads),
    "cv2": lambda cv2: _Threads(cv2.getNumThreads, cv2.setNumThreads),
    "pyarrow": lambda pyarrow: _Threads(pyarrow.cpu_count, pyarrow.set_cpu_count),
    "numexpr": lambda numexpr: _Threads(lambda: numexpr.nthreads, numexpr.set_num_threads),
}


def use_one_thread(*, is_limited: bool) -> None:
    """Let the libraries of this worker process use one thread each.

    Call it before the user's code is imported.

    Args:
        is_limited: This process is a fork, made within `one_thread`. Its libraries use one thread,
            and may not be asked for that: OpenCV would wait for threads that only the parent has.
    """
    chosen = frozenset(os.environ)
    if not is_limited:
        for threads in _loaded(chosen):
            threads.set(1)
    for name in _FUNCTIONS:
        if name not in _modules and not _is_chosen(name, chosen):
            after_import(name, functools.partial(_use_one, name))
    if _OPENMP not in chosen:
        for name, variable in _OWN.items():
            if not (name == "numba" and name in _modules):  # it refuses a change later
                os.environ.setdefault(variable, "1")
    for variable in _ALONE.values():
        os.environ.setdefault(variable, "1")
    os.environ.setdefault(_TOKENIZERS, "false")


def _is_chosen(name: str, chosen: frozenset[str]) -> bool:
    """Return whether the user set the number of threads of a library."""
    if name in _ALONE:
        return _ALONE[name] in chosen
    return _OPENMP in chosen or _OWN.get(name, _OPENMP) in chosen


def _use_one(name: str, module: Any) -> None:
    _FUNCTIONS[name](module).set(1)


def _loaded(chosen: frozenset[str]) -> Iterator[_Threads]:
    """Yield the libraries that this process has loaded, but not those the user chose for.

    torch has one thread in any case: a fork waits for ever for those that only its parent has.
    """
    for name, functions in _FUNCTIONS.items():
        module = _modules.get(name)
        if module is not None and (name == "torch" or not _is_chosen(name, chosen)):
            try:
                yield functions(module)
            except AttributeError:  # its import is not complete
                continue
    if "numpy" in _modules or "torch" in _modules:  # what else loads BLAS imports one of them
        from threadpoolctl import ThreadpoolController  # only where it is needed: it takes 5 ms

        for library in ThreadpoolController().lib_controllers:
            if not _is_chosen(library.internal_api, chosen):
                yield _Threads(library.get_num_threads, library.set_num_threads)


# The libraries of this process; and how many modules, and extensions, there were when they were
# looked for.
_known: tuple[int, int, list[_Threads]] = (0, 0, [])


def _extensions() -> int:
    """Return how many modules in machine code are imported, and libraries with own functions."""
    known = (each for each in list(_modules.values()) if isinstance(each, ModuleType))
    files = (each.__dict__.get("__file__") for each in known)
    extensions = sum(isinstance(file, str) and file.endswith(".so") for file in files)
    # OpenCV takes its extension out of sys.modules and leaves a package of Python files there.
    return extensions + sum(name in _modules for name in _FUNCTIONS)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let the libraries of this process use one thread in the block, as those of a worker do.

    A process that is forked in the block keeps it so.
    """
    global _known  # noqa: PLW0603 - finding them takes 10 ms
    modules, extensions, found = _known
    if len(_modules) != modules:
        modules, extensions = len(_modules), _extensions()
        if extensions != _known[1]:  # any of them may have loaded a library
            found = list(_loaded(frozenset(os.environ)))
        _known = modules, extensions, found
    process = os.getpid()
    changed = [(each, count) for each in found if (count := each.get()) != 1]
    for each, _ in changed:
        each.set(1)
    try:
        yield
    finally:
        if os.getpid() == process:
            for each, count in changed:
                each.set(count)
