"""Private parts of torch: each is as forebay uses it, and is used in one file only.

A test that fails here names what a new version of torch changed, and what in forebay depends on it.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.data.dataloader as torchs
from torch.utils.data import (
    BatchSampler,
    DataLoader,
)

from forebay.base import torch_internals

SOURCE = Path(__file__).parents[2] / "src" / "forebay"


def parameters(function):
    return list(inspect.signature(function).parameters)


# ---- workers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 7])
def test_a_worker_is_seeded_without_reading_the_source_of_its_frames(monkeypatch, limit):
    """torch would for each kind of device: most of the time that a worker takes to start."""
    if limit is not None:
        monkeypatch.setattr(sys, "tracebacklimit", limit, raising=False)
    linecache.clearcache()
    torch_internals.seed_as_worker(3, 0)
    assert linecache.cache == {}
    assert vars(sys).get("tracebacklimit") == limit


def test_the_seed_of_numpy_in_a_worker_is_what_it_was():
    """From a base seed of 64 bits, in each version the same."""
    assert torch_internals.numpy_seed(5, 2) == [3826473080, 2527481201, 3096040404, 1091635235], (
        "torch changed _worker._generate_state: workers draw other numbers from numpy"
    )


# ---- tensors -----------------------------------------------------------------------------------


def test_storages_are_typed_and_untyped_without_a_warning():
    """Over the same bytes, in both directions; warnings are errors here."""
    tensor = torch.arange(3, dtype=torch.int16)
    typed = torch_internals.typed(tensor.untyped_storage(), torch.int16)
    assert type(typed) is torch_internals.TypedStorage, "torch changed TypedStorage"
    assert typed.dtype is torch.int16, "torch changed TypedStorage(dtype=)"
    untyped = torch_internals.untyped(typed)
    assert type(untyped) is torch_internals.UntypedStorage, "torch changed _untyped_storage"
    assert untyped.data_ptr() == tensor.data_ptr(), "torch changed TypedStorage: it copies"
    assert untyped.nbytes() == 6


def test_the_version_of_a_tensor_counts_what_is_written_to_it():
    """Through a view as well; a tensor of inference mode has none, and is not asked."""
    tensor = torch.zeros(2)
    before = torch_internals.version_of(tensor)
    tensor[0] = 1
    tensor[1:].add_(1)
    assert torch_internals.version_of(tensor) == before + 2, (
        "torch changed Tensor._version: it does not count writes"
    )
    tensor.sum()
    assert torch_internals.version_of(tensor) == before + 2, "torch changed Tensor._version"
    with torch.inference_mode():
        assert torch_internals.version_of(torch.zeros(1)) == -1


# ---- loaders and iterators ---------------------------------------------------------------------


def test_it_is_known_whether_the_profiler_is_on():
    """Then each batch is a record of its own."""
    assert torch_internals.profiler_is_on() is False, "torch changed _profiler_enabled"
    with torch.autograd.profiler.profile(use_kineto=False):
        assert torch_internals.profiler_is_on() is True, (
            "torch changed _profiler_enabled: it does not see a profiler"
        )
    assert torch_internals.profiler_is_on() is False, "torch changed _profiler_enabled"


class Iterator(torch_internals.BaseIterator):
    """As little of an iterator as forebay's has to be."""

    def _next_data(self):
        return next(self._sampler_iter)


def test_the_iterators_of_a_loader_have_one_base():
    """It is what libraries check against, and what is asked for in `_get_iterator`."""
    base = torch_internals.BaseIterator
    assert base is torchs._BaseDataLoaderIter
    assert parameters(base.__init__) == ["self", "loader"], "torch changed the base's __init__"
    assert parameters(base._reset) == ["self", "loader", "first_iter"], "torch changed _reset"
    loader = DataLoader([1, 2, 3])
    assert isinstance(loader._get_iterator(), base), "torch changed DataLoader._get_iterator"
    assert loader._iterator is None, "torch changed DataLoader._iterator"
    made = []

    class Loader(DataLoader):
        def _get_iterator(self):
            made.append(Iterator(self))
            return made[-1]

    assert iter(Loader([1])) is made[0], "torch changed iter(loader): it calls no _get_iterator"


