"""Batches of sample ranges, in order, each with the samples that could not be loaded.

    parts 2 3 5 ──> ranges of samples ──> the loader's planner and feed ──> Loaded, Loaded, …

A batch never crosses the end of a part. A sample's random numbers depend on its index only, so
they are the same for any batch size and number of workers, and after a kill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from forebay.devices.device import Device, copying_device
from forebay.errors import OutputError
from forebay.failures import Failure
from forebay.loader import DataLoader
from forebay.loading.epochs import feed_of
from forebay.loading.messages import BatchError, BatchRequest, BatchResult, Result
from forebay.loading.planner import Planner
from forebay.loading.settings import Settings
from forebay.loading.sources import Reader, Selection, Source, Start
from forebay.observe.record import Trace
from forebay.options import (
    Ray,
)

if TYPE_CHECKING:
    from forebay.observe.diagnosis import Diagnosis

# The seed of samples that draw random numbers.
SEED = 0


class Loaded(NamedTuple):
    """One batch, ready for the model.

    Attributes:
        batch: The collated samples; None if there are none.
    """

    indices: list[int]
    batch: Any
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeReader:
    """Reads a dataset range by range. Picklable if the dataset is.

    Attributes:
        collate_fn: Makes a batch of a list of samples; None for torch's default.
        num_workers: Number of workers; 0 for this process; None for as many as a cluster has room
            for, with a factory; an `AutoWorkers` for as many as the model needs.
        device: Where batches of worker processes are copied before they are taken, if there is
            memory; None for host memory.
    """

    dataset: Any
    part_size: int
    batch_size: int
    collate_fn: Callable[[Any], Any] | None
    num_workers: int | None
    backend: str | Ray
    timeout: float
    settings: dict[str, Any]
    device: torch.device | Device | None = None

    def read(self, parts: Sequence[Sequence[int]], trace: Trace | None = None) -> Iterator[Loaded]:
        """Yield the batches of these samples of parts, one part after the other.

        Every sample comes exactly once, in `indices` or in `failures`.
        """
        size = self.batch_size
        batches = (part[at : at + size] for part in parts for at in range(0, len(part), size))
        return self._read(batches, self.num_workers or 0, self.backend, trace)

    def load(self, indices: Sequence[int]) -> Iterator[Loaded]:
        """Load samples again in this process; yield one batch, or several if collating fails."""
        return self._read([indices], 0, "process")

    def diagnosis(self, trace: Trace) -> Diagnosis:
        """Return why the model waited, while a trace was recorded."""
        from forebay.loading.facts import diagnosis_of, setup_of

        loader = self._loader(self.num_workers or 0, self.backend)
        setup = setup_of(Settings(loader), trace)
        return diagnosis_of(
            trace, replace(setup, consumer="the model", step="the model", concurrency=None)
        )

    def _loader(self, num_workers: int, backend: str | Ray) -> DataLoader[Any]:
        in_workers: dict[str, Any] = {"backend": backend, "timeout": self.timeout}
        return DataLoader(
            self.dataset,
            batch_size=self.batch_size,
            collate_fn=self.collate_fn,
            num_workers=num_workers,
            seed=SEED,
            on_error="skip",
            **(in_workers | self.settings if num_workers else {}),
        )

    def _read(
        self,
        batches: Iterable[Sequence[int]],
        num_workers: int,
        backend: str | Ray,
        trace: Trace | None = None,
    ) -> Iterator[Loaded]:
        settings = Settings(self._loader(num_workers, backend))
        planner = Planner(RangeSource(batches), settings)
        trace = Trace() if trace is None else trace
        spec, tuning = settings.spec(seed=SEED), settings.tuning(trace)
        device = copying_device(self.device) if num_workers else None
        feed = feed_of(settings, spec, trace, tuning, device)
        try:
            planner.begin(feed, Start(0))
            while (found := planner.take()) is not None:
                yield from self._loaded(*found)
        finally:
            feed.close()

    def _loaded(self, request: BatchRequest, result: Result) -> Iterator[Loaded]:
        indices = list(request.index)
        if isinstance(result, BatchResult):
            failed = {failure.index for failure in result.failures}
            kept = [index for index in indices if index not in failed] if failed else indices
            yield Loaded(kept, result.batch, tuple(map(_of_sample, result.failures)))
        elif len(indices) == 1:
            yield Loaded([], None, (_of_sample(_failure(result), indices[0]),))
        else:
            middle = len(indices) // 2
            in_worker = int(isinstance(result, Failure))  # a sample may kill its process
            # Not on a cluster, where it could wait for ever for room that the others have.
            backend = self.backend if self.backend in ("process", "thread") else "process"
            yield from self._read([indices[:middle], indices[middle:]], in_worker, backend)


class RangeSource(Source):
    """Selections of given samples, one batch for each list."""

    kind = "plan"

    def __init__(self, batches: Iterable[Sequence[int]]) -> None:
        self._batches = batches

    def open(self, start: Start, order: int | None) -> Reader:
        """See `Source`; a sample's position is its index."""
        return Reader(Selection(list(batch), batch[0]) for batch in self._batches)


