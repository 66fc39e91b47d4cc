"""Check a loader's arguments: impossible values and combinations."""

from __future__ import annotations

import torch
from torch.utils.data import DistributedSampler

from forebay.devices.which_device import check_loader_device
from forebay.errors import OptionError
from forebay.loading.settings import Settings
from forebay.mixing import MixedDataset
from forebay.options import AutoWorkers, check_backend, check_timeout, cluster_of
from forebay.torch_internals import accepts


def check(settings: Settings) -> None:
    """Refuse impossible values and combinations of forebay's own arguments.

    Raises:
        OptionError: About the first impossible value or combination.
    """
    loader, ranks = settings.loader, settings.ranks
    check_backend(loader.backend)
    _check("on_error", loader.on_error, ("raise", "skip"))
    _check("tail", loader.tail, ("repeat", "uneven"))
    if loader.seed is not None and type(loader.seed) is not int:
        raise OptionError(f"seed={loader.seed!r} is not valid; it must be an integer or None")
    if loader.timeout and loader.num_workers:  # torch itself refuses negative values
        check_timeout(loader.timeout)
    check_loader_device(loader.device)
    buffer, workers, backend = loader.buffer, loader.num_workers, loader.backend
    on_cluster = cluster_of(backend) is not None
    refused = [
        (
            buffer is not None and not workers,
            "buffer= with num_workers=0: no worker would fill it\n"
            "  Nothing was started. Set num_workers to 1 or more, or leave buffer out: each "
            "batch is then made when it is requested.",
        ),
        (
            buffer is not None and buffer.directory is not None and backend == "thread",
            "Buffer(directory=) is not possible with backend='thread', whose batches are the "
            "trainer's own memory\n"
            "  Nothing was started. Use backend='process', or a buffer in memory.",
        ),
        (
            on_cluster and not workers,
            "backend='ray' with num_workers=0: no worker on the cluster would make batches\n"
            "  Nothing was started. Set the number of workers for the cluster to run.",
        ),
        (
            loader.timeout and not workers and not settings.by_torchs_rules,
            f"timeout={loader.timeout:g} needs a worker that can be killed, and num_workers=0 has "
            "none\n  Nothing was started. Set num_workers to 1 or more, or leave the timeout out.",
        ),
        (
            settings.is_iterable and on_cluster,
            "an iterable dataset cannot have backend='ray': only a map-style dataset can be "
            "divided among nodes\n"
            "  Nothing was started. Use a map-style dataset (__getitem__ and __len__), or "
            "backend='process', whose workers are on this machine.",
        ),
        (
            settings.is_iterable and (backend != "process" or loader.on_error == "skip"),
            f"an iterable dataset cannot have backend={backend!r} with "
            f"on_error={loader.on_error!r}: its iterator ends where it raises, and threads "
            "cannot share it\n"
            "  Use a map-style dataset, or backend='process' and on_error='raise'.",
        ),
        (
            settings.is_iterable and isinstance(workers, AutoWorkers),
            'an iterable dataset cannot have num_workers="auto": each worker reads a part of it, '
            "so their number decides which samples there are\n"
            "  Nothing was started. Set the number of workers, or use a map-style dataset "
            "(__getitem__ and __len__).",
        ),
        (
            settings.is_iterable and ranks is not None,
            "an iterable dataset cannot have world_size=: only a map-style dataset can be "
            "divided among ranks\n"
            "  Nothing was started. Use a map-style dataset, or give each rank its part in the "
            "dataset's __iter__.",
        ),
        (
            ranks is not None and isinstance(loader.sampler, DistributedSampler),
            "world_size= and a DistributedSampler would both divide the samples among ranks\n"
            "  Nothing was started. Leave the sampler out, with shuffle=True if it shuffled; "
            "with Lightning, Trainer(use_distributed_sampler=False).",
        ),
        (
            ranks is not None and settings.batch_size is None,
            "world_size= with batches of the user's own: they cannot be divided among ranks"
            "\n  Nothing was started. Pass batch_size=, and sampler= if need be; or give this "
            "rank's batches only, without world_size.",
        ),
        (
            loader.device_transform is not None and loader.device is None,
            "device_transform= needs device=, which says where it runs\n"
            "  Nothing was started. Pass device='cuda', or device='cpu' for host memory.",
        ),
        (
            not (loader.device_transform is None or callable(loader.device_transform)),
            f"device_transform={loader.device_transform!r} is not valid; it must be a function of "
            "a batch",
        ),
        (
            loader.tail != "repeat" and ranks is None,
            f"tail={loader.tail!r} applies to ranks, but world_size= is not given",
        ),
        (
            isinstance(loader.dataset, MixedDataset) and settings.planned is None,
            "a mixture decides the order of its samples, so it takes no sampler\n"
            "  Nothing was started. Leave sampler and batch_sampler out.",
        ),
    ]
    for is_refused, words in refused:
        if is_refused:
            raise OptionError(words)


def check_worker_method(worker_method: str | None) -> None:
    """Refuse `worker_method`, as torch would, if the installed torch does not accept it."""
    if worker_method is not None and not accepts("worker_method"):
        raise TypeError(
            "DataLoader.__init__() got an unexpected keyword argument 'worker_method': torch "
            f"{torch.__version__} has none; use backend='thread'"
        )


def _check(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        options = " or ".join(map(repr, allowed))
        raise OptionError(f"{name}={value!r} is not valid; it must be {options}")
