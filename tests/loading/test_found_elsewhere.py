"""What other people's code does to loaders, and what was found by running it."""

from __future__ import annotations

import inspect
import os
import pickle
import pydoc
import re
import signal
import subprocess
import sys
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Squares, Stream
from streams import until
from torch.utils.data import BatchSampler, Dataset, DistributedSampler
from torch.utils.data import DataLoader as TorchDataLoader

import forebay
from forebay import Buffer, DataLoader, OptionError
from forebay.buffer import buffer_of
from forebay.ranks import Ranks

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# ---- a worker's death ---------------------------------------------------------------------------

# What programs look for in torch's message.
TORCHS_WORDS = r"^DataLoader worker \(pid\(s\) (\d+)\) exited unexpectedly"


def be_killed():
    """End this process as the system does that runs out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def crash():
    """End this process as a faulty library does."""
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


DEATHS = {
    "SIGKILL": (be_killed, r"is killed by signal: Killed"),
    "SIGSEGV": (crash, r"is killed by signal: Segmentation fault"),
    "os._exit": (lambda: os._exit(7), r"exited with code 7"),
}

WAYS = {
    "torch's": {},
    "persistent": {"persistent_workers": True},
    "seed": {"seed": 1},
    "buffer": {"buffer": "1MB"},
}


class Dying(Squares):
    """Samples of which number 2 ends its worker, which writes down its process ID first."""

    def __init__(self, die, folder):
        super().__init__(5)
        self.die, self.folder = die, folder

    def __getitem__(self, index):
        if index == 2:
            (self.folder / str(os.getpid())).touch()
            self.die()
        return index


@pytest.mark.slow
@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("way", WAYS)
def test_the_message_of_a_dead_worker_is_found_by_torchs_words(way, death, tmp_path):
    """It names the process that died and the cause, and forebay's further lines follow."""
    die, cause = DEATHS[death]
    with DataLoader(Dying(die, tmp_path), num_workers=1, **WAYS[way]) as loader:
        iterator = iter(loader)
        assert [int(next(iterator)) for _ in range(2)] == [0, 1]
        with pytest.raises(RuntimeError, match=TORCHS_WORDS) as caught:
            next(iterator)
        text = str(caught.value)
        first, *further = text.splitlines()
        assert re.search(cause, first)
        died = {path.name for path in tmp_path.iterdir()}
        assert len(died) == 2  # it was tried once more
        assert re.match(TORCHS_WORDS, text)[1] in died
        assert "epoch 0, batch 2: samples [2]." in further[0]
        assert "The batch was tried 2 times; the loader continues with the next one." in text
        assert "num_workers=0" in text
        assert [int(batch) for batch in iterator] == [3, 4]


# ---- libraries that ask for the iterator themselves ---------------------------------------------

ITERATED = {
    "plain": {},
    "workers": {"num_workers": 1},
    "seed": {"seed": 1},
    "buffer": {"num_workers": 1, "buffer": "1MB"},
    "persistent": {"num_workers": 1, "persistent_workers": True},
    "persistent, buffer": {"num_workers": 1, "persistent_workers": True, "buffer": "1MB"},
}


