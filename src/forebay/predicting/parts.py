"""Make one part: pass its batches through the user's model and write one Parquet file."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from forebay.base.batches import halves, leaves, mapped, moved
from forebay.base.earlier_rows import EarlierRows
from forebay.base.torch_internals import version_of
from forebay.devices.device import Device, device_of
from forebay.errors import FailuresError, OptionError
from forebay.failures import MAX_KEPT, MAX_TRACED, Failure, FailureLog, failure_to_json
from forebay.ledger.database import InputRow, reading
from forebay.ledger.records import Todo
from forebay.observe.progress import log, log_samples_failed
from forebay.observe.record import Trace
from forebay.pools.events import Refusal
from forebay.predicting.checkpoints import Checkpoint, Checkpoints, PartJournal
from forebay.predicting.outputs import (
    Rows,
    Types,
    checked_types,
    rows_of_outputs,
    types_from_json,
    types_to_json,
)
from forebay.predicting.part_writer import PartWriter, earlier_predictions, part_name
from forebay.predicting.reader import Loaded, RangeReader
from forebay.runs.processing import FailureBudget
from forebay.runs.run_state import failed_samples, range_of

if TYPE_CHECKING:
    from forebay.predicting.factory import ModelFactory

# ---- model ---------------------------------------------------------------------------------------
# Recognize factories, and call the user's model.


def is_factory(model: Any) -> bool:
    """Return whether `model` returns a model when called, rather than being one.

    A class does, and a callable that has no required argument and neither *args nor **kwargs.
    """
    if isinstance(model, type):
        return True
    if not callable(model):
        raise OptionError(
            f"the model must be an nn.Module or a function of a batch; got {type(model).__name__}\n"
            "  Nothing was started."
        )
    if isinstance(model, torch.nn.Module):
        return False
    try:
        parameters = inspect.signature(model).parameters.values()
    except (ValueError, TypeError):  # built in
        return False
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(one.default is not one.empty and one.kind not in open_ended for one in parameters)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Set a module to `eval` for the block, and restore the mode of each submodule."""
    if not isinstance(model, torch.nn.Module):
        yield
        return
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


class Model:
    """A model on its device.

    Args:
        device: The device; None for that of the module's parameters.

    Attributes:
        device: Where batches are moved; None if they stay where they are.
    """

    def __init__(self, model: Any, device: str | torch.device | Device | None) -> None:
        self.device = device_of(device)
        self._model = model
        self._is_module = isinstance(model, torch.nn.Module)
        if self._is_module:
            model.eval()
            if self.device is None:
                first = next(model.parameters(), None)
                self.device = None if first is None else first.device
            else:
                model.to(self.device)
        self.copies_to = device if isinstance(device, Device) else self.device

    def __call__(self, batch: Any) -> Any:
        """Return the model's outputs for a batch."""
        if self.device is not None:
            batch = moved(batch, self.device)
        with torch.inference_mode() if self._is_module else nullcontext():
            return self._model(batch)


# ---- bisection -----------------------------------------------------------------------------------
# Calls the model on batches, and halves those on which it fails, down to single samples.


class Predicted(NamedTuple):
    """What the model returned for some samples."""

    indices: list[int]
    outputs: Any


