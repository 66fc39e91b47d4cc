"""What a type checker finds in a user's code: as much as with torch's DataLoader, and as little.

Each sample below is a program of a user. A comment at the end of a line says what the checker must
print about it: the type that `reveal_type` shows, or a part of an error. Other lines must be free
of errors.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

import forebay

pytestmark = pytest.mark.full

HEAD = """
from collections.abc import Iterator
from typing import Any
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, random_split

class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 4
    def __getitem__(self, index: int) -> int:
        return index

class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

def collate(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples)

def initialize(worker_id: int) -> None: ...

dataset = Numbers()
"""

# The same lines for torch's DataLoader and for forebay's; the import comes before them.
DROP_IN = """
loader = DataLoader(dataset, batch_size=4)
reveal_type(loader)  # DataLoader[int]
reveal_type(DataLoader(Stream(), batch_size=None))  # DataLoader[int]
reveal_type(DataLoader(TensorDataset(torch.zeros(2)), 2, True))  # Tensor, ...]]
reveal_type(DataLoader(Subset(dataset, [0])))  # DataLoader[int]
reveal_type(DataLoader(random_split(dataset, [2, 2])[0]))  # DataLoader[int]
for batch in loader:
    reveal_type(batch)  # "Any"
reveal_type(len(loader))  # "int"
reveal_type(loader.dataset)  # Dataset[int]
DataLoader(dataset, sampler=RandomSampler(dataset))
DataLoader(dataset, sampler=DistributedSampler(dataset))
DataLoader(dataset, sampler=[0, 1])
DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 2, False))
DataLoader(dataset, batch_sampler=[[0], [1]])
DataLoader(dataset, collate_fn=collate, worker_init_fn=initialize, timeout=1.5, in_order=False)
DataLoader(dataset, generator=torch.Generator(), multiprocessing_context="fork")
DataLoader(dataset, num_workers=1, prefetch_factor=2, persistent_workers=True, pin_memory=True)
DataLoader([1, 2, 3])  # error: Argument
DataLoader(dataset, batch_size="4")  # error: Argument
DataLoader(dataset, shuffel=True)  # error: .*shuffel
annotated: DataLoader[int] = loader
wider: DataLoader[object] = loader
wrong: DataLoader[str] = loader  # error: .*DataLoader\\[str\\]
class Mine(DataLoader[int]): ...
reveal_type(Mine(dataset))  # Mine
def train(batches: DataLoader[Any]) -> None: ...
train(loader)
"""

OWN = """
import forebay
from forebay import Failure, MixedDataset, PredictionReport, Statistics

loader = forebay.DataLoader(dataset, batch_size=4)
stock: torch.utils.data.DataLoader[int] = loader
forebay.DataLoader(dataset, backend="thread", tail="uneven", on_error="skip", world_size="auto")
forebay.DataLoader(dataset, seed=1, num_workers=1, buffer="3GB")
forebay.DataLoader(dataset, buffer=forebay.Buffer(max_bytes=3), backend=forebay.Ray(num_cpus=1))
forebay.DataLoader(dataset, backend="proces")  # error: Argument
forebay.DataLoader(dataset, tail="repeated")  # error: Argument
forebay.DataLoader(dataset, on_error="ignore")  # error: Argument
forebay.DataLoader(dataset, world_size="all")  # error: Argument
with forebay.DataLoader(dataset) as same:
    reveal_type(same)  # DataLoader[int]
