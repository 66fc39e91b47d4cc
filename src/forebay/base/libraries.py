"""What is set in other libraries in a worker: one thread each, and a heap that keeps memory."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NamedTuple

from forebay.base.machine import read_proc

# ---- import hooks --------------------------------------------------------------------------------
# Call functions when user code imports a library, which may be long after a worker began.

Call = Callable[[Any], object]


class _Finder:
    """Finds the libraries that are waited for, and calls the functions after the import."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Call]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.calls:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            for call in self.calls.get(name, ()):
                call(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def after_import(name: str, call: Call) -> None:
    """Call a function with a module each time that it is imported for the first time."""
    calls = _finder.calls.setdefault(name, [])
    if call not in calls:
        calls.append(call)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def not_after_import(name: str, call: Call) -> None:
    """Undo `after_import`."""
    calls = _finder.calls.get(name, [])
    if call in calls:
        calls.remove(call)
    if not calls:
        _finder.calls.pop(name, None)
    if not _finder.calls and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


# ---- library threads -----------------------------------------------------------------------------
# One thread for each library in a worker: as many workers as cores use all the cores already.
#
#     inherited by a fork      `one_thread()` around the fork: the libraries' own functions
#     imported later           variables of the environment, and functions after the import
#     num_workers=0, seed      `one_thread()`: the results of BLAS depend on the number of threads
#
# What the user set in the environment is kept. It is always one thread, not a share of the cores: a
# batch must not depend on the number of workers.

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


# For the module of a library: its functions. BLAS and OpenMP have no module: see `_SHARED`.
_FUNCTIONS: dict[str, Callable[[Any], _Threads]] = {
    "torch": lambda torch: _Threads(torch.get_num_threads, torch.set_num_threads),
    "cv2": lambda cv2: _Threads(cv2.getNumThreads, cv2.setNumThreads),
    "pyarrow": lambda pyarrow: _Threads(pyarrow.cpu_count, pyarrow.set_cpu_count),
    "numexpr": lambda numexpr: _Threads(lambda: numexpr.nthreads, numexpr.set_num_threads),
}


class _Shared(NamedTuple):
    """A shared library that computes in threads."""

    name: str
    files: tuple[str, ...]
    get: str
    set: str


# Around the names of functions: none, or those of builds of OpenBLAS.
_AFFIXES = tuple((before, after) for before in ("", "scipy_") for after in ("", "64_", "_64"))
_SHARED = (
    _Shared(
        "openblas",
        ("libopenblas", "libscipy_openblas"),
        "openblas_get_num_threads",
        "openblas_set_num_threads",
    ),
    _Shared("mkl", ("libmkl_rt",), "MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
    _Shared("blis", ("libblis",), "bli_thread_get_num_threads", "bli_thread_set_num_threads"),
    _Shared(
        "flexiblas", ("libflexiblas",), "flexiblas_get_num_threads", "flexiblas_set_num_threads"
    ),
    _Shared(
        "openmp", ("libgomp", "libomp", "libiomp"), "omp_get_max_threads", "omp_set_num_threads"
    ),
)
# The name of such a file in a path.
_FILE = re.compile(
    b"/(?:%b)[^/\n]*(?=\n)" % "|".join(name for each in _SHARED for name in each.files).encode()
)
# What `openblas_get_parallel` returns for a build whose threads are those of OpenMP.
_BY_OPENMP = 2


def use_one_thread(*, is_limited: bool) -> None:
    """Let the libraries of this worker process use one thread each.

    Call it before the user's code is imported.
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
    """Yield the libraries that this process has loaded, but not those the user chose for."""
    for name, functions in _FUNCTIONS.items():
        module = _modules.get(name)
        # torch in any case: a fork waits for ever for threads that only its parent has.
        if module is not None and (name == "torch" or not _is_chosen(name, chosen)):
            try:
                yield functions(module)
            except AttributeError:  # its import is not complete
                continue
    for path in _shared_files():
        if (threads := _threads_of(path, chosen)) is not None:
            yield threads


def _shared_files() -> list[str]:
    """Return the files of shared libraries in this process that compute in threads.

    Source: proc_pid_maps(5). Reading it takes half a millisecond in a process with torch; asking
    the dynamic linker instead could wait for ever for its lock.
    """
    try:
        maps = read_proc("self/maps", None)
    except OSError:  # not Linux: what the worker's environment says must do
        return []
    found = set()
    for name in _FILE.finditer(maps):
        line = maps.rfind(b"\n", 0, name.start()) + 1
        found.add(os.fsdecode(maps[maps.index(b"/", line) : name.end()]))
    return sorted(found)


def _threads_of(path: str, chosen: frozenset[str]) -> _Threads | None:
    """Return the functions of a shared library; None if it has none, or the user chose for it."""
    file = os.path.basename(path)
    shared = next(each for each in _SHARED if file.startswith(each.files))
    if _is_chosen(shared.name, chosen):
        return None
    try:
        library = ctypes.CDLL(path, os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:  # its file was replaced
        return None
    for before, after in _AFFIXES:
        if hasattr(library, f"{before}{shared.set}{after}"):
            parallel = getattr(library, f"{before}openblas_get_parallel{after}", None)
            if parallel is not None and parallel() == _BY_OPENMP:
                return None  # it has as many threads as OpenMP
            set_count = getattr(library, f"{before}{shared.set}{after}")
            if shared.name == "openblas":
                set_count = _without_starting(library, set_count)
            return _Threads(getattr(library, f"{before}{shared.get}{after}"), set_count)
    return None


def _without_starting(
    library: ctypes.CDLL, set_count: Callable[[int], object]
) -> Callable[[int], object]:
    """Return a function that sets OpenBLAS's number of threads, if possible without starting any.

    A fork ends OpenBLAS's threads. The next product of matrices starts them again, and so does
    setting their number; then each waits for work for 0.1 s of processor time, which every start of
    workers would take from their first batches. The number is in a variable of the library.
    """
    try:
        count = ctypes.c_int.in_dll(library, "blas_cpu_number")
    except ValueError:  # not exported, as of OpenBLAS 0.3.34, which NumPy 2.5 comes with
        return set_count
    return functools.partial(setattr, count, "value")


# The libraries of this process, and how many modules there were when they were looked for.
_known: tuple[int, list[_Threads]] = (0, [])


@contextmanager
def one_thread() -> Iterator[None]:
    """Let the libraries of this process use one thread in the block, as those of a worker do.

    A process that is forked in the block keeps it so.
    """
    global _known  # noqa: PLW0603 - finding them takes a millisecond
    modules, found = _known
    if len(_modules) != modules:  # any of them may have loaded a library
        modules, found = len(_modules), list(_loaded(frozenset(os.environ)))
        _known = modules, found
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


# ---- heap ----------------------------------------------------------------------------------------
# Tune the C library's heap for a worker that allocates similar objects again and again.

# mallopt(3) constants; glibc's maximum mmap threshold.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_IN_HEAP = 32 << 20
_KEPT = 256 << 20


def keep_freed() -> None:
    """Make this process keep up to 256 MiB of freed heap memory for later allocations.

    glibc gives the pages of a freed image back to the system and takes new ones for the next image,
    which the system has to clear first: with JPEGs of 500x400 that is a tenth of a worker's time.
    Other C libraries are not changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
