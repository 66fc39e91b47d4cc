"""Progress in samples, where what a session counts is parts."""

from __future__ import annotations

from forebay.observe.progress import Progress


class SampleProgress(Progress):
    """Shows samples.

    Args:
        total: Samples in all.
        done: Samples of parts that were done before.
        visible: Show anything at all.
        part_size: Samples of a part.
        by_batch: Whether `advance` tells of every batch; otherwise parts are counted.
    """

    def __init__(
        self, total: int, done: int, visible: bool, part_size: int, by_batch: bool
    ) -> None:
        super().__init__(total, done, visible, unit="sample")
        self._part_size, self._by_batch, self._left = part_size, by_batch, total - done

    def update(self, done: int, failed: int) -> None:
        """Take note that so many parts were committed."""
        if not self._by_batch:
            samples = min(done * self._part_size, self._left)  # the last part may be smaller
            self._left -= samples
            self.advance(samples, 0)

    def advance(self, done: int, failed: int) -> None:
        """Take note that so many samples came through, and so many did not."""
        super().update(done, failed)