mixture: MixedDataset = forebay.mix({"a": (dataset, 0.5), "b": (dataset, 0.5)})
reveal_type(forebay.DataLoader(mixture))  # DataLoader[Any]
statistics: Statistics = loader.statistics()
failures: list[Failure] = loader.failures
mask: torch.Tensor = loader.mask
epoch: int = loader.epoch
state: dict[str, Any] = loader.state_dict()
loader.load_state_dict(state)
def look(report: PredictionReport) -> None: ...
forebay.Dataloader  # error: .*[Aa]ttribute
"""


PROGRAMS = {
    "torch": f"{HEAD}\nfrom torch.utils.data import DataLoader\n{DROP_IN}",
    "forebay": f"{HEAD}\nfrom forebay import DataLoader\n{DROP_IN}",
    "own": HEAD + OWN,
}
COMMANDS = {
    "mypy": ("mypy", "--config-file", "mypy.ini", "--cache-dir"),
    "pyright": ("pyright", "--pythonpath", sys.executable),
}
# mypy reads every module that is imported anywhere. What it prints about these programs does not
# depend on these, which take five sixths of its time: all of Ray and most of torch, above all.
CONFIG = """
[mypy]
strict = True
[mypy-torch.*,ray.*,polars.*,numpy.*,pandas.*,obstore.*]
follow_imports = skip
[mypy-torch,torch._C,torch._tensor,torch.types,torch.utils.data.*]
follow_imports = normal
"""

# By the name of the program: what a checker prints, by the number of the line.
Found = dict[str, dict[int, str]]


@pytest.fixture(scope="module", params=["mypy", "pyright"])
def found(request, tmp_path_factory) -> Found:
    """Check all programs at once: reading annotations takes most of the time."""
    checker = request.param
    if find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    if checker == "pyright" and shutil.which("node") is None:
        pytest.skip("pyright would download node")
    folder = tmp_path_factory.mktemp(checker)
    for name, code in PROGRAMS.items():
        (folder / f"{name}_user.py").write_text(code, encoding="utf-8")
    (folder / "mypy.ini").write_text(CONFIG, encoding="utf-8")
    command = [sys.executable, "-m", *COMMANDS[checker]]
    if checker == "mypy":
        cache = getattr(request.config, "cache", None)
        command.append(str(folder if cache is None else cache.mkdir("mypy")))
    done = subprocess.run(
        [*command, *(f"{name}_user.py" for name in PROGRAMS)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode in (0, 1), f"{done.stdout}\n{done.stderr}"
    printed: Found = {name: {} for name in PROGRAMS}
    messages = re.findall(r"(\w+)_user\.py:(\d+):(.*(?:\n    .*)*)", done.stdout)
    assert messages, f"{done.stdout}\n{done.stderr}"
    for name, number, message in messages:
        lines = printed[name]
        lines[int(number)] = lines.get(int(number), "") + message
    return printed


def differences(code: str, found: dict[int, str]) -> list[str]:
    """Return the lines about which a checker does not print what their comments say."""
    wrong = []
    for number, line in enumerate(code.splitlines(), 1):
        text, _, comment = line.partition("  # ")
        printed = found.get(number, "")
        if not comment:
            is_right = "error" not in printed
        elif comment.startswith("error"):
            is_right = re.search(comment.partition(":")[2].strip(), printed) is not None
            is_right = is_right and "error" in printed
        else:
            is_right = comment.strip('"') in printed and "error" not in printed
        if not is_right:
            wrong.append(f"{number}: {text}\n    expected: {comment or 'no error'}\n    {printed}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "forebay"])
def test_a_user_of_torchs_loader_sees_the_same_types_with_forebays(name, found):
    """Of both classes a checker accepts the same lines, refuses the same and infers the same."""
    assert differences(PROGRAMS[name], found[name]) == []


@pytest.mark.slow
def test_an_impossible_option_is_found_before_the_program_runs(found):
    """Options are literals, public names have types, and a misspelled name is an error."""
    assert differences(PROGRAMS["own"], found["own"]) == []


def test_a_loader_can_be_annotated_at_run_time():
    """`DataLoader[int]` is an expression, as an annotation that is evaluated needs it."""
    assert forebay.DataLoader[int].__origin__ is forebay.DataLoader
    assert forebay.DataLoader[Any].__args__ == (Any,)


def test_public_names_can_be_imported():
    """Every name of `__all__` is there, so that annotations can use it."""
    assert all(getattr(forebay, name) is not None for name in forebay.__all__)


# ---- the tests of the tests ---------------------------------------------------------------------


def test_a_difference_is_found():
    """A type that is not the expected one, an error too many and one too few are reported."""
    code = "a  # DataLoader[int]\nb\nc  # error: Argument"
    found = {1: "note: DataLoader[str]", 2: "error: bad"}
    assert [line.partition(":")[0] for line in differences(code, found)] == ["1", "2", "3"]
    right = {1: "note: DataLoader[int]", 2: "note: b", 3: "error: Argument 1"}
    assert differences(code, right) == []
