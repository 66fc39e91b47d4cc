"""forebay.collate.packed: encoded samples in one tensor, bit for bit, and what cannot be packed."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pyarrow.dataset
import pytest
import torch
from torch import arange, ones, zeros
from torch.utils.data import Dataset

import forebay
from forebay.base import batches
from forebay.collate import PackedBytes, by_field, packed
from forebay.memory.packed_batch import memory_of, unpack
from forebay.memory.packing import WORTH_PLACING, Packer, collate_into
from forebay.memory.slab import Slab
from kit.fake_device import FakeDevice
from labelled import Labelled, Record

FILES = [b"\xff\xd8 one \xff\xd9", b"", b"\0" * 300, bytes(range(256)), b"x"]


def contents(batch):
    """Return the samples of a PackedBytes as bytes, after checking what it consists of."""
    assert type(batch) is PackedBytes
    assert (batch.data.dtype, batch.offsets.dtype) == (torch.uint8, torch.int64)
    assert batch.data.is_contiguous()
    assert batch.offsets[0] == 0
    assert batch.offsets[-1] == len(batch.data)
    samples = list(batch)
    assert len(samples) == len(batch) == len(batch.offsets) - 1
    for place, sample in enumerate(samples):
        assert torch.equal(sample, batch[place])
        assert sample.dim() == 1
    return [sample.numpy().tobytes() for sample in samples]


# ---- packing ------------------------------------------------------------------------------------

KINDS = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "numpy.bytes_": np.bytes_,
    "array": lambda data: np.frombuffer(data, np.uint8),
    "array with gaps": lambda data: np.repeat(np.frombuffer(data, np.uint8), 2)[::2],
    "reversed array": lambda data: np.frombuffer(data[::-1], np.uint8)[::-1],
    "tensor": lambda data: torch.tensor(list(data), dtype=torch.uint8),
    "tensor with gaps": lambda data: (
        torch.tensor(list(data), dtype=torch.uint8).repeat(2, 1).T[:, 0]
    ),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_samples_of_any_kind_come_out_bit_for_bit(kind):
    """Also empty ones, wherever they are."""
    files = [each for each in FILES if kind is not np.bytes_ or not each.endswith(b"\0")]
    assert contents(packed()([kind(each) for each in files])) == files


def test_kinds_may_be_mixed():
    """A dataset may read some samples from files and others from arrays."""
    files = [b"%d" % place for place in range(len(KINDS))]
    made = [make(each) for make, each in zip(KINDS.values(), files, strict=True)]
    assert contents(packed()(made)) == files


@pytest.mark.parametrize("files", [[], [b""], [b"", b""], [b"a"]], ids=repr)
def test_few_or_empty_samples_are_packed_too(files):
    """No sample at all, and none with a byte in it."""
    assert contents(packed()(files)) == files


def test_a_sample_is_a_view():
    """No sample is copied when it is looked at; a slice of samples shares the bytes, too."""
    batch = packed()(FILES)
    batch.data[-1] = ord("y")
    assert batch[-1].tolist() == [ord("y")]
    assert list(batch)[4].tolist() == [ord("y")]
    assert contents(batch[3:]) == [FILES[3], b"y"]
    assert batch[3:][1].untyped_storage().data_ptr() == batch.data.untyped_storage().data_ptr()


def test_samples_are_found_by_number():
    """From either end, by any whole number; otherwise the error says how many there are."""
    batch = packed()(FILES)
    assert [batch[at].tolist() for at in range(-5, 0)] == [each.tolist() for each in batch]
    assert torch.equal(batch[np.int64(3)], batch[3])
    for at in (5, -6):
        with pytest.raises(IndexError, match=f"there is no sample {at}: there are 5"):
            batch[at]
    with pytest.raises(TypeError):
        batch["image"]


@pytest.mark.parametrize(("first", "end"), list(itertools.product([None, 0, 2, -2, 9], repeat=2)))
def test_slices_are_those_of_a_list(first, end):
    """Their offsets start at 0 again."""
    assert contents(packed()(FILES)[first:end]) == FILES[first:end]


def test_a_slice_with_a_step_is_refused():
    """Its bytes would not be in one piece."""
    with pytest.raises(ValueError, match="must have step 1; got 2"):
        packed()(FILES)[::2]


def test_its_repr_is_short():
    """It does not show the bytes."""
    assert repr(packed()(FILES)) == "PackedBytes(5 samples, 566 bytes)"


# ---- fields -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [lambda image, label: {"image": image, "label": label}, Labelled, Record, lambda *both: both],
    ids=["dict", "NamedTuple", "dataclass", "tuple"],
)
def test_fields_of_bytes_are_packed_and_others_are_as_torch_makes_them(make):
    """The container is of the samples' type."""
    batch = packed()([make(each, place) for place, each in enumerate(FILES)])
    assert type(batch) is type(make(0, 0))
    image, label = batches.opened(batch).values
    assert contents(image) == FILES
    assert torch.equal(label, arange(5))


