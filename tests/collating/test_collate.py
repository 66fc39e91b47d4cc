"""forebay.collate: rules by field, the sample that does not fit, and how batches travel."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import ones
from torch.utils.data import Dataset, default_collate

import forebay
from documents import program
from forebay.collate import as_list, by_field, default, pad
from forebay.memory.packed_batch import memory_of, unpack
from forebay.memory.packing import WORTH_PLACING, Packer, collate_into
from forebay.memory.slab import Slab
from labelled import Labelled, Record

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"


def broken(values):
    raise KeyError("nothing here")


# ---- by_field -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda image, label: {"image": image, "label": label},
        lambda image, label: OrderedDict(label=label, image=image),
        Labelled,
        Record,
    ],
    ids=["dict", "OrderedDict", "NamedTuple", "dataclass"],
)
def test_each_field_goes_by_its_rule(make):
    """The container is of the samples' type, and what has no rule is as torch makes it."""
    samples = [make([1, 2], 3), make([4], 5)]
    batch = by_field(image=pad())(samples)
    assert type(batch) is type(samples[0])
    get = batch.__getitem__ if isinstance(batch, dict) else lambda name: getattr(batch, name)
    assert get("image").tolist() == [[1, 2], [4, 0]]
    assert torch.equal(get("label"), default_collate([3, 5]))
    assert make([1, 2], 3) == samples[0], "samples are left alone"


def test_by_field_itself_is_no_collate_fn():
    """It gets the samples where it expects rules."""
    with pytest.raises(forebay.OptionError, match=r"got a list\n.* makes one: by_field\(image=pad"):
        next(iter(forebay.DataLoader([{"x": 1}], collate_fn=by_field)))


def test_a_field_without_a_rule_needs_one_besides_the_others():
    """To use the advised rule alone would make the next field the odd one."""
    samples = [{"a": [1], "b": [1]}, {"a": [1, 2], "b": [1, 2]}]
    with pytest.raises(forebay.InputError, match=r"by_field\(b=pad\(\)\) .*Keep the other rules"):
        by_field(a=pad())(samples)
    with pytest.raises(forebay.InputError, match="by_field") as caught:
        default(samples)
    assert "Keep" not in str(caught.value)


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_tuple_has_its_fields_by_place(kind):
    """And stays what it is, where torch would make a list of it."""
    batch = by_field({0: as_list, 2: sum})([kind((ones(1), 1, 2)), kind((ones(2), 3, 4))])
    assert type(batch) is kind
    assert [each.shape for each in batch[0]] == [(1,), (2,)]
    assert batch[1].tolist() == [1, 3]
    assert batch[2] == 6


def test_rules_are_nested_as_fields_are():
    """A field that has fields goes by a by_field of its own."""
    rule = by_field({"left eye": by_field({1: pad(lengths=True)})}, name=as_list)
    batch = rule([{"left eye": (1, [1]), "name": "a"}, {"left eye": (2, [2, 3]), "name": None}])
    assert batch["name"] == ["a", None]
    assert batch["left eye"][1].values.tolist() == [[1, 0], [2, 3]]


@pytest.mark.parametrize(
    "sample", [{"image": 1, "label": 2}, Labelled(1, 2), Record(1, 2)], ids=str
)
def test_a_rule_for_no_field_is_an_error_that_names_those_there_are(sample):
    """A misspelt name must not collate by default in silence."""
    with pytest.raises(forebay.OptionError, match=r"'imgae', but .* fields 'image', 'label'"):
        by_field(imgae=pad())([sample])


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([{"a": 1}, {"a": 1}, {"a": 1, "b": 2}], "sample 2 .* a dict with 'a', 'b'; in 2 others"),
        ([{"a": 1}, None], "sample 1 of a batch of 2 does not fit: it is None"),
        ([(1, 2), (1, 2), (1,)], "sample 2 .* a tuple of 1; in 2 others it is a tuple of 2"),
        ([3, 4], "a batch of 2 cannot be made: every sample is an int"),
    ],
)
def test_samples_with_other_fields_are_named(samples, words):
    """A field that only some samples have would be lost."""
    with pytest.raises(forebay.InputError, match=words):
        by_field({"a": as_list, 0: as_list})(samples)


def test_what_a_users_rule_raises_names_the_field():
    """Its type and words are the user's."""
    with pytest.raises(KeyError) as caught:
        by_field(a=by_field(b=broken))([{"a": {"b": 1}}])
    assert caught.value.__notes__ == ["forebay.collate: it was raised by the rule for field a.b"]


# ---- the sample that does not fit ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("odd", "usual", "words", "advice"),
    [
        (
            {"x": (1, ones(2, 3))},
            {"x": (1, ones(2, 2))},
            "field x[1] is a tensor of shape (2, 3); in 3 others it is a tensor of shape (2, 2)",
            "collate_fn=by_field(x=by_field({1: pad()})) to pad",
        ),
        (
            Labelled(ones(1), None),
            Labelled(ones(1), 2),
            "field label is None; in 3 others",
            "as_list",
        ),
        ({"a": 1, "n": [1]}, {"a": 0.5, "n": [1, 2]}, "field n is a list of 1; in 3", "n=pad()"),
        (None, ones(2), "it is None; in 3 others it is a tensor of shape (2,)", "=as_list"),
    ],
)
def test_default_names_what_torch_does_not(odd, usual, words, advice):
    """Whatever torch says, the place, the field and both shapes or types are told."""
    with pytest.raises(forebay.InputError) as caught:
        default([usual, usual, odd, usual])
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("sample 2 of a batch of 4 does not fit: " + words)
    assert advice in "\n".join(rest)
    assert isinstance(caught.value.__cause__, Exception), "torch's own words are kept"


