"""`device=`: batches are on the device, in one copy each, and stay right however long they live."""

from __future__ import annotations

import gc
import pickle
from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from datasets import Failing, Squares
from streams import until
from torch.utils.data import IterableDataset

from forebay import Buffer, DataLoader, OptionError, mix
from forebay.loading.hand_out import HandOut
from kit.fake_device import FakeDevice

# A machine of few cores is warned of several workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


PIXELS = 30_000


class Pictures(Squares):
    """30 kB of the sample's own number, its label, a name and an array."""

    def __getitem__(self, index: int) -> Any:
        pixels = torch.full((PIXELS,), index % 251, dtype=torch.uint8)
        return {"pixels": pixels, "label": index, "name": str(index), "array": np.full(3, index)}


def is_right(batch: Any, indices: list[int]) -> bool:
    """Return whether a batch of pictures has these samples, to the last byte."""
    expected = torch.tensor(indices, dtype=torch.uint8)[:, None] % 251
    return (
        batch["label"].tolist() == indices
        and batch["name"] == [str(index) for index in indices]
        and bool((batch["pixels"] == expected).all())
        and bool((batch["array"] == torch.tensor(indices)[:, None]).all())
    )


def loader_of(device: Any, count: int = 64, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Pictures(count), batch_size=4, num_workers=2, device=device, **settings)