# What forebay's iterator reads that torch's base sets.
ATTRIBUTES = {
    "_timeout": 0,
    "_pin_memory": False,
    "_num_yielded": 0,
    "_shared_seed": None,
    "_IterableDataset_len_called": None,
}


@pytest.mark.parametrize(("name", "value"), ATTRIBUTES.items(), ids=ATTRIBUTES)
def test_an_iterator_has_attributes_of_torchs_base(name, value):
    """By the names that forebay's iterator reads or writes."""
    iterator = Iterator(DataLoader([1, 2, 3]))
    missing = object()
    assert getattr(iterator, name, missing) == value, f"torch changed the iterator's {name}"


def test_torchs_base_iterates_and_counts():
    """By `_next_data` of the class above, from a new iterator over `_index_sampler`."""
    loader = DataLoader([1, 2, 3], batch_size=2)
    iterator = Iterator(loader)
    assert list(iterator) == [[0, 1], [2]], "torch changed __next__, or _sampler_iter"
    assert iterator._num_yielded == 2, "torch changed _num_yielded: it does not count batches"
    iterator._reset(loader)
    assert iterator._num_yielded == 0, "torch changed _reset: it does not restart the count"
    assert next(iterator) == [0, 1], "torch changed _reset: it does not create a new _sampler_iter"


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_loader_says_what_it_iterates_over(batch_size):
    """A property, which forebay's loader replaces and the base reads, as `len` does."""
    loader = DataLoader([1, 2, 3], batch_size=batch_size)
    expected = loader.sampler if batch_size is None else loader.batch_sampler
    assert isinstance(inspect.getattr_static(DataLoader, "_index_sampler"), property), (
        "torch changed DataLoader._index_sampler: it is no property"
    )
    assert loader._index_sampler is expected, "torch changed DataLoader._index_sampler"

    class Loader(DataLoader):
        @property
        def _index_sampler(self):
            return ["own"] * 7

    own = Loader([1, 2, 3], batch_size=batch_size)
    assert len(own) == 7, "torch changed len(loader): it does not read _index_sampler"
    assert list(Iterator(own)) == ["own"] * 7, "torch changed _sampler_iter: it is of another one"


# ---- where they are used -----------------------------------------------------------------------

HOME = "base/torch_internals.py"

# A loader and an iterator that are torch's cannot but have its names: they replace some, and read
# others. All of them are tested, above or by what a loader does.
INHERITED = {
    "columns/slicing.py": {"_indices"},  # of a Hugging Face dataset, not of a tensor
    "loader.py": {"_get_iterator", "_index_sampler", "_iterator"},
    "loading/iterators.py": {
        *("_IterableDataset_len_called", "_base_seed", "_index_sampler", "_next_data"),
        *("_num_yielded", "_pin_memory", "_reset", "_sampler_iter", "_shared_seed"),
        "_shutdown_workers",
        *("_timeout", "_workers"),
    },
}


