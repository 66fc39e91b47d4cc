"""Fetch the samples of a worker's part of an iterable dataset, in its order.

    first epoch of a worker     the dataset as the trainer has it
    a later one                 the same object, iterated again, as with torch
    the rest of an epoch        a copy that loads the state, or else read again up to there
    the epoch after that        the object that was left alone; or, if the stream continues from
                                epoch to epoch, that with the state of the end

With a seed, the generators of the process are seeded before each sample: from the seed, the epoch,
the worker and the number of the sample. The first `next` of an iterator also runs what comes before
its first sample, such as a shuffle, so there they are as they were when the epoch began. A resume
therefore begins at least a batch earlier, and what that batch was is compared.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any, NoReturn

from torch.utils.data import IterDataPipe
from torch.utils.data.graph_settings import apply_random_seed

from forebay.base import torch_internals
from forebay.base.randomness import (
    generator_states,
    generators_kept,
    seed_generators,
    seeded_generator,
    set_generator_states,
)
from forebay.collating.rules import collated
from forebay.errors import OptionError, WorkerDiedError
from forebay.loading.batch_digest import stream_digest
from forebay.loading.fetch import BatchFetcher, EndOfDataset
from forebay.loading.messages import LOST, STREAM, BatchRequest, BatchSpec, WorkerState
from forebay.loading.snapshots import UnknownState, unpickled
from forebay.loading.user_states import (
    NO_STATE,
    has_state,
    restore_generators,
    saved_generators,
    saved_state,
)
from forebay.pools.events import Refusal
from forebay.seeds import SAMPLE, child_seed, seed_of

NOT_CONTINUED = (
    "the rest of the epoch is not known: {0} gives other samples than those before the state\n"
    "  Worker {1} read its first {2:,} samples again, and they, or the last batch of them, differ. "
    "No sample was returned.\n"
    "  {3} To continue without this check, with samples missing and repeated, "
    "load_state_dict(state, strict=False); or load a state of an epoch's end."
)


class StreamFetcher(BatchFetcher):
    """Fetches samples of this worker's part of an iterable dataset, in its order."""

    def __init__(
        self, spec: BatchSpec, worker_id: int, *, is_replacement: bool, **surroundings: Any
    ) -> None:
        """See `BatchFetcher`; reading begins with `open`."""
        super().__init__(spec, worker_id, is_replacement=is_replacement, **surroundings)
        self._is_replacement = is_replacement
        self._is_compared = self._is_process or spec.tracks_state
        self._epoch: int | None = None
        self._dataset = spec.dataset  # what is read: this, or a copy that has loaded a state
        self._samples: Iterator[Any] | None = None
        self._has_ended = False
        self._seed: int | None = None
        self._read = 0  # samples of the epoch
        self._is_begun = False  # whether the iterator has yielded a sample
        self._generators: dict[str, Any] = {}
        self._digest: int | None = None  # of the last batch of the epoch

    # ---- an epoch ------------------------------------------------------------------------------

    def is_open_for(self, request: BatchRequest) -> bool:
        """See `BatchFetcher`."""
        return request.epoch == self._epoch

    def open(self, request: BatchRequest) -> None:
        """Begin to iterate the dataset; on a resume, read on from the worker's state."""
        spec, worker_id = self._spec, self._worker_id
        self._seed = None
        if request.worker_seed is not None:
            # Whatever worker_init_fn has seeded: in a worker that lives on it is not called again.
            seed = torch_internals.seed_as_worker(
                request.worker_seed, worker_id, with_devices=self._is_process
            )
            if self._is_process:
                torch_internals.set_worker_seed(seed)
            self._seed = seed_of(seed, SAMPLE)
        if isinstance(spec.dataset, IterDataPipe) and request.shared_seed is not None:
            apply_random_seed(spec.dataset, seeded_generator(request.shared_seed, "cpu"))
        state, size = WorkerState(), len(request.index) if spec.auto_collation else 1
        if request.epoch == spec.first_epoch and spec.worker_states:
            state = spec.worker_states[worker_id]
        elif self._dataset is not spec.dataset:  # it has loaded a state
            state = self.state().before_epoch()
        elif self._samples is None and spec.worker_states:
            ended = spec.worker_states[worker_id]  # of the epoch that was resumed
            state = ended.before_epoch() if ended.phase == "ended" else state
        is_new = self._is_replacement and self._epoch is None
        if is_new and request.epoch != spec.first_epoch and not request.preceding:
            name = type(spec.dataset).__name__  # nothing can show whether it is as it was
            raise WorkerDiedError(LOST.format(name, worker_id, request.epoch, 0))
        self._epoch, self._digest = request.epoch, None
        if state.generators:
            restore_generators(spec.dataset, state.generators)
        self._generators = saved_generators(spec.dataset)
        if state.phase == "before" or not (state.is_known and self._resumed(request, state, size)):
            self._begin(spec.dataset, self._continued(state))
            try:
                self._skip(request, state, size)
            except _ElsewhereError as error:
                raise self._not_continued(state, error) from None
        for _ in range(request.preceding):  # what a dead worker returned before
            self._read_again(request)

    def _begin(self, dataset: Any, state: WorkerState) -> None:
        """Begin to iterate, from a state if there is one."""
        if state.dataset is not None:
            dataset.load_state_dict(unpickled(state.dataset))
        samples: Iterator[Any] = iter(dataset)
        # Not before: a dataset that is its own iterator may start over in `__iter__`.
        if state.iterator is not None:
            if not has_state(samples):
                kind = type(samples).__name__
                raise OptionError(NO_STATE.format("dataset's iterator", kind))
            samples.load_state_dict(unpickled(state.iterator))  # type: ignore[attr-defined]
            if state.phase != "within":  # the state is from before this epoch
                samples = iter(dataset)
        self._dataset, self._samples = dataset, samples
        self._has_ended, self._is_begun, self._read = False, False, 0

    def _continued(self, state: WorkerState) -> WorkerState:
        """Return what an epoch begins with: the state of the one before it, or none.

        Many streams begin each epoch anew, but keep a state that was loaded as the place to begin
        at: after that of an epoch's end there is nothing.
        """
        if state.phase != "before" or not state.is_known:
            return WorkerState()
        other = _copy_of(self._spec.dataset)
        if other is not None:
            with generators_kept():
                self._begin(other, state)
                if self._next() is _NOTHING:
                    return WorkerState()
        return state

    def _resumed(self, request: BatchRequest, state: WorkerState, size: int) -> bool:
        """Continue an epoch from a state; return False if that leads elsewhere."""
        dataset, generators = _copy_of(self._spec.dataset), generator_states()
        try:
            self._begin(self._spec.dataset if dataset is None else dataset, state)
            self._read = state.read
            self._draw_on(state)
            self._skip(request, state._replace(read=0), size)
        except OptionError:
            raise
        except Exception as error:
            # Without a digest nothing would show whether it is the same from the beginning.
            if dataset is None or state.digest is None:
                raise self._not_continued(state, error) from error
            set_generator_states(generators)
            return False
        self._has_ended |= state.phase == "ended"
        return True

    def _draw_on(self, state: WorkerState) -> None:
        """Without a seed, do not draw again what was drawn before a position."""
        assert isinstance(state.since, int)
        if self._seed is None and self._is_process and (read := state.read + state.since):
            seed_generators(child_seed(self._spec.base_seed + self._worker_id, read))

    def _skip(self, request: BatchRequest, state: WorkerState, size: int) -> None:
        """Read again what was read before a position, the last of it as the batch that it was."""
        assert isinstance(state.since, int)
        count = state.read + state.since
        while count > 0 and not self._has_ended:
            index = [None] * min(size, count) if self._spec.auto_collation else request.index
            self._read_again(request._replace(index=index))
            count -= size
        if state.digest not in (None, self._digest):
            raise _ElsewhereError

    def _not_continued(self, state: WorkerState, error: Exception | None) -> OptionError:
        why = "Its order depends on more than the seed, the epoch and the worker."
        if self._seed is None:
            why = "Make the loader, and the stream's own shuffle, with a seed."
        if error is not None and not isinstance(error, _ElsewhereError):
            why = f"From its state it raised {type(error).__name__}: {error}. {why}"
        read = state.read + (state.since if isinstance(state.since, int) else 0)
        name = type(self._spec.dataset).__name__
        return OptionError(NOT_CONTINUED.format(name, self._worker_id, read, why))

    # ---- batches -------------------------------------------------------------------------------

    def fetch(self, request: BatchRequest) -> Any:
        """Return the next samples as a list, or the next sample."""
        if self._has_ended:
            raise EndOfDataset
        count = len(request.index) if self._spec.auto_collation else 1
        samples = [*itertools.islice(self._rest(), count)]
        self._has_ended |= len(samples) < count
        if not samples or (self._spec.drop_last and len(samples) < count):
            raise EndOfDataset
        return samples if self._spec.auto_collation else samples[0]

    def _rest(self) -> Iterator[Any]:
        """Yield the samples that are left; none is compared, because `==` may be the user's own."""
        while (sample := self._next()) is not _NOTHING:
            yield sample

    def _next(self) -> Any:
        """Return the next sample; `_NOTHING` at the end."""
        assert self._samples is not None, "open comes first"
        if self._seed is not None and self._is_begun:
            seed_generators(child_seed(self._seed, self._read))
        try:
            sample = next(self._samples, _NOTHING)
        except Exception as error:
            if self._dataset is self._spec.dataset or self._is_begun:
                raise
            raise self._not_continued(WorkerState(read=self._read), error) from error
        self._is_begun, self._read = True, self._read + (sample is not _NOTHING)
        return sample

    def collate(self, request: BatchRequest, samples: Any) -> Any:
        """See `BatchFetcher`; random numbers continue the worker's sequence."""
        batch = collated(self._spec.collate_fn, samples)
        if self._is_compared:
            before, self._digest = self._digest, stream_digest(batch)
            self.digests = before, self._digest
        return batch

    def reads_everything(self) -> bool:
        """See `BatchFetcher`: nothing has asked which worker it is in."""
        is_divided = self._spec.worker_init_fn is not None or torch_internals.asked_for_worker()
        return int(self._spec.num_workers) > 1 and not is_divided

    @staticmethod
    def ended_by(error: BaseException) -> NoReturn:
        """See `BatchFetcher`. A generator has ended then, and could not be read on."""
        raise Refusal(STREAM) from error

    # ---- state ---------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """See `BatchFetcher`: that of the dataset or of its iterator."""
        return has_state(self._dataset) or has_state(self._samples)

    def state(self) -> WorkerState:
        """Return the states of the dataset and its iterator."""
        dataset, samples = self._dataset, self._samples
        iterator = self._state_of(samples)
        state = None if samples is dataset else self._state_of(dataset)
        # Without a state it is read again from its beginning.
        since = self._read if state is iterator is None else 0
        generators, phase = self._generators, "within"
        if self._has_ended:  # with those that its next epoch begins with
            generators, phase = saved_generators(dataset), "ended"
        read = self._read - since
        return WorkerState(state, iterator, phase, since, read, None, generators or None)

    def _state_of(self, thing: Any) -> Any:
        state = saved_state(thing) if has_state(thing) else None
        # With a seed it can be read again from its beginning instead.
        is_needed = self._seed is None or not isinstance(state, UnknownState)
        return state if is_needed else None

    def state_read_here(self) -> WorkerState | None:
        """See `BatchFetcher`."""
        return None if self._samples is None else self.state()


_NOTHING = object()


class _ElsewhereError(Exception):
    """What was read again is not what was read before."""


def _copy_of(dataset: Any) -> Any:
    """Return a copy of a dataset, to load a state; None if it cannot be copied."""
    try:
        return copy.deepcopy(dataset)
    except Exception:  # noqa: BLE001 - from the user's classes
        return None