def test_nested_fields_are_found():
    """Wherever they are; strings and decoded images beside them are collated as torch does it."""
    samples = [
        {"views": (each, Labelled(FILES[-1], "b")), "mask": ones(2, 3, dtype=torch.uint8)}
        for each in FILES
    ]
    batch = packed()(samples)
    assert contents(batch["views"][0]) == FILES
    assert contents(batch["views"][1].image) == [b"x"] * 5
    assert batch["views"][1].label == ["b"] * 5
    assert batch["mask"].shape == (5, 2, 3)


def test_a_rule_for_one_field_packs_that_field_alone():
    """Another field of bytes is as torch makes it."""
    batch = by_field(image=packed())([Labelled(each, each) for each in FILES])
    assert contents(batch.image) == FILES
    assert batch.label == FILES


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([b"a", None, b"b"], "sample 1 of a batch of 3 does not fit: it is None"),
        ([None, b"a"], "sample 0 of a batch of 2 does not fit: it is None"),
        ([Labelled(b"a", 1), Labelled("a.jpg", 1)], "sample 1 .*: field image is a str"),
        (
            [(1, {"x": b"a"}), (1, {"x": ones(3)})],
            r"sample 1 .*: field \[1\].x is a tensor of shape \(3,\), f",
        ),
        ([b"a", zeros(1, 2, dtype=torch.uint8)], r"it is a tensor of shape \(1, 2\), uint8"),
        ([b"a", np.zeros(2, np.int16)], r"it is an array of shape \(2,\), int16"),
        ([{"a": b"a"}, {"b": b"a"}], "sample 1 .*: it is a dict with 'b'; in 1 other"),
        ([{"a": None}, {"a": b"a"}], "sample 0 .*: field a is None"),
        (["a.jpg", "b.jpg"], "every sample is a str, without encoded bytes"),
        (
            [(ones(3), 1)],
            "of 1 cannot be made: every sample is a tuple of 2, without encoded bytes",
        ),
    ],
)
def test_what_is_not_encoded_is_named(samples, words):
    """A batch with other samples than were asked for must not be made in silence."""
    with pytest.raises(forebay.InputError, match=words) as caught:
        packed()(samples)
    assert "The batch was not made." in str(caught.value)


def test_packed_itself_is_no_rule():
    """Without its parentheses."""
    with pytest.raises(
        forebay.OptionError, match="the rule for field 'image' must be a collate_fn"
    ):
        by_field(image=packed)


# ---- what is done with batches ------------------------------------------------------------------


def test_its_bytes_are_counted():
    """Those of both tensors, so that a buffer knows what it holds."""
    batch = packed()(FILES)
    assert batches.nbytes([batch]) == batch.nbytes == 566 + 6 * 8


def test_it_stays_in_host_memory():
    """Decoders take encoded bytes from there; beside it tensors are moved."""
    batch = packed()([Labelled(each, 1) for each in FILES])
    moved = batches.moved(batch, torch.device("meta"))
    assert moved.image is batch.image
    assert moved.label.is_meta