# A class of forebay's that is torch's loader for those that inherit from it.
HEIRS = {"InspectedLoader"}


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def torchs_private_names():
    """Return the private names of torch's loaders, tensors and storages."""
    names = {"_utils", "_C"}
    data = Path(torchs.__file__).parent
    for file in [data / "dataloader.py", data / "sampler.py", *data.glob("_utils/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
    for owner in (torch.Tensor, torch.UntypedStorage, torch.TypedStorage, torch.Generator):
        names.update(dir(owner))
    return set(filter(is_private, names))


PRIVATE = torchs_private_names()


def torchs_names(tree):
    """Return the names that a file takes from torch, or from torch_internals."""
    taken = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] == "torch" or node.module.endswith("torch_internals"):
                taken.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            taken.update(
                alias.asname
                for alias in node.names
                if alias.asname and alias.name.startswith("torch.")
            )
    return taken


def private_uses(source):
    """Return the private names of torch that a file uses, with those that its classes inherit."""
    tree = ast.parse(source)
    ours = torchs_names(tree)
    bases = ours | HEIRS
    own = {
        each
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not any(_root(base) in bases for base in node.bases)
        for each in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.update(_imported(node))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            is_own = node in own and ast.unparse(node.value) in ("self", "cls")
            if _root(node) in ours or (node.attr in PRIVATE and not is_own):
                found.add(node.attr)
        elif isinstance(node, ast.ClassDef) and node not in own:
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
            found.update(each.name for each in methods if each.name in PRIVATE)
        elif isinstance(node, ast.Call) and _root(node.func) in ("getattr", "setattr", "hasattr"):
            named = (each.value for each in node.args[1:2] if isinstance(each, ast.Constant))
            found.update(set(named) & PRIVATE)
    return found


def _root(node):
    """Return the name that an expression such as `a.b.c` begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _imported(node):
    """Yield the private parts of torch that an import takes."""
    for alias in node.names:
        module = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        parts = ".".join([*module, alias.name]).split(".")
        if parts[0] == "torch":
            yield from filter(is_private, parts)


@pytest.mark.slow
def test_private_parts_of_torch_are_used_in_one_file():
    """What a loader and an iterator inherit is listed, and nothing is listed that is not used."""
    found = {
        path.relative_to(SOURCE).as_posix(): private_uses(path.read_text())
        for path in sorted(SOURCE.rglob("*.py"))
    }
    assert found.pop(HOME), "the checker does not see what torch_internals.py uses"
    assert {path: names for path, names in found.items() if names} == INHERITED


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._C", "_C"),
        ("import torch.utils.data._utils.worker as own", "_utils"),
        ("from torch.utils.data import _utils", "_utils"),
        ("from torch.utils.data._utils.collate import default_collate_fn_map", "_utils"),
        ("from torch.utils.data.dataloader import _BaseDataLoaderIter", "_BaseDataLoaderIter"),
        ("from torch.utils.data.dataloader import _DatasetKind as Kind", "_DatasetKind"),
        ("import torch\ntorch._assert_async(1)", "_assert_async"),
        ("import torch\ntorch.utils.data._utils.worker._worker_info = 1", "_worker_info"),
        ("from torch.utils import data\ndata._utils", "_utils"),
        ("def version(tensor):\n    return tensor._version", "_version"),
        ("def version(tensor):\n    return getattr(tensor, '_version')", "_version"),
        ("def seed(iterator):\n    return iterator._base_seed", "_base_seed"),
        (
            "from torch.utils.data import DataLoader\n"
            "class Own(DataLoader):\n    def _get_iterator(self): ...",
            "_get_iterator",
        ),
        (
            "from torch.utils.data import DataLoader\n"
            "class Own(DataLoader):\n    def own(self):\n        return self._dataset_kind",
            "_dataset_kind",
        ),
    ],
)
def test_the_checker_sees_private_parts(source, name):
    """However they are reached."""
    assert name in private_uses(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.utils.data.DataLoader.__init__",
        "from torch.utils.data import default_collate as _collate\n_collate([1])",
        "class Own:\n    def __init__(self):\n        self._workers = self._version = 1",
        "from forebay.base.torch_internals import version_of\nversion_of(1)",
        "from ray import _private",
    ],
)
def test_the_checker_lets_all_else_pass(source):
    """Public parts, names of one's own, and other libraries."""
    assert private_uses(source) == set()


def test_an_iterator_of_torchs_batch_sampler_says_whether_it_was_read():
    """It is a generator, whose state and code can be asked; another iterator is never unread."""
    sampler = BatchSampler(range(6), 2, drop_last=False)
    iterator = iter(sampler)
    assert torch_internals.is_unread(iterator), "torch changed BatchSampler.__iter__"
    next(iterator)
    assert not torch_internals.is_unread(iterator), "torch changed BatchSampler.__iter__"
    others = [iter([[1]]), (each for each in sampler), None]
    assert not any(map(torch_internals.is_unread, others))


def test_the_init_of_torchs_loader_is_found_behind_wrappers():
    """Those that Lightning puts there while it calls a hook."""
    init = DataLoader.__init__
    assert torch_internals.torch_init() is init

    scope = {"__name__": "lightning.fabric.utilities.data", "inner": init}
    exec("def wrapped(self, *a, **o): return inner(self, *a, **o)", scope)
    wrapped = scope["wrapped"]
    wrapped.__wrapped__ = init
    DataLoader.__init__ = wrapped
    try:
        assert torch_internals.torch_init() is init
    finally:
        DataLoader.__init__ = init
