"""Which kind of loader some arguments make."""

from __future__ import annotations

from typing import Any

from forebay.loading.kind import LoaderKind
from forebay.loading.samplers import planned_sampler
from forebay.loading.selections import RangeSampler


def kind_of_loader(
    sampler: Any, batch_sampler: Any, *, is_stream: bool, is_named: bool
) -> type[LoaderKind]:
    """Return the kind of a loader.

    Args:
        is_stream: Whether the dataset is an iterable one.
        is_named: Whether an argument that torch does not have is given.
    """
    # Each is imported where it is needed: most programs have one kind.
    if is_stream:
        from forebay.loading.iterable_kind import IterableKind

        return IterableKind
    if not is_named:
        from forebay.loading.torch_kind import TorchKind

        return TorchKind
    if isinstance(batch_sampler, RangeSampler):
        from forebay.loading.range_kind import RangeKind

        return RangeKind
    if planned_sampler(sampler, batch_sampler) is None:
        from forebay.loading.sampler_kind import SamplerKind

        return SamplerKind
    from forebay.loading.plan_kind import PlanKind

    return PlanKind