def _failure(result: Result) -> Failure:
    """Return the failure of a batch that could not be made."""
    if isinstance(result, Failure):
        return result
    assert isinstance(result, BatchError)
    try:
        result.reraise()
    except Exception as error:  # noqa: BLE001 - whatever the collate function raises
        return Failure.of(error)


def _of_sample(failure: Failure, index: int | None = None) -> Failure:
    source = failure.source if index is None else index
    return failure._replace(source=source, epoch=None, batch=None, exception=None)


# ---- prediction columns --------------------------------------------------------------------------
# A model's outputs as columns of a table: names, types and shapes, the same in the whole run.
#
# tensor                     prediction
# dict, NamedTuple           a column for each key or field, by its name
# tuple, list                0, 1, …

INDEX, SOURCE = "index", "source"
ALONE = "prediction"
# A column's type and the shape of one sample's value, such as ["float32", [10]]; as in JSON.
Spec = list[Any]
# Arrays with one row per sample, by column.
Columns = dict[str, np.ndarray[Any, Any]]


def columns_of(outputs: Any, indices: list[int]) -> Columns:
    """Return a model's outputs by column, each a new array with one row per sample."""
    columns: Columns = {}
    for name, value in _named(outputs):
        if name in columns:  # the keys 1 and "1" of a dict
            raise OutputError(
                f"two of the columns that the model returned would be called {name!r}\n"
                "  Nothing of this part was kept. Return them in a dict, with strings as its keys."
            )
        if not isinstance(value, torch.Tensor | np.ndarray):
            raise OutputError(
                f"the model returned {_kind(value)} as {name!r}, for the batch of samples "
                f"{_shown(indices)}\n"
                "  It has to return tensors or arrays whose first dimension is the batch, or a "
                "dict, NamedTuple or tuple of them. Wrap the model in a function that does."
            )
        if odd := _oddity(value):
            raise OutputError(
                f"the model returned {name!r} as a {odd}, which Parquet cannot store\n"
                "  Return a dense tensor or a plain array: to_dense(), to_padded_tensor(), "
                "dequantize() or filled() makes one."
            )
        rows = value.shape[0] if value.ndim else 0
        if rows != len(indices):
            raise OutputError(
                f"the model returned {rows:,} row{'s' * (rows != 1)} as {name!r} for "
                f"{len(indices):,} sample{'s' * (len(indices) != 1)}: {_shown(indices)}\n"
                f"  Its shape is {tuple(value.shape)}, and the first dimension has to be the "
                "batch. Nothing of this part was kept. Have the model return one row per sample."
            )
        if 0 in value.shape[1:]:
            raise OutputError(
                f"the model returned {name!r} of shape {tuple(value.shape)}: its rows are empty\n"
                "  Nothing of this part was kept. Leave it out of what the model returns."
            )
        columns[_storable(name, "the name of a column")] = _array(name, value)
    if not columns:
        raise OutputError(
            f"the model returned an empty {type(outputs).__name__} for the batch of samples "
            f"{_shown(indices)}\n  Have it return at least one tensor, with one row per sample."
        )
    return columns