def test_pinning_copies_the_bytes(monkeypatch):
    """`pin_memory` needs a GPU, so the test replaces it."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    batch = packed()(FILES)
    pinned = batches.pinned({"image": batch})["image"]
    assert contents(pinned) == FILES
    assert pinned.data.data_ptr() != batch.data.data_ptr()


def test_it_is_cut_in_halves_by_samples():
    """Also if it has as many bytes as there are samples, and not if it has other samples."""
    for files in (FILES, [b"a", b"", b"bcd", b"", b"e"]):
        halves = batches.halves({"image": packed()(files), "label": arange(5)}, 5)
        assert contents(halves[0]["image"]) == files[:2]
        assert contents(halves[1]["image"]) == files[2:]
        assert halves[1]["label"].tolist() == [2, 3, 4]
    assert batches.halves([packed()(FILES[:4]), ones(5)], 5) is None


@pytest.mark.parametrize("travel", [lambda it: pickle.loads(pickle.dumps(it)), copy.deepcopy])
def test_it_can_be_pickled_and_copied(travel):
    """And so can the rule."""
    assert contents(travel(packed()(FILES))) == FILES
    assert travel(packed()) == packed()


def test_it_is_made_in_the_slot_and_not_copied():
    """The packer finds the bytes where they must be; the reader's tensors are views of them."""
    slab = Slab()
    packer = Packer(slab)
    undo = collate_into(packer)
    slot = slab.take()
    start = np.frombuffer(slab.view(slot), np.uint8).ctypes.data
    files = [bytes([at]) * (WORTH_PLACING // 2 + at) for at in range(3)]
    packer.begin(slot)
    batch = packed()([Labelled(each, at) for at, each in enumerate(files)])
    inside = batch.image.data.data_ptr() - start, batch.image.data.nbytes
    assert 0 <= inside[0] < slot.capacity
    sent = packer.pack(batch)
    del batch
    sent = packer.seal(sent)
    undo()
    assert sent.buffers[0] == inside
    assert [length for _, length in sent.buffers[1:]] == [4 * 8, 3 * 8]  # offsets, labels
    assert len(sent.in_band) < 500
    got = unpack(sent, memory_of(sent, slab, slot))
    assert contents(got.image) == files
    assert got.image.data.data_ptr() - start == inside[0]
    assert 0 <= got.image.offsets.data_ptr() - start < slot.capacity
    del got
    packer.begin(None)
    slab.close()


# ---- through workers ----------------------------------------------------------------------------


class Files(Dataset):
    """Sample i has i kilobytes, of numbers that depend on it."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        data = np.random.default_rng(index).integers(0, 256, 1000 * index, dtype=np.uint8)
        return {"image": data.tobytes(), "label": index}


def expected(label):
    return Files()[label]["image"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 2},
        {"num_workers": 2, "buffer": "10MB", "seed": 0},
        {"num_workers": 2, "backend": "thread", "seed": 0},
    ],
    ids=str,
)
def test_batches_of_workers_are_those_of_one_process(options):
    """Bit for bit, small batches and large ones, also those that are kept."""
    with forebay.DataLoader(
        Files(), batch_size=5, shuffle=True, collate_fn=packed(), **options
    ) as loader:
        kept = list(loader)
    labels = [batch["label"].tolist() for batch in kept]
    assert sorted(itertools.chain.from_iterable(labels)) == list(range(40))
    for batch, of in zip(kept, labels, strict=True):
        assert contents(batch["image"]) == list(map(expected, of))


@pytest.mark.parametrize("refuses", [None, "no page-locked memory"])
def test_files_stay_in_host_memory_beside_tensors_on_a_device(refuses):
    """Also when many batches are kept: each has its own memory on both sides until dropped."""
    device = FakeDevice(seed=1, refuses=refuses)
    options = {"shuffle": True, "seed": 0, "buffer": "10MB", "num_workers": 1}
    with forebay.DataLoader(
        Files(), batch_size=5, collate_fn=packed(), device=device, **options
    ) as loader:
        for kept in list(loader), [batch for batch in loader if batch["label"][0] % 2]:
            for batch in kept:
                assert device.holds(batch["label"])
                assert not device.holds(batch["image"].data)
                assert contents(batch["image"]) == list(map(expected, batch["label"].tolist()))
    assert device.copied >= 16


def test_a_sample_that_is_not_encoded_is_named_by_the_loader():
    """With its number in the batch, and the batch's samples."""

    class Missing(Files):
        def __getitem__(self, index):
            return Labelled(None if index == 7 else b"a", index)

    loader = forebay.DataLoader(Missing(), batch_size=5, collate_fn=packed())
    with pytest.raises(forebay.InputError, match=r"sample 2 of a batch of 5 .* image is None"):
        list(loader)


class CountedFiles(Files):
    """Counts how often it is read."""

    def __init__(self):
        self.reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


class Lengths:
    """A model that returns each sample's length, and has memory for four samples."""

    def __init__(self):
        self.seen = []

    def __call__(self, batch):
        if len(batch["image"]) > 4:
            raise torch.OutOfMemoryError("more than 4 samples")
        self.seen += contents(batch["image"])
        return torch.tensor([len(each) for each in batch["image"]])


@pytest.mark.slow
def test_predict_cuts_a_batch_of_packed_samples_that_does_not_fit(tmp_path):
    """Each sample is read once, and predicted from its own bytes."""
    model, dataset = Lengths(), CountedFiles()
    options = {"batch_size": 8, "num_workers": 0, "collate_fn": packed(), "device": "cpu"}
    forebay.predict(model, dataset, tmp_path, **options, progress=False)
    rows = pyarrow.dataset.dataset(tmp_path).to_table().column("prediction").to_pylist()
    assert rows == [1000 * index for index in range(40)]
    assert model.seen == list(map(expected, range(40)))
    assert dataset.reads == 40