@pytest.mark.parametrize("samples", [[1, None, 2], [None, None, 1], [None]])
@pytest.mark.parametrize("collate", [default, by_field(a=as_list), pad()])
def test_a_sample_that_is_none_is_told_how_to_be_left_out(samples, collate):
    """Other libraries drop None; here it is the exception that leaves a sample out."""
    with pytest.raises(forebay.InputError, match=r"let the Dataset raise .* use on_error='skip'"):
        collate(samples)
    with pytest.raises(forebay.InputError) as caught:
        default([{"a": one} for one in (1, None, 2)])
    assert "on_error" not in str(caught.value), "a field may well be None"


def test_default_says_what_nothing_stacks():
    """All samples alike, and none of a type that torch knows."""
    with pytest.raises(forebay.InputError, match=r"made: field \[1\] of every sample is None"):
        default([(1, None), (2, None)])


@pytest.mark.parametrize(
    "value",
    [
        np.datetime64("2026-01-01"),
        np.array(["2026-01-01"], "M8[D]"),
        np.ones(2, ">f4"),
        np.ones(1, [("a", "i4")]),
        torch.eye(2).to_sparse(),
    ],
    ids=["date", "dates", "byte order", "structured", "sparse"],
)
def test_a_dtype_that_torch_cannot_stack_is_named_with_its_field(value):
    """torch's error says what it was, not where."""
    with pytest.raises(forebay.InputError, match=r"made: field x of every sample is an? "):
        default([{"x": value}, {"x": value}])


def test_a_dataclass_is_collated_as_the_message_says():
    """torch does not know them; any field's rule is enough."""
    samples = [Record(ones(2), 1), Record(ones(2), 2)]
    with pytest.raises(forebay.InputError, match=r"Use collate_fn=by_field\(FIELD=default\) to"):
        default(samples)
    batch = by_field(image=default)(samples)
    assert (batch.image.shape, batch.label.tolist()) == ((2, 2), [1, 2])


class Sizes(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"name": index, "data": ones(3 if index == 3 else 2)}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"seed": 0}], ids=str)
def test_a_loader_names_it_in_a_note_and_says_what_torch_says(options):
    """PyTorch's issue 116558: the error stays torch's, drop-in, and the note tells the rest."""
    loader = forebay.DataLoader(Sizes(), batch_size=8, **options)
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size") as caught:
        next(iter(loader))
    told = "\n".join([str(caught.value), *caught.value.__notes__])
    assert "sample 3 of a batch of 8 does not fit: field data is a tensor of shape (3,)" in told
    assert "samples [0, 1, 2, 3, 4, 5, 6, 7]" in told


# ---- travelling ---------------------------------------------------------------------------------

RULES = [pad(), pad(-1, multiple_of=(1, 8), lengths=True), as_list, default, by_field(x=pad())]


@pytest.mark.parametrize(
    "rule", RULES, ids=["pad", "pad with lengths", "as_list", "default", "by_field"]
)
def test_rules_can_be_pickled(rule):
    """And are equal to what comes out."""
    assert pickle.loads(pickle.dumps(rule)) == rule


def test_a_padded_batch_is_made_in_the_slot_and_not_copied():
    """The packer finds its bytes where they must be."""
    slab = Slab()
    packer = Packer(slab)
    undo = collate_into(packer)
    slot = slab.take()
    start = np.frombuffer(slab.view(slot), np.uint8).ctypes.data
    samples = [ones(3, WORTH_PLACING // 8), 2 * ones(2, WORTH_PLACING // 4)]
    packer.begin(slot)
    batch = pad(9)(samples)
    inside = batch.data_ptr() - start, batch.nbytes
    packed = packer.pack(batch)
    del batch
    packed = packer.seal(packed)
    undo()
    assert packed.buffers == (inside,)
    assert packed.nbytes == inside[1] + len(packed.in_band)
    assert torch.equal(unpack(packed, memory_of(packed, slab, slot)), pad(9)(samples))
    packer.begin(None)
    slab.close()


@pytest.mark.slow
def test_the_module_and_its_name_are_one(script):
    """`import forebay.collate` and `forebay.collate` give the same, in either order."""
    code = """
import forebay, sys
sys.modules.pop("forebay.collate", None)
vars(forebay).pop("collate", None)
from forebay import collate
import forebay.collate as module
assert collate is module is forebay.collate
del sys.modules["forebay.collate"], forebay.collate
import forebay.collate as module
from forebay import collate
assert collate is module is forebay.collate
"""
    assert script(code).end() == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["collate.md", "datasets.md", "metrics.md"])
def test_the_code_of_the_how_to_runs(name, trainers, tmp_path):
    """Every Python block, in order, as a script of its own in an empty folder."""
    script = tmp_path / "how_to.py"
    script.write_text(program((HOW_TO / name).read_text(encoding="utf-8")), encoding="utf-8")
    done = trainers.run(script, cwd=tmp_path)
    assert done.code == 0, done
