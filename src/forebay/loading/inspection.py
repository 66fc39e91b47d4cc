"""What a loader is asked, at any time: where it is, its statistics, and a batch once more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakMethod, ref

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from forebay.failures import Failure
from forebay.loading.kind import LoaderKind
from forebay.loading.progress import LoaderProgress
from forebay.observe.figures import Statistics

if TYPE_CHECKING:  # few loaders are asked
    from forebay.observe.diagnosis import Diagnosis

_T_co = TypeVar("_T_co", covariant=True)


def page_of_loader(kind: WeakMethod[Any], progress: ref[LoaderProgress]) -> Any:
    """Return what `forebay top` shows of a loader; see `LiveLoader`."""
    from forebay.loading.facts import LiveLoader

    return LiveLoader(kind, progress)


class InspectedLoader(TorchDataLoader[_T_co]):
    """What can be asked of a `DataLoader`."""

    _loader_progress: LoaderProgress
    _prepared: Any = None  # the `accelerated.Prepared` of a loader that Accelerate uses

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Whether Accelerate takes the loader as it is; asked by an Accelerator, it gets ready."""
        from forebay.loading.accelerated import prepared_for_caller

        return prepared_for_caller(self)

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Accept what Accelerate sets on all that it has prepared."""

    def _kind(self) -> LoaderKind:
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The current epoch; after its last batch, or before the first iteration, the next one."""
        return self._loader_progress.epoch

    @property
    def mask(self) -> torch.Tensor:
        """Which samples of the last returned batch count: a bool tensor, one value per sample.

        False for a sample that is only repeated to give all ranks equal steps (`tail="repeat"`).

        Raises:
            OptionError: No batch was returned yet.
        """
        return self._loader_progress.mask()

    @property
    def failures(self) -> list[Failure]:
        """The samples that were left out so far (`on_error="skip"`), in order: the first 1,000."""
        return list(self._loader_progress.failures)

    def statistics(self) -> Statistics:
        """Return counts and times of the loader so far; cheap, and possible at any time."""
        return self._loader_progress.statistics(self._kind())

    def diagnose(self) -> Diagnosis:
        """Return why training waits, and what to change: `print(loader.diagnose())`.

        It looks at the last 2,048 steps at most, and takes about 0.1 s, at any time.
        """
        from forebay.loading.facts import diagnosis_of, setup_now

        progress = self._loader_progress
        setup = setup_now(progress.setup or self._kind().setup, progress.trace)
        return diagnosis_of(progress.trace, setup, self.dataset)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write what happened so far to a self-contained HTML file: charts, waits, slow samples.

        The file opens without a network, stays below 300 KB, and can be read by `forebay.compare`.

        Args:
            path: Where. An earlier report is replaced.

        Returns:
            The path of the file.

        Raises:
            OptionError: There is a file that is not a report; it was left as it is.
            OSError: The file cannot be written.
        """
        from forebay.loading.facts import report_of

        return report_of(self._kind(), self._loader_progress, path)

    def save_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write the last steps and batches one by one, for Perfetto or chrome://tracing.

        A row for training has its waits, its steps and how many batches were ready, and a row for
        each worker the batches that it made: at most 2,048 of each; of those that take less than
        2 ms, some. Times are those of the day, in microseconds.

        Args:
            path: Where, such as "loader.trace.json". A file of that name is replaced.

        Returns:
            The path of the file.

        Raises:
            OSError: The file cannot be written.
        """
        from forebay.loading.facts import trace_of

        return trace_of(self._kind(), self._loader_progress.trace, path)

    def replay(self, *, epoch: int, batch: int) -> Any:
        """Rebuild one batch in this process, for debugging, without affecting the iteration.

        The dataset is used as it is: if it has `set_epoch`, call that for the epoch first.

        Args:
            epoch: The batch's epoch, from 0.
            batch: The batch's number in the epoch, from 0.

        Returns:
            The same batch, bit for bit.

        Raises:
            OptionError: The loader has no seed.
            IndexError: The epoch has no such batch.
            Exception: What the dataset or collate_fn raised, with the traceback of this call.
        """
        from forebay.loading.replay import replayed

        return replayed(self._kind(), self._loader_progress, epoch, batch)