class Bisection:
    """Calls a model, and attributes its exceptions to single samples.

    Once the device runs out of memory, further batches are no larger than what fits.

    Attributes:
        model_s: Seconds in the model; halving a batch counts.
        failing_s: The part of that for batches with samples that fail.
    """

    def __init__(
        self, model: Callable[[Any], Any], load: Callable[[list[int]], Iterator[Loaded]]
    ) -> None:
        self._model, self._load = model, load
        self._most: int | None = None  # samples that fit on the device
        self.model_s = self.failing_s = 0.0

    def __call__(self, loaded: Loaded) -> Iterator[Predicted | Failure]:
        """Yield the model's outputs for a batch, in its order, and the samples that failed."""
        left, is_failing = [loaded], False
        while left:
            one = left.pop()
            yield from one.failures
            count = len(one.indices)
            if not count:
                continue
            if self._most is None or count <= self._most:
                before, most, began = _state(one.batch), self._most, time.perf_counter()
                outcome = self._tried(one)
                is_failing |= outcome is None and self._most == most
                self._add_time(began, is_failing)
                if outcome is not None:
                    yield outcome
                    continue
                if _state(one.batch) != before:  # its halves would be predicted from other values
                    one = one._replace(batch=None)
            began = time.perf_counter()
            left += reversed(self._halves(one))
            self._add_time(began, is_failing)

    def _add_time(self, began: float, is_failing: bool) -> None:
        took = time.perf_counter() - began
        self.model_s += took
        self.failing_s += took if is_failing else 0.0

    def _tried(self, one: Loaded) -> Predicted | Failure | None:
        """Return the outputs, or the failure of a single sample; None to halve the batch."""
        count, index = len(one.indices), one.indices[0]
        # The exception must be freed before the next try: its frames hold what filled the memory.
        try:
            return Predicted(one.indices, self._model(one.batch))
        except torch.OutOfMemoryError as error:
            self._most = max(count // 2, 1)
            text = "memory ran out with a batch of %d samples: from now on they have at most %d"
            log.info(text, count, self._most)
            failure = Failure.of(error, source=index) if count == 1 else None
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises
            if count > 1:
                return None
            from forebay.predicting.model_inputs import note_on_batch

            note_on_batch(error, one.batch)
            return Failure.of(error, source=index)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return failure

    def _halves(self, one: Loaded) -> list[Loaded]:
        middle = len(one.indices) // 2
        indices = one.indices[:middle], one.indices[middle:]
        cut = halves(one.batch, len(one.indices))
        if cut is not None:
            return [Loaded(*pair) for pair in zip(indices, cut, strict=True)]
        return [loaded for half in indices for loaded in self._load(half)]


def _state(batch: Any) -> list[tuple[Any, ...]]:
    """Return a list that differs after a batch was changed, in place or as a container."""
    return [(id(leaf), _version(leaf)) for leaf in leaves(batch)]


def _version(leaf: Any) -> object:
    if isinstance(leaf, np.ndarray):
        return object()  # an array does not tell, so it counts as changed
    version = version_of(leaf) if isinstance(leaf, torch.Tensor) else 0
    return object() if version < 0 else version


# ---- results -------------------------------------------------------------------------------------
# Bring the model's outputs to host memory while it works on the next batch.

Wait = Callable[[], None]


def copy_from_gpu(outputs: Any) -> tuple[Any, Wait] | None:
    """Start to copy outputs that are on a GPU to page-locked memory; None if none are."""
    device = next((each.device for each in leaves(outputs) if _is_on_gpu(each)), None)
    if device is None:
        return None
    copies = mapped(_copied, outputs)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return copies, event.synchronize


def _is_on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def _copied(leaf: Any) -> Any:
    if not _is_on_gpu(leaf) or leaf.layout is not torch.strided or leaf.is_nested:
        return leaf
    return leaf.detach().to("cpu", non_blocking=True)


def in_host_memory(
    outcomes: Iterator[Predicted | Failure],
    start: Callable[[Any], tuple[Any, Wait] | None] = copy_from_gpu,
) -> Iterator[Predicted | Failure]:
    """Yield outcomes in their order, with outputs on a GPU copied to host memory.

    Such a copy is started, without waiting, when the model has been called, and awaited after the
    model was called for the next batch. Other outcomes are yielded as they come.

    Args:
        start: Starts to copy outputs; returns the copy and how to wait for it, or None if they are
            in host memory.
    """
    started: tuple[Predicted, Wait] | None = None
    for outcome in outcomes:
        before, started = started, None
        if isinstance(outcome, Predicted) and (copy := start(outcome.outputs)) is not None:
            outputs, wait = copy
            started = outcome._replace(outputs=outputs), wait
        if before is not None:
            yield _awaited(*before)
        if started is None:
            yield outcome
    if started is not None:
        yield _awaited(*started)


def _awaited(outcome: Predicted, wait: Wait) -> Predicted:
    wait()
    return outcome


# ---- completed -----------------------------------------------------------------------------------
# The parts that are done, as recorded in the ledger.


class CompletedParts(NamedTuple):
    """A summary of the parts that are done.

    Attributes:
        columns: The types of the predictions that hold those of all parts; None if there are none.
        weights: Hashes of the weights of factories' models, if they have any.
    """

    rows: int
    failures: FailureLog
    columns: Types | None
    failing: list[Todo]
    weights: frozenset[str]

    @property
    def samples(self) -> int:
        """Number of samples in these parts."""
        return self.rows + self.failures.total

    @classmethod
    def of(cls, results: Iterable[InputRow]) -> CompletedParts:
        """Add up the records of the parts."""
        rows, failures, columns = 0, FailureLog(), None
        failing: list[Todo] = []
        weights = set[str]()
        with reading("a part"):
            for result in results:
                record = json.loads(result.metadata)[0]
                rows += int(record["rows"])
                weights.add(str(record["weights"]))
                failures.extend(failed_samples(record)[0])
                if record["failures"]:
                    failing.append(Todo(result.ordinal, result.source, result.row))
                if record["columns"] is not None:
                    own = types_from_json(record["columns"])
                    first = range_of(result.row)[0]
                    columns = checked_types(columns or {}, own, first)
        return cls(rows, failures, columns, failing, frozenset(weights - {""}))

    @staticmethod
    def narrower(results: Iterable[InputRow], columns: Types) -> dict[Todo, dict[str, Any]]:
        """Return the parts whose columns are not these, with their records."""
        described = types_to_json(columns)
        found = {}
        with reading("a part"):
            for result in results:
                record = json.loads(result.metadata)[0]
                own = record["columns"]
                if own is not None and (own, [*own]) != (described, [*described]):
                    found[Todo(result.ordinal, result.source, result.row)] = record
        return found

    @staticmethod
    def without_rows(results: Iterable[InputRow]) -> list[int]:
        """Return the ordinals of the parts in which every sample failed."""
        return [each.ordinal for each in results if not json.loads(each.metadata)[0]["rows"]]


def record_of(rows: int, columns: Types, failures: list[Failure], weights: str) -> Any:
    """Return the JSON-serializable record of one part, which `CompletedParts.of` reads."""
    kept = sorted(failures, key=lambda failure: failure.index)
    kept[MAX_TRACED:] = [each._replace(traceback="") for each in kept[MAX_TRACED:]]
    kept[MAX_KEPT:] = [each._replace(message="") for each in kept[MAX_KEPT:]]
    return {
        "rows": rows,
        "columns": types_to_json(columns) if rows else None,
        "failures": [*map(failure_to_json, kept)],
        "weights": weights,
    }


# ---- parts ---------------------------------------------------------------------------------------

# Programs read the files of a folder in the order of their names: with a sixth digit, part 100000
# would come before part 99999.
MOST_PARTS = 100_000


def check_number_of_parts(samples: int, size: int) -> None:
    """Raise OptionError if samples in parts of this size are too many files to be in order."""
    parts = -(-samples // size)
    if parts > MOST_PARTS:
        raise OptionError(
            f"{samples:,} samples in parts of {size:,} would be {parts:,} files; the names of at "
            f"most {MOST_PARTS:,} are in order\n"
            f"  Nothing was started. Use part_size={-(-samples // MOST_PARTS)} or more. If this "
            "output folder has parts already, also use another one, or resume=False."
        )


class MadeHere(NamedTuple):
    """What a run needs whose parts are made in this process, by a model that is here."""

    advance: Callable[[int, int], None]
    trace: Trace


class PartWork:
    """Makes the part for a row of "first" and "count"; returns its record for the ledger.

    Args:
        parts: All parts that are to be made, in order.
        table: The metadata columns, a row per sample; None if there are none.
        names: The names of the samples, for failures; None if they have none.
        model: The model; None with a factory.
        here: How parts are made in this process; None with a factory.
        factory: What makes a model in each worker.
        earlier: Which predictions are taken over from files of an earlier run.
    """

    def __init__(
        self,
        reader: RangeReader,
        model: Any,
        parts: Sequence[range],
        checkpoints: Checkpoints,
        *,
        device: str | torch.device | Device | None,
        table: pa.Table | None,
        names: pa.Array | None,
        known: Types | None,
        here: MadeHere | None,
        factory: ModelFactory | None,
        earlier: EarlierRows,
    ) -> None:
        self._names, self._earlier = names, earlier
        self._checkpoints, self._left = checkpoints, list[Sequence[int]]()
        self._resumed: dict[int, list[Checkpoint]] = {}
        if here is None:  # a worker with its own model loads its batches itself
            reader = replace(reader, num_workers=0, backend="process", timeout=0, settings={})
        else:  # the samples of several parts are loaded in one pass
            known_names = checkpoints.names()
            for part in parts:
                samples = earlier.left(part.start, len(part))
                if found := checkpoints.read(part.start, samples, known_names):
                    self._resumed[part.start] = found
                self._left.append(samples[found[-1].end if found else 0 :])
        self._reader, self._model_here, self._here = reader, model, here
        self._factory = factory
        self._device, self._table, self._known = device, table, known or {}
        self._model: Model | None = None
        self._bisect: Bisection | None = None
        self._reading: Iterator[Loaded] | None = None
        self._budget = FailureBudget(None, 0, watch=known is None, unit="sample", counts_rows=False)

    def __call__(self, row: dict[str, int], out: Any) -> Any:
        """Write the part; in the user's process an exception ends the run as it is."""
        try:
            return self._written(row, out)
        except BaseException as error:
            if self._here is None:
                raise
            raise Refusal("stop") from error

    def _written(self, row: dict[str, int], out: Any) -> Any:
        part = range(row["first"], row["first"] + row["count"])
        name = part_name(part.start // self._reader.part_size)
        failures: list[Failure] = []
        samples = self._earlier.left(part.start, len(part))
        at = 0
        with PartWriter(lambda: out.file(name), self._table, self._known) as writer:
            rows = self._take_over(part, writer)
            for checkpoint in self._checkpoints_of(part.start, samples):
                for found in checkpoint.rows:
                    writer.add(found)
                    rows += len(found.indices)
                failures += checkpoint.failures
                at = checkpoint.end
            journal = PartJournal(
                self._checkpoints, part.start, samples, at, self._reader.batch_size
            )
            for outcome in self._converted(self._outcomes(samples[at:]), writer):
                if isinstance(outcome, Rows):
                    writer.add(outcome)
                    rows += len(outcome.indices)
                    self._budget.succeeded()
                    journal.add_rows(outcome)
                else:
                    outcome = outcome.named(self._name_of(outcome.index))
                    traced = len(failures) < MAX_TRACED
                    failures.append(outcome if traced else outcome._replace(traceback=""))
                    self._stop_if_all_fail(outcome)
                    journal.add_failure(failures[-1])
                if self._here is not None:  # this is the user's process
                    if isinstance(outcome, Failure):
                        log_samples_failed([outcome])
                    done = len(outcome.indices) if isinstance(outcome, Rows) else 0
                    self._here.advance(done, 0 if done else 1)
        if rows:
            self._known = writer.types
        weights = "" if self._factory is None else self._factory.weights
        return record_of(rows, writer.types, failures, weights)

    @staticmethod
    def _converted(
        outcomes: Iterator[Predicted | Failure], writer: PartWriter
    ) -> Iterator[Rows | Failure]:
        """Yield the rows of outcomes, and the samples that failed, with those that do not fit."""
        for outcome in in_host_memory(outcomes):
            if isinstance(outcome, Failure):
                yield outcome
                continue
            rows, failures = rows_of_outputs(outcome.outputs, outcome.indices, writer.types)
            yield from failures
            if rows.indices:
                yield rows

    @property
    def resumed(self) -> int:
        """How many samples of the parts checkpoints had; 0 where a factory's workers read them."""
        return sum(each.end - each.first for found in self._resumed.values() for each in found)

    def _checkpoints_of(self, first: int, samples: Sequence[int]) -> list[Checkpoint]:
        if self._here is None:
            return self._checkpoints.read(first, samples)
        return self._resumed.get(first, [])

    def _name_of(self, index: int) -> str | None:
        """Return the name of a sample; None if it has none."""
        return None if self._names is None else str(self._names[index]) or None

    def _take_over(self, part: range, writer: PartWriter) -> int:
        """Add the predictions that earlier files have; return their number."""
        taken = self._earlier.taken(part.start, len(part))
        if taken:
            writer.take_over(earlier_predictions(taken))
        return sum(len(each.indices) for each in taken)

    @property
    def failing_share(self) -> float:
        """The part of the model's time that batches with failing samples took, from 0 to 1."""
        return self._bisect.failing_s / max(self._bisect.model_s, 1e-9) if self._bisect else 0.0

    def close(self) -> None:
        """End the workers that load samples."""
        if self._reading is not None:
            self._reading.close()  # type: ignore[attr-defined]

    def _outcomes(self, samples: Sequence[int]) -> Iterator[Predicted | Failure]:
        """Yield the outputs or failures for these samples of a part."""
        here, count = self._here, len(samples)
        if not count and self._factory is None:
            return
        if self._model is None:  # a factory's even for no sample, to compare its weights
            model = self._model_here if self._factory is None else self._factory.model()
            self._model = Model(model, self._device)
            self._bisect = Bisection(self._model, self._reader.load)
        assert self._bisect is not None
        if here is None:  # a worker with its own model makes its batches itself, one by one
            self._reading = self._reader.read([samples])
        elif self._reading is None:
            reader = replace(self._reader, device=self._model.copies_to)
            self._reading = reader.read(self._left, here.trace)
        while count:
            loaded = next(self._reading)
            count -= len(loaded.indices) + len(loaded.failures)
            yield from self._bisect(loaded)

    def _stop_if_all_fail(self, failure: Failure) -> None:
        """Raise FailuresError if all samples so far failed alike; counts over all parts."""
        if reason := self._budget.attempt_failed(failure.index, failure.error):
            raise FailuresError(
                f"stopped early: {reason}\n  The last of them, {failure}\n"
                "  The same call tries every part without a prediction again. Fix the cause "
                f"first.\n{failure.traceback}"
            )