def numbers(batches):
    """Return the numbers of batches of one sample."""
    return [int(batch) for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize("way", ITERATED)
@pytest.mark.parametrize("dataset", [range(4), Stream(4)], ids=["map-style", "iterable"])
def test_get_iterator_gives_a_whole_epoch_at_any_time(dataset, way):
    """Before, within and between epochs, as torch's does; and the loader continues after it."""
    with DataLoader(dataset, **ITERATED[way]) as loader:
        assert numbers(loader._get_iterator()) == [0, 1, 2, 3]
        assert numbers(loader) == [0, 1, 2, 3]
        assert numbers(loader._get_iterator()) == [0, 1, 2, 3]
        iterator = iter(loader)
        assert int(next(iterator)) == 0
        assert numbers(loader._get_iterator()) == [0, 1, 2, 3]
        assert numbers(loader) == [0, 1, 2, 3]
        del iterator


class Bare(DataLoader):
    """A subclass that makes its iterators itself, as some libraries' do."""

    def __iter__(self):
        yield from self._get_iterator()


@pytest.mark.slow
@pytest.mark.parametrize("way", ITERATED)
def test_a_subclass_may_iterate_by_get_iterator_alone(way):
    """In each epoch, and with a state."""
    with Bare(range(4), **ITERATED[way]) as loader:
        assert [numbers(loader), numbers(loader)] == [[0, 1, 2, 3]] * 2
        assert loader.epoch == 2
        iterator = iter(loader)
        assert [int(next(iterator)), int(next(iterator))] == [0, 1]
        state = loader.state_dict()
        assert (state["epoch"], state["batch"]) == (2, 2)
        iterator.close()
    with Bare(range(4), **ITERATED[way]) as loader:
        loader.load_state_dict(state)
        assert numbers(loader) == [2, 3]


# ---- the bytes of a batch -----------------------------------------------------------------------

SAMPLE_BYTES = 10_000


@dataclass
class Fields:
    """A batch as a dataclass."""

    values: torch.Tensor
    names: list[str]


class Named(NamedTuple):
    """A batch as a NamedTuple."""

    values: torch.Tensor


class Encoding(UserDict):
    """A batch as transformers' BatchEncoding: a UserDict with attributes of its own."""

    def __init__(self, data):
        super().__init__(data)
        self.n_sequences = None


class Holder:
    """A batch as an object of no known kind."""

    def __init__(self, values):
        self.values = values


FORMS = {
    "UserDict": lambda values: UserDict(values=values),
    "BatchEncoding": lambda values: Encoding({"values": values}),
    "dataclass": lambda values: Fields(values, ["a"]),
    "NamedTuple": Named,
    "object": Holder,
    "nested": lambda values: {"all": [UserDict(one=Fields(values, []))]},
}


class Wide(Dataset):
    """Samples of 10 kB."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.zeros(SAMPLE_BYTES, dtype=torch.uint8)


@pytest.mark.parametrize("form", FORMS)
def test_a_buffer_of_threads_counts_the_bytes_of_any_batch(form):
    """It holds no more than its bytes and one batch for each worker."""
    make, most = FORMS[form], 100_000

    def collate(samples):
        return make(torch.stack(samples))

    with DataLoader(
        Wide(), num_workers=2, buffer=most, backend="thread", collate_fn=collate
    ) as loader:
        iterator = iter(loader)
        next(iterator)
        until(lambda: loader.statistics().ready_batches >= 8)
        assert loader.statistics().ready_bytes >= 8 * SAMPLE_BYTES
        for _ in iterator:
            now = loader.statistics()
            assert now.ready_bytes == now.ready_batches * SAMPLE_BYTES
            assert now.ready_bytes <= most + 2 * SAMPLE_BYTES


# ---- many loaders at once -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.thorough)])
def test_many_loaders_with_workers_are_alive_at_once(count):
    """With and without a buffer; together they leave most of the address space to others."""
    loaders, iterators = [], []

    def address_space():
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")

    before = address_space()
    try:
        for number in range(count):
            buffer = Buffer(max_batches=2) if number % 2 else None
            loaders.append(DataLoader(Squares(9), num_workers=1, buffer=buffer))
            iterators.append(iter(loaders[-1]))
            assert int(next(iterators[-1])[0]) == 0, number
        assert address_space() - before < count << 38  # 60 of them: 15 of 128 TiB
        assert [int(next(iterator)[0]) for iterator in iterators] == [1] * count
    finally:
        iterators.clear()
        for loader in loaders:
            loader.close()


# ---- buffers that cannot work -------------------------------------------------------------------


def test_a_buffer_without_workers_is_warned_of():
    """Nothing would fill it; batches are made when they are requested."""
    with pytest.warns(UserWarning, match=r"^buffer= has no effect with num_workers=0") as caught:
        loader = DataLoader(range(4), buffer="1MB")
    assert caught[0].filename == __file__
    assert numbers(loader) == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [30, "30", "30B"])
def test_a_buffer_of_thirty_bytes_is_refused(size):
    """With what was meant: gigabytes, or a number of batches."""
    with pytest.raises(OptionError, match=rf"^buffer={size!r} is 30 bytes, too few") as caught:
        DataLoader(range(4), num_workers=1, buffer=size)
    assert "'30GB'" in str(caught.value)
    assert "forebay.Buffer(max_batches=30)" in str(caught.value)


@pytest.fixture
def memory_of_24_gib(monkeypatch):
    """Let this process have 24 GiB, whatever the machine has."""
    monkeypatch.setattr("forebay.base.machine.usable_memory", lambda: 24 << 30)
    monkeypatch.setattr("forebay.base.machine.free_memory", lambda: 20 << 30)


@pytest.mark.usefixtures("memory_of_24_gib")
def test_a_buffer_larger_than_the_memory_is_warned_of_once():
    """With both numbers and what would fit; it is made as asked."""
    words = r"(?s)^a buffer of 30 TB is larger than .* 25.8 GB\n.*buffer=\"50%\""
    with pytest.warns(RuntimeWarning, match=words) as caught:
        loader = DataLoader(range(4), num_workers=1, buffer="30TB")
    assert len([each for each in caught if each.category is RuntimeWarning]) == 1
    assert loader.buffer == pickle.loads(pickle.dumps(loader)).buffer
    assert loader.buffer.nbytes == 30 * 10**12


@pytest.mark.usefixtures("memory_of_24_gib")
def test_a_buffer_larger_than_what_is_left_of_the_memory_is_warned_of():
    """As in a control group that other processes use, too."""
    words = r"(?s)^a buffer of 22 GB is larger than what is left of .* process, 21.5 GB\n"
    with pytest.warns(RuntimeWarning, match=words):
        assert buffer_of("22GB").nbytes == 22 * 10**9


@pytest.mark.usefixtures("memory_of_24_gib")
def test_a_buffer_is_given_as_a_share_of_the_memory():
    """Half of it, in bytes; and one on a disk is not compared with it."""
    assert buffer_of("50%").nbytes == Buffer("50%").nbytes == 12 << 30


@pytest.mark.usefixtures("memory_of_24_gib")
def test_the_ranks_of_torchrun_share_the_memory(monkeypatch):
    """Half of it is for all of them; and what they take together is compared with it."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert buffer_of("50%").nbytes == (12 << 30) // 8
    words = r"^a buffer of 5 GB, in each of 8 ranks on this machine, is larger than .* 25.8 GB\n"
    with pytest.warns(RuntimeWarning, match=words):
        assert buffer_of("5GB").nbytes == 5 * 10**9
    assert buffer_of("3GB").nbytes == 3 * 10**9  # without a warning, which would be an error


@pytest.mark.usefixtures("memory_of_24_gib")
def test_a_buffer_on_a_disk_may_be_larger_than_the_memory(tmp_path):
    """No warning comes."""
    assert Buffer("300GB", directory=tmp_path).nbytes == 300 * 10**9


# ---- as an object -------------------------------------------------------------------------------


def test_the_representation_says_what_is_loaded_and_how():
    """The dataset, the sizes, and what was named; on one line."""
    plain = DataLoader(Squares(1000), batch_size=4)
    assert repr(plain) == "DataLoader(Squares(1,000), batch_size=4, num_workers=0)"
    named = DataLoader(
        Squares(1000),
        batch_size=4,
        num_workers=2,
        buffer=Buffer("2GB", max_batches=500),
        seed=7,
        on_error="skip",
        backend="thread",
        drop_last=True,
        world_size=3,
        rank=1,
    )
    assert repr(named) == (
        "DataLoader(Squares(1,000), batch_size=4, num_workers=2, buffer=2 GB or 500 batches, "
        "rank=1 of 3, seed=7, backend='thread', on_error='skip', drop_last=True)"
    )
    assert repr(DataLoader(Stream(4))) == "DataLoader(Stream, batch_size=1, num_workers=0)"
    assert repr(Bare([1])).startswith("Bare(list(1), ")


def test_a_loader_has_a_type_argument_at_run_time():
    """As torch's class: `DataLoader[int]` is for annotations, and makes a loader."""
    kind = DataLoader[int]
    assert kind.__origin__ is DataLoader
    assert isinstance(kind(range(3)), DataLoader)

    class Ours(DataLoader[int]):
        """A subclass of it."""

    assert numbers(Ours(range(3))) == [0, 1, 2]


def test_completion_and_help_show_the_public_names():
    """Before any of them was used, and without loading torch."""
    code = (
        "import forebay, sys\n"
        "print(set(forebay.__all__) <= set(dir(forebay)), 'torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stdout == "True False\n", shown.stderr
    text = pydoc.render_doc(forebay, renderer=pydoc.plaintext)
    for name in forebay.__all__:
        assert re.search(rf"\b{name}\b", text), name


@pytest.mark.parametrize(
    "name", ["Statistics", "PredictionReport", "Failure", "Report", "MixedDataset", "CachedDataset"]
)
def test_the_types_of_what_is_returned_are_public(name):
    """So that programs can name them in annotations."""
    assert name in forebay.__all__
    assert inspect.isclass(getattr(forebay, name))


# ---- loaders that a library makes again ---------------------------------------------------------


def made_again_by_name(loader):
    """Make a loader again as Lightning does: from its attributes, by the names of arguments."""
    attributes = {name: value for name, value in vars(loader).items() if name[0] != "_"}
    attributes["multiprocessing_context"] = loader.multiprocessing_context
    names = inspect.signature(type(loader).__init__).parameters
    arguments = {name: attributes[name] for name in names if name in attributes}
    if loader.batch_size is not None:  # the batch sampler is the loader's own
        arguments |= {"shuffle": False, "batch_sampler": None}
    else:
        arguments |= {"batch_size": 1, "sampler": None, "shuffle": False, "drop_last": False}
    return type(loader)(**arguments)


REMADE = {
    "plain": {},
    "shuffle": {"shuffle": True, "generator": torch.Generator()},
    "seed": {"seed": 3, "shuffle": True, "drop_last": True},
    "buffer": {"seed": 3, "shuffle": True, "num_workers": 1, "buffer": "1MB"},
    "threads": {"seed": 3, "num_workers": 2, "backend": "thread"},
    "skip": {"seed": 3, "on_error": "skip"},
    "ranks": {"world_size": 2, "rank": 1, "tail": "uneven", "shuffle": True},
    "mixture": {"seed": 3},
    "batch sampler": {"batch_sampler": BatchSampler(range(10), 4, drop_last=False)},
    "batch sampler, seed": {
        "batch_sampler": BatchSampler(range(10), 4, drop_last=False),
        "seed": 3,
    },
}
KEPT = ("buffer", "backend", "seed", "on_error", "world_size", "rank", "tail", "_ranks")


@pytest.mark.slow
@pytest.mark.parametrize("way", REMADE)
def test_a_loader_made_again_from_its_attributes_is_the_same(way):
    """Everything that was named is kept; the order, the batches and the states are equal."""
    dataset: Any = list(range(11))
    if way == "mixture":
        dataset = forebay.mix({"a": (range(10), 0.7), "b": (range(100, 110), 0.3)})
    arguments = dict(REMADE[way])
    if "batch_sampler" not in arguments:
        arguments["batch_size"] = 4
    with DataLoader(dataset, **arguments) as loader, made_again_by_name(loader) as again:
        assert [getattr(again, name) for name in KEPT] == [getattr(loader, name) for name in KEPT]
        assert repr(again) == repr(loader)
        assert len(again) == len(loader)
        assert again.state_dict() == loader.state_dict()
        for _ in range(2):
            if "generator" in arguments:  # both draw from one
                arguments["generator"].manual_seed(5)
            expected = [batch.tolist() for batch in loader]
            if "generator" in arguments:
                arguments["generator"].manual_seed(5)
            assert [batch.tolist() for batch in again] == expected
        assert again.state_dict()["epoch"] == 2


class Prepared(TorchDataLoader):
    """What `accelerate.prepare` and Ray Train make: a loader of their own, which is torch's."""

    def __iter__(self):
        yield from super().__iter__()


def by_sampler(loader, **arguments):
    """Make a stock loader around the sampler."""
    return Prepared(loader.dataset, batch_size=4, sampler=loader.sampler, **arguments)


def by_batch_sampler(loader, **arguments):
    """Make a stock loader around the batch sampler."""
    return Prepared(loader.dataset, batch_sampler=loader.batch_sampler, **arguments)


POWERS = {
    "seed": {"seed": 3},
    "buffer": {"num_workers": 1, "buffer": "1MB"},
    "skip": {"on_error": "skip"},
    "ranks": {"world_size": 2, "rank": 0},
    "threads": {"num_workers": 1, "backend": "thread"},
}


@pytest.mark.slow
@pytest.mark.parametrize("around", [by_sampler, by_batch_sampler])
@pytest.mark.parametrize("way", POWERS)
def test_a_stock_loader_around_the_sampler_is_an_error(way, around):
    """It would lose seed, buffer and state; the message says so, and what to do instead."""
    loader = DataLoader(range(40), batch_size=4, shuffle=True, **POWERS[way])
    with pytest.raises(OptionError, match="a plain torch DataLoader was made") as raised:
        list(around(loader))
    text = str(raised.value)
    assert "buffer=, seed=, world_size= and the state would be lost" in text
    assert "docs/how-to/frameworks.md" in text
    assert (Path(__file__).parents[2] / "docs/how-to/frameworks.md").exists()


def test_a_plain_loader_around_a_plain_loaders_sampler_is_not_refused():
    """There is nothing to lose; and whoever looks at the sampler of a loader loses nothing."""
    loader = DataLoader(range(8), batch_size=4, shuffle=True)
    assert sorted(number for batch in by_sampler(loader) for number in batch.tolist()) == [
        *range(8)
    ]
    named = DataLoader(range(8), batch_size=4, shuffle=True, seed=1)
    assert sorted(named.sampler) == list(range(8))
    assert sorted(number for batch in named.batch_sampler for number in batch) == list(range(8))
    assert sorted(torch.cat(list(named)).tolist()) == list(range(8))


def test_accelerate_prepares_loaders_of_forebays_arguments_alone():
    """Asked by anything but an Accelerator, none is prepared, and what it sets has no effect."""
    for loader in (DataLoader(range(8)), DataLoader(range(8), seed=0)):
        assert not loader._is_accelerate_prepared
        loader._is_accelerate_prepared = True
        assert not loader._is_accelerate_prepared
        assert len(list(loader)) == 8


# What Ray Train does with a loader, in short; its own class holds a batch for its user.
RAY_TRAIN = """
from torch.utils.data import DataLoader, DistributedSampler

class _WrappedDataLoader:
    def __init__(self, loader, device, auto_transfer):
        self.loader = loader
    def __iter__(self):
        return iter(self.loader)

def prepare_data_loader(loader, add_dist_sampler=True, move_to_device=True):
    if not isinstance(loader.sampler, DistributedSampler) and add_dist_sampler:
        loader = DataLoader(loader.dataset, sampler=DistributedSampler(loader.dataset))
    return _WrappedDataLoader(loader, CPU, False) if move_to_device else loader
"""


@pytest.fixture
def prepare_data_loader(monkeypatch):
    """Return Ray Train's function, in the second of two processes."""
    name = "ray.train.torch.train_loop_utils"
    module: Any = ModuleType(name)
    module.CPU = torch.device("cpu")
    exec(RAY_TRAIN, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("forebay.loading.ray_train.process_group", lambda: Ranks(2, 1))
    return module.prepare_data_loader


def test_ray_train_prepares_a_loader_in_place(prepare_data_loader):
    """It is divided, stays where it is, and nothing is put around it."""
    loader = DataLoader(range(8), batch_size=2, seed=0)
    assert prepare_data_loader(loader) is loader
    assert [batch.tolist() for batch in loader] == [[2, 3], [6, 7]]
    assert prepare_data_loader(loader, move_to_device=False) is loader
    assert loader.epoch == 1
    assert [batch.tolist() for batch in loader] == [[2, 3], [6, 7]]
    whole = DataLoader(range(4), batch_size=2, seed=0)
    assert prepare_data_loader(whole, add_dist_sampler=False) is whole
    assert len(whole) == 2


def test_ray_train_gives_torchs_sampler_to_a_loader_with_torchs_arguments(prepare_data_loader):
    """Its state says where it is, although Ray would have made another loader."""
    loader = prepare_data_loader(DataLoader(range(8), batch_size=2, shuffle=True))
    sampler = DistributedSampler(range(8), 2, 1)
    assert torch.cat(list(loader)).tolist() == list(sampler)
    sampler.set_epoch(1)
    loader.sampler.set_epoch(1)
    assert torch.cat(list(loader)).tolist() == list(sampler)
    assert loader.epoch == 2
    with pytest.warns(UserWarning, match="replaces the list of a loader with torch's arguments"):
        prepare_data_loader(DataLoader(range(8), sampler=[1, 2]))


def test_what_ray_train_cannot_divide_is_an_error(prepare_data_loader):
    """In words; the loader is what it was."""
    own = DataLoader(range(8), batch_sampler=[[0, 1], [2]], seed=0)
    with pytest.raises(OptionError, match="the batches of a list cannot be divided among the 2"):
        prepare_data_loader(own)
    assert [batch.tolist() for batch in own] == [[0, 1], [2]]
    other = DataLoader(range(8), world_size=3, rank=0)
    with pytest.raises(
        OptionError, match="made for rank 0 of 3, and this is process 1 of 2 of Ray"
    ):
        prepare_data_loader(other)


def test_a_loader_that_ray_train_has_wrapped_is_an_error(prepare_data_loader):
    """It would be a batch ahead of the training, and so would its state."""
    wrapped = prepare_data_loader.__globals__["_WrappedDataLoader"]
    with pytest.raises(OptionError, match="put another loader around this one"):
        iter(wrapped(DataLoader(range(8), seed=0), None, False))


def test_use_takes_a_trainer_of_transformers():
    """Anything else is refused in words."""
    with pytest.raises(OptionError, match=r"takes a transformers\.Trainer; got DataLoader"):
        forebay.use(DataLoader(range(8)), seed=0)
