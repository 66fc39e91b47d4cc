"""forebay.collate.pad: samples of different sizes in one batch, and what cannot be padded."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import ones

import forebay
from forebay.collate import Padded, as_list, by_field, pad


@pytest.mark.parametrize(
    "shapes",
    [
        [(3,), (1,), (0,)],
        [(2, 5), (3, 4)],
        [(3, 180, 200), (3, 220, 190), (1, 1, 1)],
        [(2, 0), (0, 2)],
        [(), ()],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_samples_are_where_they_were_and_all_else_is_padding(shapes, dtype):
    """Small batches and large ones, any dimension different."""
    samples = [torch.randint(1, 9, shape).to(dtype) for shape in shapes]
    batch = pad(7)(samples)
    expected = torch.full((len(shapes), *map(max, zip(*shapes, strict=True))), 7, dtype=dtype)
    for row, sample in enumerate(samples):
        expected[(row, *map(slice, sample.shape))] = sample
    assert batch.dtype is dtype
    assert batch.is_contiguous()
    assert torch.equal(batch, expected)


def test_arrays_and_sequences_are_padded_as_tensors_are():
    """Also arrays that are read-only or reversed, of which torch would warn or complain."""
    read_only = np.array([4, 5])
    read_only.flags.writeable = False
    samples = [np.array([1, 2, 3])[::-1], read_only, [6], (7, 8), torch.tensor([9]), []]
    expected = [[3, 2, 1], [4, 5, 0], [6, 0, 0], [7, 8, 0], [9, 0, 0], [0, 0, 0]]
    assert pad()(samples).tolist() == expected


def test_an_empty_sequence_is_like_the_others():
    """An image without boxes has a list of none, whatever a box is."""
    assert pad()([[[1, 2]], []]).tolist() == [[[1, 2]], [[0, 0]]]
    assert pad()([[], []]).shape == (2, 0)


def test_sizes_are_rounded_up():
    """An int is for the length alone; several are for a dimension each."""
    samples = [ones(3, 5, 7), ones(3, 6, 2)]
    assert pad(multiple_of=4)(samples).shape == (2, 4, 6, 7)
    assert pad(multiple_of=(1, 4, 8))(samples).shape == (2, 3, 8, 8)


def test_a_multiple_may_be_an_integer_of_numpy():
    """As one that was computed from the sizes of a dataset."""
    assert pad(multiple_of=np.int64(4))([ones(3)]).shape == (1, 4)


def test_lengths_and_a_mask_come_along():
    """The mask is True where a sample's own values are."""
    batch = pad(-1, multiple_of=4, lengths=True)([ones(2, 3), ones(5, 1), ones(0, 1)])
    assert type(batch) is Padded
    assert batch.values.shape == (3, 8, 3)
    assert batch.lengths.dtype is torch.int64
    assert batch.lengths.tolist() == [2, 5, 0]
    assert batch.mask.tolist() == [[k < n for k in range(8)] for n in (2, 5, 0)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (
            [ones(2), ones(3), ones(2, 2), ones(4)],
            "sample 2 of a batch of 4 does not fit: it is float32 with 2 dimensions, of shape "
            "(2, 2); in 3 others it is float32 with 1 dimension",
        ),
        ([[1], [2, 3], [0.5]], "sample 2 of a batch of 3 does not fit: it is float32 with"),
        ([[1], ["a"]], "sample 1 of a batch of 2 does not fit: it is a list of 1, which is no"),
        ([[1], None], "sample 1 of a batch of 2 does not fit: it is None"),
        ([ones(2), torch.eye(2).to_sparse()], "sample 1 of a batch of 2 does not fit: it is a"),
        ([ones(2), ones(2).requires_grad_()], "with a gradient: detach()"),
        (
            [ones(2), torch.nested.nested_tensor([ones(1)], layout=torch.jagged)],
            "it is a nested tensor",
        ),
    ],
)
def test_what_cannot_be_padded_is_named(samples, words):
    """Its place, what it is, and what the others are, in the first line."""
    with pytest.raises(forebay.InputError) as caught:
        pad()(samples)
    assert words in str(caught.value).splitlines()[0]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_named():
    """torch cannot allocate one without its scale."""
    samples = [torch.quantize_per_tensor(ones(2), 0.1, 0, torch.quint8)] * 2
    with pytest.raises(forebay.InputError, match=r"it is a tensor of shape \(2,\), quint8"):
        pad()(samples)


@pytest.mark.parametrize(
    "samples", [[(ones(2), 1)] * 2, [{"x": ones(2)}] * 2], ids=["tuple", "dict"]
)
def test_the_way_to_pad_a_field_is_named(samples):
    """The first thing to try with a sequence and its label is pad() alone."""
    with pytest.raises(forebay.InputError, match=r"by_field\(NAME=pad\(\)\), or by_field\(\{INDEX"):
        pad()(samples)


@pytest.mark.parametrize("asked", [{"lengths": True}, {"multiple_of": 8}], ids=str)
def test_too_few_dimensions_are_said(asked):
    """A number has no length."""
    with pytest.raises(forebay.InputError) as caught:
        pad(**asked)([ones(()), ones(())])
    assert "a batch of 2 cannot be made: every sample is a tensor of" in str(caught.value)
    assert "need 1 dimension or more" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (-100, torch.uint8),
        (0.5, torch.int64),
        (float("nan"), torch.int32),
        (2, torch.bool),
        (1e9, torch.float16),
    ],
)
def test_a_value_must_be_one_of_the_dtype(value, dtype):
    """torch would wrap or cut it, and say nothing."""
    with pytest.raises(forebay.OptionError, match=r"is not a value of .* in field x"):
        by_field(x=pad(value))([{"x": ones(2, dtype=dtype)}])


def test_minus_infinity_is_a_value_of_floats():
    """Attention is masked with it."""
    assert pad(float("-inf"))([ones(1), ones(2)])[0, 1] == float("-inf")


@pytest.mark.parametrize(
    "value", [Fraction(1, 4), np.float16(0.25), np.uint64(2**64 - 1), 10**30, True], ids=repr
)
def test_a_number_of_any_type_is_padded_with(value):
    """Also those that torch does not take itself."""
    for samples in ([ones(3), ones(1)], [ones(2, 2), ones(1, 3)]):
        assert pad(value)(samples).flatten()[-1] == torch.tensor(float(value))
    assert pad(Fraction(3))([[1], [1, 2]]).tolist() == [[1, 3], [1, 2]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: pad([ones(2)]),
        lambda: pad(multiple_of=0),
        lambda: pad(multiple_of=(1, 1.5)),
        lambda: pad(multiple_of=8.0),
        lambda: pad(multiple_of=2**60),
        lambda: pad(multiple_of=(2**30, 2**30)),
        lambda: pad(10**400),
        lambda: pad(lengths=None),
        by_field,
        lambda: by_field(image=pad),
        lambda: by_field(image="pad"),
        lambda: by_field({"image": pad()}, image=as_list),
    ],
)
def test_what_is_impossible_is_said_before_the_first_batch(make):
    """`collate_fn=pad` without its brackets among them."""
    with pytest.raises(forebay.OptionError):
        make()
