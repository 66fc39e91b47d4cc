"""Which kind of loader some arguments make, and its feed; impossible arguments are refused."""

from __future__ import annotations

import warnings
from pickle import PicklingError
from typing import TYPE_CHECKING, Any

from torch.utils.data import DistributedSampler, default_collate

from forebay.base.datasets import sequence_rows
from forebay.base.torch_internals import library_call
from forebay.buffer import warn_of_unfilled_buffer
from forebay.devices.device import check_loader_device
from forebay.errors import OptionError
from forebay.loading.kind import LoaderKind
from forebay.loading.samplers import planned_sampler
from forebay.loading.selections import RangeSampler
from forebay.options import check_backend, check_positive, check_timeout

if TYPE_CHECKING:  # imported where a loader needs it
    from forebay.devices.device import Device
    from forebay.loading.feed import Feed
    from forebay.loading.local_feed import LocalFeed
    from forebay.loading.messages import BatchSpec
    from forebay.loading.workers import WorkerTuning
    from forebay.observe.record import Trace


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


def replaced_by_lightning(sampler: Any) -> Any:
    """Return the planned sampler of the loader that Lightning makes again, to divide its samples.

    Lightning passes the loader's arguments with a DistributedSampler, which shuffles in any case.
    None: it does not do that now, or the loader has no plan.
    """
    if type(sampler) is not DistributedSampler:
        return None
    remade = library_call("lightning", "_reinstantiate_wrapped_cls", 8)
    if remade is None:
        return None
    loader = remade["orig_object"]
    return planned_sampler(loader.sampler, loader.batch_sampler)


def feed_of(
    kind: LoaderKind,
    spec: BatchSpec,
    trace: Trace,
    tuning: WorkerTuning | None = None,
    device: Device | None = None,
) -> Feed | LocalFeed:
    """Return a new feed and begin to start its workers."""
    if kind.is_local:
        from forebay.loading.local_feed import LocalFeed

        return LocalFeed(kind, spec, trace)
    from forebay.loading.feed import Feed

    if kind.start_method != "fork" and kind.cluster is None:
        from forebay.pools.job_loading import check_main

        check_main(kind.start_method, spec.dataset, spec.collate_fn, spec.worker_init_fn)
    try:
        return Feed(kind, spec, trace, tuning, device)
    except (TypeError, AttributeError, PicklingError):
        if kind.start_method != "fork":
            warnings.warn(
                "Got pickle error when attempting to start a worker Process: with this start "
                "method the dataset, collate_fn and worker_init_fn have to be picklable. Define "
                "them at the top of a module, or use multiprocessing_context='fork'.",
                stacklevel=2,
            )
        raise


def check_arguments(kind: LoaderKind) -> None:
    """Refuse impossible values and combinations of forebay's own arguments."""
    ranks, rows = kind.ranks, sequence_rows(kind.dataset).values()
    check_backend(kind.backend)
    _check("on_error", kind.on_error, ("raise", "skip"))
    _check("tail", kind.tail, ("repeat", "uneven", "fill"))
    if kind.seed is not None and type(kind.seed) is not int:
        raise OptionError(f"seed={kind.seed!r} is not valid; it must be an integer or None")
    if kind.concurrency is not None:
        check_positive("concurrency", kind.concurrency, " or None")
    if kind.timeout and kind.num_workers:  # torch itself refuses negative values
        check_timeout(kind.timeout)
    kind.check_timeout()
    if kind.device is not None:
        check_loader_device(kind.device)
    buffer, workers, backend = kind.buffer, kind.num_workers, kind.backend
    on_cluster = kind.cluster is not None
    alone = kind.one_at_a_time if kind.at_once_each > 1 else ""
    refused = [
        (
            buffer is not None and buffer.directory is not None and backend == "thread",
            "Buffer(directory=) is not possible with backend='thread', whose batches are the "
            "trainer's own memory\n"
            "  Nothing was started. Use backend='process', or a buffer in memory.",
        ),
        (
            kind.generator is not None and kind.seed is not None,
            f"generator= with seed={kind.seed} would have no effect: all random numbers come "
            "from the seed, which is 0 for ranks if none is given\n"
            "  Nothing was started. Leave out one of them; seed=generator.initial_seed() keeps "
            "runs apart as the generator did.",
        ),
        (
            on_cluster and not workers,
            "backend='ray' with num_workers=0: no worker on the cluster would make batches\n"
            "  Nothing was started. Set the number of workers for the cluster to run.",
        ),
        *kind.refused_combinations(),
        (
            bool(alone),
            f"concurrency={kind.concurrency!r} is impossible with "
            f"{type(kind.dataset).__name__}: {alone}\n"
            "  Nothing was started. Leave concurrency out, or pass a map-style dataset whose "
            "__getitem__ reads one sample.",
        ),
        (
            ranks is not None
            and isinstance(kind.sampler, DistributedSampler)
            and kind.kind_name != "plan",
            "world_size= and a DistributedSampler would both divide the samples among ranks\n"
            "  Nothing was started. Leave the sampler out, with shuffle=True if it shuffled; or "
            "pass world_size='auto', which leaves them to the sampler.",
        ),
        (
            ranks is not None and kind.batch_size is None and not rows,
            "world_size= with batches of the user's own: they cannot be divided among ranks"
            "\n  Nothing was started. Pass batch_size=, and sampler= if need be; or give this "
            "rank's batches only, without world_size.",
        ),
        (
            kind.device_transform is not None and kind.device is None,
            "device_transform= needs device=, which says where it runs\n"
            "  Nothing was started. Pass device='cuda', or device='cpu' for host memory.",
        ),
        (
            not (kind.device_transform is None or callable(kind.device_transform)),
            f"device_transform={kind.device_transform!r} is not valid; it must be a function of "
            "a batch",
        ),
        (
            kind.tail != "repeat" and kind.world_size is None,
            f"tail={kind.tail!r} applies to ranks, but world_size= is not given",
        ),
        (
            kind.batch_size is not None and not all(each.is_packed for each in rows),
            "batch_by_length makes whole batches, and batch_size= would make batches of them\n"
            "  Nothing was started. Pass batch_size=None, and a collate_fn that pads, such as "
            "forebay.collate.pad().",
        ),
        (
            kind.collate_fn is default_collate and any(each.is_packed for each in rows),
            "rows of pack_sequences are lists of samples of different lengths, which torch's "
            "default_collate cannot stack\n"
            "  Nothing was started. Pass collate_fn=forebay.collate.sequences(size=...), or a "
            "function of your own.",
        ),
    ]
    for is_refused, words in refused:
        if is_refused:
            raise OptionError(words)
    if buffer is not None and not workers:
        warn_of_unfilled_buffer()


def _check(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        options = " or ".join(map(repr, allowed))
        raise OptionError(f"{name}={value!r} is not valid; it must be {options}")