SETTINGS: dict[str, dict[str, Any]] = {
    "torch's arguments": {},
    "persistent": {"persistent_workers": True},
    "a seed": {"seed": 1},
    "a buffer": {"seed": 1, "buffer": "8MB"},
    "a buffer on disk": {"seed": 1, "buffer": "disk"},
    "threads": {"seed": 1, "backend": "thread"},
    "no workers": {"num_workers": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_batch_is_right(settings, tmp_path):
    """Whatever makes the batches, two epochs of them are right on a device that copies late."""
    if settings.get("buffer") == "disk":
        settings = settings | {"buffer": Buffer(max_bytes=8_000_000, directory=tmp_path)}
    with DataLoader(
        Pictures(64), **{"batch_size": 4, "num_workers": 2, "device": FakeDevice(2)} | settings
    ) as loader:
        for _ in range(2):
            batches = 0
            for number, batch in enumerate(loader):
                assert is_right(batch, list(range(4 * number, 4 * number + 4)))
                batches += 1
            assert batches == 16


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_batches_that_are_kept_stay_right(seed):
    """`list(loader)` holds every batch at once: none is overwritten, and all memory comes back."""
    device = FakeDevice(seed)
    loader = loader_of(device, seed=1, buffer="8MB")
    batches = list(loader)
    assert all(is_right(each, list(range(4 * n, 4 * n + 4))) for n, each in enumerate(batches))
    assert device.allocated >= 16 * 4 * PIXELS
    kept = batches[3]["pixels"][2:].view(2, PIXELS // 100, 100)
    del batches
    loader.close()
    gc.collect()
    assert bool((kept[0] == 14).all() and (kept[1] == 15).all())
    assert 4 * PIXELS < device.allocated < 9 * PIXELS, "the slot of the kept tensor, no other"
    del kept
    assert device.allocated == 0
    assert device.registered == {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_memory_of_a_batch_is_not_used_again_while_the_device_reads_it(seed):
    """The corruption of side streams: a batch is dropped before the work on it was done."""
    device = FakeDevice(seed, defers=True)
    sums: list[int] = []
    with loader_of(device, 120, seed=1, buffer="8MB", shuffle=True) as loader:
        expected = []
        for batch in loader:
            pixels = batch["pixels"]
            address, shape = pixels.data_ptr(), pixels.shape
            expected.append([index % 251 for index in [int(name) for name in batch["name"]]])

            def work(address=address, shape=shape) -> None:
                """Read the memory that the batch was in; no reference keeps it."""
                sums.append(read(address, shape))

            device.launch(work)
            del batch, pixels
        device.synchronize()
    assert sums == expected
    assert 30 <= device.copied <= 31, "one may be of the next epoch"


def read(address: int, shape: torch.Size) -> Any:
    """Return the first value of each row at an address, after checking that all are equal."""
    import ctypes

    memory = np.frombuffer(ctypes.string_at(address, shape.numel()), np.uint8).reshape(shape)
    assert (memory == memory[:, :1]).all()
    return memory[:, 0].tolist()


@pytest.mark.slow
def test_a_loop_uses_three_slots():
    """Device memory is bounded: one batch in use, one that was just returned, at most one ahead."""
    device = FakeDevice(1)
    most = 0
    with loader_of(device, 120, seed=1, buffer="8MB") as loader:
        for _ in loader:
            most = max(most, device.allocated)
    assert 8 * PIXELS < most < 13 * PIXELS
    assert 30 <= device.copied <= 31, "one may be of the next epoch"


def test_one_copy_a_batch():
    """Tensors of a worker's batch are not copied one by one, and arrays stay on the host."""
    device = FakeDevice()
    with loader_of(device, seed=1) as loader:
        batches = list(loader)
        statistics = loader.statistics()
    assert device.copied == len(batches) == statistics.copied_batches == 16
    assert device.moved_alone == 0
    assert statistics.copied_bytes >= 16 * 4 * PIXELS
    assert statistics.copy_s == pytest.approx(0.016, abs=0.003)  # those that have ended


class Pair(NamedTuple):
    left: Any
    right: Any


class Odd(Squares):
    """One sample with all kinds of values."""

    def __getitem__(self, index: int) -> Any:
        whole = torch.arange(20_000.0).reshape(100, 200) + index
        return {
            "strided": whole.t(),
            "expanded": torch.tensor([float(index)]).expand(5, 1),
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(index),
            "pair": Pair(whole[:2], [whole.half(), (whole > 50, None)]),
            "mapping": UserDict(ids=torch.arange(5_000) + index),
            "sparse": torch.eye(3).to_sparse(),
            "grad": torch.ones(3, requires_grad=True),
            "packed": torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
            "text": "words",
            "array": np.arange(9_000) + index,
        }


def one_sample(samples: list[Any]) -> Any:
    return samples[0]


def test_all_kinds_of_values_arrive():
    """Shapes, strides, types and containers are those of a batch without a device."""
    settings: Any = {"batch_size": 1, "collate_fn": one_sample, "num_workers": 1}
    plain = list(DataLoader(Odd(3), **settings))
    device = FakeDevice(1)
    batches = list(DataLoader(Odd(3), device=device, **settings))
    for batch, expected in zip(batches, plain, strict=True):
        assert list(batch) == list(expected)
        assert batch["strided"].stride() == expected["strided"].stride()
        assert batch["expanded"].stride() == expected["expanded"].stride()
        assert type(batch["pair"]) is Pair
        assert type(batch["mapping"]) is UserDict
        for name in ("strided", "expanded", "empty", "scalar", "grad"):
            assert torch.equal(batch[name], expected[name])
        assert torch.equal(batch["pair"].left, expected["pair"].left)
        assert torch.equal(batch["pair"].right[0], expected["pair"].right[0])
        assert torch.equal(batch["pair"].right[1][0], expected["pair"].right[1][0])
        assert torch.equal(batch["mapping"]["ids"], expected["mapping"]["ids"])
        assert torch.equal(batch["sparse"].to_dense(), torch.eye(3))
        assert torch.equal(batch["packed"].data, expected["packed"].data)
        assert torch.equal(batch["packed"].batch_sizes, expected["packed"].batch_sizes)
        assert np.array_equal(batch["array"], expected["array"])
        assert batch["text"] == "words"
    assert device.moved_alone > 0, "sparse, with a gradient, and hidden in an object"


def with_array(samples: list[Any]) -> Any:
    return np.stack([each["pixels"].numpy() for each in samples]), torch.ones(5_000)


def test_an_array_keeps_its_memory():
    """A numpy array is not moved: it lies in the slot on the host, which is not used again."""
    loader = loader_of(FakeDevice(3), seed=1, buffer="4MB", collate_fn=with_array)
    for _ in range(3):
        arrays = [array for array, _ in loader]
        for number, array in enumerate(arrays):
            assert type(array) is np.ndarray
            assert (array[:, -1] == range(4 * number, 4 * number + 4)).all()
    loader.close()


@pytest.mark.slow
def test_an_early_end_leaves_nothing():
    """After a break, an exception and a close, batches are right, and all memory is freed."""
    device = FakeDevice(4)
    loader = loader_of(device, seed=1, buffer="8MB")
    for batch in loader:
        assert is_right(batch, [0, 1, 2, 3])
        break
    with pytest.raises(ZeroDivisionError):
        for batch in loader:
            if batch["label"][0] == 8:
                raise ZeroDivisionError
    iterator = iter(loader)
    kept = next(iterator)
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(iterator)
    assert is_right(kept, [0, 1, 2, 3])
    del kept, batch, iterator
    gc.collect()
    assert device.allocated == 0
    assert device.registered == {}


@pytest.mark.slow
def test_a_resume_continues_on_the_device():
    """The state is that of a loader without a device."""
    first = loader_of(FakeDevice(), seed=1, buffer="8MB", shuffle=True)
    expected = [batch["label"].tolist() for batch in loader_of(None, seed=1, shuffle=True)]
    iterator = iter(first)
    found = [next(iterator)["label"].tolist() for _ in range(5)]
    state = first.state_dict()
    first.close()
    with loader_of(FakeDevice(7), seed=1, shuffle=True) as second:
        second.load_state_dict(state)
        assert found + [batch["label"].tolist() for batch in second] == expected


class Numbers(IterableDataset[Any]):
    """A stream of one worker, with a kilobyte for each number."""

    def __iter__(self) -> Any:
        return (torch.full((250,), float(number)) for number in range(40))


ORDERS: dict[str, Any] = {
    "a sampler": lambda: (Pictures(40), {"sampler": list(range(39, -1, -1))}),
    "a mixture": lambda: (mix({"a": (Pictures(30), 1.0), "b": (Pictures(9), 2.0)}), {}),
    "a rank of two": lambda: (Pictures(41), {"world_size": 2, "rank": 1, "shuffle": True}),
    "a stream": lambda: (Numbers(), {"num_workers": 1, "buffer": "1MB"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS)
def test_the_batches_are_those_of_the_host(make):
    """Samplers, mixtures, ranks and streams are read as without a device."""
    found = []
    for device in (None, FakeDevice(5)):
        dataset, settings = make()
        arguments = {"batch_size": 4, "num_workers": 2, "seed": 3, "device": device} | settings
        with DataLoader(dataset, **arguments) as loader:
            batches = [each for _ in range(2) for each in loader]
        tensors = [each if isinstance(each, torch.Tensor) else each["label"] for each in batches]
        found.append([each.tolist() for each in tensors])
    assert found[0] == found[1]
    assert len(found[0]) >= 10


def test_samples_and_batches_that_fail():
    """A skipped sample, and a batch that raises, are as without a device."""
    device = FakeDevice(1)
    dataset = Failing(12, ValueError("bad"), (5,))
    with DataLoader(
        dataset, batch_size=4, num_workers=1, seed=0, on_error="skip", device=device
    ) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11]]
    with DataLoader(dataset, batch_size=4, num_workers=1, seed=0, device=device) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ValueError, match="bad"):
            next(iterator)
        assert next(iterator).tolist() == [8, 9, 10, 11]


class Unpickles:
    """An object that raises in the process that unpickles it."""

    def __reduce__(self) -> Any:
        return explode, ()


def explode() -> Any:
    raise ZeroDivisionError("it does not unpickle")


class Exploding(Pictures):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) | ({"bad": Unpickles()} if index == 2 else {"bad": 0})


def test_a_batch_that_does_not_unpickle_raises_when_it_is_taken():
    """The thread that copies goes on, and the error comes where the batch would have come."""
    loader = DataLoader(
        Exploding(5),
        batch_size=1,
        num_workers=1,
        collate_fn=one_sample,
        device=FakeDevice(1),
        seed=0,
        buffer="4MB",
    )
    iterator = iter(loader)
    assert [next(iterator)["label"] for _ in range(2)] == [0, 1]
    with pytest.raises(ZeroDivisionError, match="does not unpickle"):
        next(iterator)
    loader.close()


def test_no_memory_on_the_device_is_an_error_of_its_batch():
    """The batch that does not fit raises; when there is room again, the next one comes."""
    device = FakeDevice(capacity=10 * PIXELS)
    with loader_of(device, seed=1, buffer="8MB") as loader:
        iterator = iter(loader)
        kept = [next(iterator), next(iterator)]
        with pytest.raises(torch.OutOfMemoryError):
            next(iterator)
        assert is_right(kept[0], [0, 1, 2, 3]) and is_right(kept[1], [4, 5, 6, 7])
        kept.clear()
        assert is_right(next(iterator), [12, 13, 14, 15])
        assert is_right(next(iterator), [16, 17, 18, 19])


# ---- page-locked memory --------------------------------------------------------------------------


@pytest.mark.slow
def test_slots_are_page_locked_once():
    """A slot that is used again is copied without staging; all is undone at the end."""
    device = FakeDevice(1)
    with loader_of(device, 120, seed=1, buffer="4MB") as loader:
        for number, batch in enumerate(loader):
            assert is_right(batch, list(range(4 * number, 4 * number + 4)))
        # The engine's thread fills the buffer on, and locks and unlocks slots meanwhile.
        until(lambda: sum([*device.registered.values()]) == loader.statistics().pinned_bytes)
        statistics = loader.statistics()
        assert device.staged == 0
        assert statistics.pinned_bytes > 4 * PIXELS
        assert statistics.staged_bytes == 0
        assert statistics.pinned_reason == ""
    assert device.registered == {}


def test_memory_that_cannot_be_page_locked_is_staged_and_says_so(tmp_path):
    """A refusal of the driver, and a buffer on a disk, are no errors."""
    device = FakeDevice(1, refuses="CUDA_ERROR_OUT_OF_MEMORY (2)")
    with loader_of(device, seed=1, buffer="8MB") as loader:
        assert all(is_right(batch, list(range(4 * n, 4 * n + 4))) for n, batch in enumerate(loader))
        statistics = loader.statistics()
    assert 16 <= device.staged <= 17
    assert statistics.staged_bytes == statistics.copied_bytes
    assert statistics.pinned_reason == "CUDA_ERROR_OUT_OF_MEMORY (2)"
    buffer = Buffer(max_bytes=8_000_000, directory=tmp_path)
    with loader_of(FakeDevice(), seed=1, buffer=buffer) as loader:
        list(loader)
        assert "directory=" in loader.statistics().pinned_reason


class Growing(Squares):
    """Samples that become larger and larger, so that slots are cut anew."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1000 * (index + 1) ** 2,), float(index))


@pytest.mark.slow
def test_slots_on_both_sides_grow_with_the_batches():
    """Slots on both sides follow the batches; pages are unregistered before they are freed."""
    device = FakeDevice(1)
    with DataLoader(
        Growing(24), batch_size=1, num_workers=2, seed=1, buffer="20MB", device=device
    ) as loader:
        for index, batch in enumerate(loader):
            assert batch.shape == (1, 1000 * (index + 1) ** 2)
            assert bool((batch == index).all())
    assert device.registered == {}


# ---- device_transform ----------------------------------------------------------------------------


def doubled(batch: Any) -> Any:
    return {**batch, "pixels": batch["pixels"].float() * 2}


def noisy(batch: Any) -> Any:
    return batch["label"] + torch.rand(4), np.random.rand()


def noisy_by_generator(batch: Any, generator: torch.Generator | None = None) -> Any:
    return batch["label"] + torch.rand(4, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_transform_runs_on_each_batch(device, num_workers):
    """What the transform returns is the batch."""
    device = FakeDevice(1) if device == "fake" else device
    with DataLoader(
        Pictures(16),
        batch_size=4,
        num_workers=num_workers,
        device=device,
        device_transform=doubled,
    ) as loader:
        for number, batch in enumerate(loader):
            assert batch["pixels"].dtype == torch.float32
            assert bool((batch["pixels"][1] == 2 * (4 * number + 1)).all())


@pytest.mark.slow
@pytest.mark.usefixtures("_generators")
@pytest.mark.parametrize("transform", [noisy, noisy_by_generator])
def test_random_numbers_of_a_transform_depend_on_the_batch(transform):
    """Seed, epoch and batch decide them, not workers, devices or what was drawn before."""

    def drawn(seed, device, **settings):
        with DataLoader(
            Pictures(8), 4, device=device, device_transform=transform, seed=seed, **settings
        ) as loader:
            return [*loader, *loader], loader.replay(epoch=1, batch=1)

    torch.manual_seed(0)
    [*DataLoader(Pictures(8), 4, seed=3), *DataLoader(Pictures(8), 4, seed=3)]
    state = torch.get_rng_state()
    torch.manual_seed(0)
    first, replayed = drawn(3, "cpu")
    assert torch.equal(torch.get_rng_state(), state), "the trainer's own numbers are not touched"
    again, _ = drawn(3, FakeDevice(1), num_workers=2, buffer="4MB")
    other, _ = drawn(4, "cpu")

    def numbers(batch):
        values = [batch] if isinstance(batch, torch.Tensor) else batch
        return [value.tolist() if hasattr(value, "tolist") else value for value in values]

    assert [*map(numbers, first)] == [*map(numbers, again)] != [*map(numbers, other)]
    assert numbers(replayed) == numbers(first[3])
    assert numbers(first[0]) != numbers(first[2]), "another epoch"


@pytest.mark.usefixtures("_generators")
def test_without_a_seed_a_transform_draws_as_torch_does():
    """The global generators are neither seeded nor restored."""
    torch.manual_seed(5)
    loader = DataLoader(Pictures(4), 4, device="cpu", device_transform=noisy_by_generator)
    iterator = iter(loader)
    state = torch.get_rng_state()
    (batch,) = iterator
    torch.set_rng_state(state)
    assert torch.equal(batch, torch.arange(4) + torch.rand(4))


def failing(batch: Any) -> Any:
    raise ZeroDivisionError("no")


def test_an_error_of_a_transform_names_the_batch():
    """It is raised where the batch would have come, with the call that raises it again."""
    for seed, count in ((1, 2), (None, 1)):
        with loader_of(FakeDevice(1), seed=seed, device_transform=failing) as loader:
            with pytest.raises(ZeroDivisionError) as caught:
                next(iter(loader))
            first, *again = notes = caught.value.__notes__
            assert len(notes) == count
            assert first == "forebay: device_transform raised it, for epoch 0, batch 0"
            assert seed is None or "loader.replay(epoch=0, batch=0)" in again[0]
            with pytest.raises(OptionError if seed is None else ZeroDivisionError):
                loader.replay(epoch=0, batch=0)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_device_cpu_costs_nothing(device):
    """Nothing is copied, and nothing is done for a batch when it is returned."""
    with loader_of(device, seed=0) as loader:
        assert all(is_right(each, list(range(4 * n, 4 * n + 4))) for n, each in enumerate(loader))
        hand_out = HandOut(loader._kind())
        assert (hand_out.device, hand_out.is_needed) == (None, False)
        assert loader.statistics().copied_batches == 0


# ---- arguments -----------------------------------------------------------------------------------


def test_an_impossible_device_is_refused_at_once():
    """Nothing is started, and nothing ends up on the CPU in silence."""
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match=r"(?s)device='cuda' is not available: .*Use device"):
            loader_of("cuda")
    with pytest.raises(OptionError, match="device='cuda:99' is not available"):
        loader_of("cuda:99")
    with pytest.raises(OptionError, match="device='gpu' is not valid"):
        loader_of("gpu")
    with pytest.raises(OptionError, match="device='meta' is not possible"):
        loader_of(torch.device("meta"))
    with pytest.raises(OptionError, match="device_transform= needs device="):
        loader_of(None, device_transform=doubled)
    with pytest.raises(OptionError, match="must be a function"):
        loader_of("cpu", device_transform=3)


def test_the_device_is_fixed():
    """As other arguments, it cannot be set afterwards; a copy of the loader has it."""
    loader = loader_of(torch.device("cpu"), device_transform=doubled)
    for name in ("device", "device_transform"):
        with pytest.raises(ValueError, match="should not be set"):
            setattr(loader, name, None)
    copied = pickle.loads(pickle.dumps(loader))
    assert (copied.device, copied.device_transform) == (torch.device("cpu"), doubled)


@pytest.mark.slow
def test_several_loaders_share_a_device():
    """Each has its own slots."""
    device = FakeDevice(1)
    with loader_of(device, seed=1) as first, loader_of(device, seed=1, buffer="8MB") as second:
        for number, (one, other) in enumerate(zip(first, second, strict=True)):
            expected = list(range(4 * number, 4 * number + 4))
            assert is_right(one, expected) and is_right(other, expected)