def specs_of(columns: Columns) -> dict[str, Spec]:
    """Return the type and shape of each column."""
    return {
        name: ["str" if array.dtype.kind == "U" else array.dtype.name, list(array.shape[1:])]
        for name, array in columns.items()
    }


def check_specs(known: Mapping[str, Spec], found: Mapping[str, Spec], index: int) -> None:
    """Check that a batch has the columns of the run, in any order."""
    for name in dict.fromkeys((*known, *found)):
        was, now = known.get(name), found.get(name)
        if was != now:
            raise OutputError(
                f"sample {index} has {_spec_text(now)} as {name!r}, and the samples before had "
                f"{_spec_text(was)}\n"
                "  A column has one type and one shape. Nothing of this part was kept. Have the "
                "model return the same for every sample: pad, cut or reduce what varies. "
                "To switch to the new columns, start over: resume=False, or --restart."
            )


def _named(outputs: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(outputs, Mapping):
        yield from ((str(name), value) for name, value in outputs.items())
    elif isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        yield from zip(outputs._fields, outputs, strict=True)
    elif isinstance(outputs, list | tuple):
        yield from ((str(at), value) for at, value in enumerate(outputs))
    else:
        yield ALONE, outputs


def _oddity(value: torch.Tensor | np.ndarray[Any, Any]) -> str:
    """Return the kind of a value that is not a plain array; "" for one that is."""
    if isinstance(value, np.ndarray):
        return "masked array" if isinstance(value, np.ma.MaskedArray) else ""
    if value.is_nested:
        return "nested tensor"
    if value.layout != torch.strided:
        return "sparse tensor"
    return "quantized tensor" if value.is_quantized else "meta tensor" if value.is_meta else ""


def _array(name: str, value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.is_floating_point() and value.dtype not in _FLOATS:
            value = value.float()  # NumPy and Arrow have neither bfloat16 nor float8
        value = value.resolve_conj().resolve_neg()  # such as the imaginary part of a conjugate
        # Always a copy: it may be a view of a batch whose memory is reused, or of the model's
        # state.
        array = np.array(value.cpu().numpy(), order="C")
    else:
        array = np.array(value, order="C")
    if array.dtype.kind == "b" and array.ndim > 1:
        array = array.view(np.uint8)  # Arrow has no tensors of bool
    if array.dtype.kind == "U":
        _storable("".join(array.flat), f"a string of {name!r}")
    storable = "biuf" if array.ndim > 1 else "biufU"
    if array.dtype.kind not in storable or array.dtype.char == "g":  # a long double
        raise OutputError(
            f"the model returned {name!r} as {array.dtype}, which Parquet cannot store\n"
            "  Return numbers of up to 64 bits; torch.view_as_real turns complex ones into two."
        )
    return array


_FLOATS = (torch.float16, torch.float32, torch.float64)


def _storable(text: str, what: str) -> str:
    """Return a string; raise OutputError if it has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = slice(max(error.start - 20, 0), error.end + 20)
        raise OutputError(
            f"the model returned {text[at]!r} in {what}, which Parquet cannot store: it is not "
            "valid Unicode\n"
            "  Nothing of this part was kept. Replace such characters: "
            "text.encode(errors='replace').decode()."
        ) from None
    return text


def _spec_text(spec: Spec | None) -> str:
    if spec is None:
        return "nothing"
    return f"{spec[0]} of shape {tuple(spec[1])}"


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _shown(indices: list[int]) -> str:
    last = f" … {indices[-1]}" if len(indices) > 1 else ""
    return f"{indices[0]}{last}"
