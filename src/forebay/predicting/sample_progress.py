"""Progress in samples; a session counts parts."""

from __future__ import annotations

from forebay.observe.progress import Progress


class SampleProgress(Progress):
    """Show progress in samples.

    Args:
        total: Number of samples.
        done: Samples of parts that were done before.
        visible: Whether to show anything.
        part_size: Samples per part.
        by_batch: Whether `advance` is called for every batch; otherwise parts are counted.
    """

    def __init__(
        self, total: int, done: int, visible: bool, part_size: int, by_batch: bool
    ) -> None:
        super().__init__(total, done, visible, unit="sample")
        self._part_size, self._by_batch, self._left = part_size, by_batch, total - done

    def update(self, done: int, failed: int) -> None:
        """Add parts that were committed."""
        if not self._by_batch:
            samples = min(done * self._part_size, self._left)  # the last part may be smaller
            self._left -= samples
            self.advance(samples, 0)

    def advance(self, done: int, failed: int) -> None:
        """Add samples that succeeded, and that failed."""
        super().update(done, failed)
