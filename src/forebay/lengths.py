"""`forebay.pack_sequences` and `forebay.batch_by_length`: rows and batches by tokens.

    dataset, lengths ──> sample_rows.py: which share a row ──> SequenceRows: a map-style dataset

A row is a list of samples. Everything else is a loader's usual work: the rows are shuffled, shared
by ranks, resumed, mixed and made in workers as any samples are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from operator import index as as_index
from typing import Any, Literal
from zlib import crc32

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from forebay.base.batches import items_in, leaves, mapped
from forebay.base.datasets import cached_samples, getitems_of
from forebay.base.formatting import counted, noun_for
from forebay.base.origins import Origin, content_digests
from forebay.columns.token_counts import token_counts
from forebay.errors import InputError, OptionError, short_tracebacks
from forebay.options import check_positive
from forebay.sample_rows import (
    PatternsOf,
    SampleRows,
    arranged,
    grouped_patterns,
    packed_patterns,
    tally,
)
from forebay.seeds import EPOCH, Integers

Long = Literal["split", "truncate", "drop", "raise"]
_LONG = ("split", "truncate", "drop", "raise")
Cost = Callable[[npt.NDArray[np.float64]], npt.ArrayLike]

# How much longer the longest samples of a class of `batch_by_length` are than its shortest, at
# most: about half of that is padding.
RATIO = 1.03
# The first and last token of a piece have 32 bits.
LONGEST = 2**31 - 1
# Samples that are packed together at least, where they are read by blocks: rows are well filled.
PACKED_TOGETHER = 1024
# A first dimension of a field of two that is no longer is its channels, as of a waveform.
MOST_CHANNELS = 2


@short_tracebacks
def pack_sequences(
    dataset: Any,
    lengths: Any,
    *,
    size: int,
    long: Long = "split",
    window: int | None = None,
    cost: Cost | None = None,
) -> SequenceRows:
    """Pack samples of different lengths into rows of one size, for a `forebay.DataLoader`.

    A sample of the returned dataset is a row: a list of samples that together have at most `size`
    tokens. `forebay.collate.sequences(size=size)` makes tensors of a batch of rows.

    Which samples share a row depends on the lengths and the epoch alone, so a loader's state stays
    a few numbers, and any number of ranks has the same global batches. The number of rows is the
    same in every epoch. Among the ranks of a global batch, rows are dealt by `cost`, longest first.

    The longest sample that is left begins a row, and those that fill it best follow. In each epoch,
    samples of equal length change places at random.

    Args:
        dataset: A map-style dataset. A sample is a tensor, array or list of tokens, or a container
            with at least one field of as many items as the sample has tokens.
        lengths: The number of tokens of each sample: integers, one for each sample; the name of a
            column of a `cache`, of a Hugging Face dataset, of the table of `from_table` (with
            `load` or `columns`), or of `open_shards`, whose values are numbers, or lists to be
            counted; or a function that returns either for the dataset. If a cached sample is itself
            a tensor, its column is `sample`. For JSON lines a column is a field, and for tars an
            extension, whose bytes are counted. From Parquet and Arrow files, only this column is
            read.
        size: Tokens of a row, at most.
        long: What to do with a sample of more than `size` tokens: "split" it into pieces,
            "truncate" it to its first `size` tokens, "drop" it, or "raise" an error.
        window: Samples that are packed together: the first `window` ones, the next, and so on.
            None packs all of them together, which fills rows best. For a dataset that a loader
            reads by windows of blocks, the samples of consecutive blocks are packed together, of at
            least so many samples; None is 1,024. The rows are then read by windows, too.
        cost: What a sample costs in a step, as a function of an array of lengths; None for the
            square of the length, which is what attention costs.

    Returns:
        A map-style dataset of rows. Without a forebay.DataLoader, `rows[i]` is row `i` of epoch 0.

    Raises:
        OptionError: An argument is impossible.
        InputError: The lengths do not belong to the dataset, one is not positive, or one is longer
            than `size` with `long="raise"`; the message names the sample.
    """
    check_positive("size", size)
    if long not in _LONG:
        raise OptionError(f"long={long!r} is not valid; it must be one of {', '.join(_LONG)}")
    known = token_counts(dataset, lengths)
    if long == "raise":
        _check_longest(known, size, "size")
    firsts, sizes = _pieces(known, size, long)
    bounds = _bounds(dataset, known, window)
    if firsts is not None:
        bounds = firsts[bounds]
    rows = _rows(sizes, cost, partial(packed_patterns, size=size), np.unique(bounds))
    blocks = _blocks(dataset, window, bounds, rows)
    return SequenceRows(dataset, known, rows, size, int(sizes.sum()), firsts, by_blocks=blocks)


@short_tracebacks
def batch_by_length(
    dataset: Any,
    lengths: Any,
    *,
    max_tokens: int,
    max_samples: int | None = None,
    window: int | None = None,
    cost: Cost | None = None,
) -> SequenceRows:
    """Make padded batches of samples of similar lengths, for a `forebay.DataLoader`.

    A sample of the returned dataset is a batch: a list of samples. Their number times the longest
    is at most `max_tokens`. Load it with `batch_size=None` and a `collate_fn` that pads:
    `forebay.DataLoader(groups, batch_size=None, collate_fn=forebay.collate.pad())`.

    With `shuffle=True` the batches come in random order. Every epoch has the same number of them,
    and so has every rank. In each epoch, samples of nearly equal lengths (3 %) change places at
    random.

    Args:
        dataset: A map-style dataset.
        lengths: As in `pack_sequences`. A sample may be shorter; if its longest field has more
            items than that, and none as many, taking its batch raises InputError, since the batch
            would have more than `max_tokens`.
        max_tokens: Tokens of a batch at most, padding included.
        max_samples: Samples of a batch, at most.
        window: As in `pack_sequences`.
        cost: As in `pack_sequences`, for each sample padded to the longest of its batch.

    Returns:
        A map-style dataset of lists of samples.

    Raises:
        OptionError: An argument is impossible.
        InputError: The lengths do not belong to the dataset, one is not positive, or one is more
            than `max_tokens`; the message names the sample.
    """
    check_positive("max_tokens", max_tokens)
    if max_samples is not None:
        check_positive("max_samples", max_samples, " or None")
    known = token_counts(dataset, lengths)
    _check_longest(known, max_tokens, "max_tokens")
    patterns = partial(grouped_patterns, max_tokens=max_tokens, max_samples=max_samples)
    bounds = _bounds(dataset, known, window)
    rows = _rows(known, cost, patterns, bounds, ratio=RATIO)
    blocks = _blocks(dataset, window, bounds, rows)
    tokens = int(known.sum())
    return SequenceRows(dataset, known, rows, max_tokens, tokens, is_packed=False, by_blocks=blocks)


def _check_longest(lengths: Integers, most: int, name: str) -> None:
    too_long = lengths > most
    if too_long.any():
        at = int(np.argmax(too_long))
        raise InputError(
            f"sample {at} has {lengths[at]:,} tokens, more than {name}={most:,}; so have "
            f"{int(too_long.sum()):,} of {len(lengths):,} samples\n"
            f"  Nothing was packed. Choose a larger {name}, or shorten the samples: pack_sequences "
            'does with long="split" or "truncate".'
        )


def _bounds(dataset: Any, lengths: Integers, window: int | None) -> Integers:
    """Return where each window of samples begins, and the end of the last."""
    if window is not None:
        check_positive("window", window, " or None")
    if (groups := _groups(dataset, window)) is not None:
        return np.asarray(groups[:, 0])
    return np.append(np.arange(0, len(lengths), window or len(lengths)), len(lengths))


def _groups(dataset: Any, window: int | None) -> Integers | None:
    """Return where groups of blocks begin, of a dataset that a loader reads by windows of these."""
    cached = cached_samples(dataset)
    if cached is None or cached.window is None:
        return None
    found: Integers = cached.groups(window or PACKED_TOGETHER)
    return found


def _blocks(dataset: Any, window: int | None, bounds: Integers, rows: SampleRows) -> Any:
    """Return what says how rows are read by blocks; None if samples may come from anywhere."""
    cached, groups = cached_samples(dataset), _groups(dataset, window)
    if cached is None or groups is None:
        return None
    kept = np.diff(bounds) > 0  # no sample is left of some groups with long="drop"
    ranges = np.stack([groups[:-1, 1], groups[1:, 1]], axis=1)[kept]
    return cached.rows_of(ranges, rows.bounds)


def _pieces(lengths: Integers, size: int, long: Long) -> tuple[Integers | None, Integers]:
    """Return the first piece of each sample, and their number, and the length of each piece.

    The first pieces are None if each sample is one piece.
    """
    if int(lengths.max()) <= size:
        return None, lengths
    if long == "truncate":
        return None, np.minimum(lengths, size)
    counts = lengths <= size if long == "drop" else -(-lengths // size)
    firsts = np.append(0, np.cumsum(counts)).astype(np.uint32)
    if not firsts[-1]:
        _check_longest(lengths, size, "size")
    pieces = np.arange(firsts[-1], dtype=np.uint32)
    pieces -= np.repeat(firsts[:-1], counts)
    return firsts, np.minimum(np.repeat(lengths, counts) - pieces.view(np.int32) * size, size)


def _rows(
    lengths: Integers,
    cost: Cost | None,
    patterns_of: PatternsOf,
    bounds: Integers,
    ratio: float = 1.0,
) -> SampleRows:
    """Return the rows of samples or pieces of these lengths; see `arranged`."""
    most = int(lengths.max())
    is_table = most < 4 * len(lengths)  # ten times as fast as a search
    different = np.flatnonzero(tally(lengths, most + 1)) if is_table else np.unique(lengths)
    classes: Integers = np.arange(len(different))
    if ratio > 1:
        classes = np.unique(np.floor(np.log(different) / np.log(ratio)), return_inverse=True)[1]
    longest = different[np.append(np.diff(classes), 1) > 0]
    number = classes.astype(np.min_scalar_type(len(longest)))  # 16 bits are sorted fast
    if is_table:
        table = np.zeros(most + 1, number.dtype)
        table[different] = number
        own: Integers = table[lengths]
    else:
        own = number[np.searchsorted(different, lengths)]
    each = longest.astype(np.float64)
    costs = each**2 if cost is None else np.asarray(cost(each), np.float64)
    if costs.shape != each.shape or not (costs >= 0).all() or not np.isfinite(costs).all():
        raise OptionError("cost takes an array of lengths, and returns a cost for each, from 0")
    with ThreadPoolExecutor(1) as thread:
        given = own, bounds.tolist(), longest, costs, patterns_of, thread.submit
        return arranged(*given, padded=ratio > 1)


# ---- dataset -------------------------------------------------------------------------------------


@dataclass(repr=False, eq=False)
class SequenceRows(Dataset[Any]):
    """Rows of samples; made by `pack_sequences` and `batch_by_length`.

    Attributes:
        dataset: The dataset of the samples.
        lengths: The tokens of each sample.
        rows: Which samples each row has, in every epoch.
        size: Tokens of a row, at most.
        tokens: Tokens of all rows.
        firsts: The first piece of each sample, and their number; None if each is one piece.
        is_packed: Whether a row is packed; otherwise it is a batch to be padded.
        by_blocks: What says how rows are read by blocks; None if rows come in any order.
    """

    dataset: Any
    lengths: Integers
    rows: SampleRows
    size: int
    tokens: int
    firsts: Integers | None = None
    is_packed: bool = True
    by_blocks: Any = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[Any]:
        """Return a row: a list of samples, cut where a sample was split.

        Args:
            index: The number of the row; plus `10**12` times the epoch for another than epoch 0.

        Raises:
            InputError: A sample has another number of tokens than its length says.
        """
        numbers, begins = self._members(index)
        together = getitems_of(self.dataset)
        try:
            found = together(numbers) if together else [self.dataset[at] for at in numbers]
        except Exception as error:
            error.add_note(f"forebay: row {index % EPOCH} is made of samples {numbers}")
            raise
        if not self.is_packed:
            for each, number in zip(found, numbers, strict=True):
                self._check_padded(each, number)
            return list(found)
        return [self._cut(*each) for each in zip(found, numbers, begins, strict=True)]

    @cached_property
    def _arrangement(self) -> int:
        """A checksum of what decides which samples a row has."""
        return crc32(np.ascontiguousarray(self.rows.bounds).data, crc32(self.lengths.data))

    def origins(self, *, reads: bool = True) -> Sequence[Origin]:
        """Return the rows: each is made of all samples, so none stays if there are more."""
        del reads
        of_samples = content_digests(self.dataset) or ":"
        stamp = f"{self._arrangement:08x}-{self.size}-{of_samples}"
        return (Origin("", stamp, len(self)),)

    def members(self, index: int) -> list[int]:
        """Return the indices of a row's samples in the dataset, as `rows[index]` has them."""
        return self._members(index)[0]

    def costs_of(self, indices: Integers) -> npt.NDArray[np.float64]:
        """Return what rows cost, by their indices: float64 [rows]."""
        return self.rows.costs_of(indices % EPOCH)

    @property
    def filled(self) -> float:
        """The share of all rows that is tokens."""
        return self.tokens / (len(self) * self.size if self.is_packed else self.rows.space)

    def __repr__(self) -> str:
        kind = noun_for(len(self), "row") if self.is_packed else "batch" + "es" * (len(self) != 1)
        return (
            f"<SequenceRows: {counted(len(self.dataset), 'sample')} in {len(self):,} {kind} of up "
            f"to {self.size:,} tokens, {self.filled:.2%} filled>"
        )

    def _members(self, index: int) -> tuple[list[int], list[int]]:
        """Return a row's samples, and the first token of each that is in the row."""
        at = as_index(index)
        epoch, row = divmod(at, EPOCH) if at >= 0 else (0, at + len(self))
        if not 0 <= row < len(self):
            raise IndexError(f"there is no row {index}: there are {len(self):,}")
        pieces = self.rows.samples(row, epoch)
        if self.firsts is None:
            return pieces.tolist(), [0] * len(pieces)
        samples = np.searchsorted(self.firsts, pieces, side="right") - 1
        return samples.tolist(), ((pieces - self.firsts[samples]) * self.size).tolist()

    def _check_padded(self, sample: Any, number: int) -> None:
        """Raise InputError for a sample that is longer than its length: its batch would be, too.

        A shorter one does no harm. What is not a tensor, an array or a list may become any number
        of tokens in `collate_fn`.
        """
        length = int(self.lengths[number])
        sizes = [each for leaf in leaves(sample, lists=False) for each in _sizes_of(leaf)]
        if sizes and length not in sizes and max(sizes) > length:
            raise _other_length(number, sizes, length)

    def _cut(self, sample: Any, number: int, begin: int) -> Any:
        """Return the tokens of a sample from `begin` on that belong into a row."""
        length = int(self.lengths[number])
        sizes = [items_in(leaf) for leaf in leaves(sample, lists=False)]
        if length not in sizes:
            raise _other_length(number, [each for each in sizes if each is not None], length)
        end = min(begin + self.size, length)
        if begin == 0 and end == length:
            return sample
        return mapped(
            lambda value: value[begin:end] if items_in(value) == length else value,
            sample,
            lists=False,
        )


def _sizes_of(leaf: Any) -> list[int]:
    """Return what may be the number of tokens of a field; a waveform may have channels first."""
    items = items_in(leaf)
    if items is None:
        return []
    has_channels = items <= MOST_CHANNELS and getattr(leaf, "ndim", 1) == 2
    return [items, leaf.shape[1]] if has_channels else [items]


def _other_length(number: int, sizes: list[int], length: int) -> InputError:
    return InputError(
        f"sample {number} has {' and '.join(map(str, sizes)) or 'no'} tokens, but its length was "
        f"given as {length}\n"
        "  Give the lengths of this dataset, in its order; a random transform must not change them."
    )
