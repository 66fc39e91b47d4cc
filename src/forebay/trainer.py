"""`forebay.use`: transformers' Trainer, and those of TRL, with forebay's DataLoader.

    trainer.get_train_dataloader() ── its own ──> a stock loader ── loader_like ──> DataLoader
    trainer_state.json <── ForebayPosition ──> loader.state_dict(), load_state_dict()

The trainer decides what is in a batch: dataset, collator, sampler, batch size, ranks. While one of
its methods makes a loader, its Accelerator prepares one of forebay instead.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, Literal

from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchLoader

from forebay.buffer import Buffer
from forebay.errors import OptionError
from forebay.loader import DataLoader
from forebay.loading.accelerated import prepare
from forebay.options import AutoWorkers

# What an evaluation has, too: where batches are made, not what is done with samples and memory.
FOR_ALL = ("num_workers", "seed", "backend", "concurrency", "timeout", "multiprocessing_context")
# Arguments that the trainer decides, and the ones of its own that do.
DECIDED = {
    "dataset": "train_dataset=",
    "batch_size": "per_device_train_batch_size=",
    "shuffle": "train_sampling_strategy=",
    "sampler": "train_sampling_strategy=, or a _get_train_sampler() of yours",
    "batch_sampler": "train_sampling_strategy=",
    "collate_fn": "data_collator=",
    "drop_last": "dataloader_drop_last=",
    "world_size": "the launcher",
    "rank": "the launcher",
    "tail": "dataloader_drop_last=",
    "device": "its Accelerator",
    "generator": "seed=, or data_seed=",
}
# Arguments of a stock loader that do not say what is in a batch.
TAKEN = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "in_order"),
    *("multiprocessing_context", "persistent_workers"),
)
# The key in `trainer_state.json`.
NAME = "ForebayPosition"


def use(
    trainer: Any,
    *,
    num_workers: int | Literal["auto"] | AutoWorkers | None = None,
    buffer: float | str | Buffer | None = None,
    seed: int | None = None,
    **options: Any,
) -> None:
    """Make a transformers Trainer, or a trainer of TRL, read its data with `DataLoader`.

    Call it once, before `train()`; there is nothing else to do. Dataset, collator, sampling
    strategy, batch size and ranks stay the trainer's. Each checkpoint has the position, in its
    `trainer_state.json`, and `train(resume_from_checkpoint=...)` continues with the next batch,
    also in the middle of an epoch, and on another number of ranks if the batches of all ranks
    together have as many samples.

    Args:
        trainer: The trainer.
        num_workers: See `DataLoader`; None for `dataloader_num_workers`.
        buffer: See `DataLoader`; for training only.
        seed: See `DataLoader`; None for the trainer's `data_seed`, or else its `seed`.
        **options: Other arguments of `DataLoader`: `backend`, `concurrency`, `timeout` and
            `multiprocessing_context` for evaluation and prediction, too; all others, such as
            `on_error` and `device_transform`, for training only.

    Raises:
        OptionError: It is another object, or an option is one that the trainer decides. Later, when
            a loader is made: its dataset or batches cannot be divided among ranks; when training
            resumes: the checkpoint has no position, or one that is not at the trainer's step.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(trainer, transformers.Trainer):
        raise OptionError(
            f"forebay.use() takes a transformers.Trainer; got {type(trainer).__name__}\n"
            "  Nothing was changed. With Accelerate, pass a forebay.DataLoader to "
            "accelerator.prepare(); for others, see docs/how-to/frameworks.md."
        )
    for name in options:
        if name in DECIDED:
            raise OptionError(
                f"{name}= is not an option of forebay.use(): the trainer decides it\n"
                f"  Nothing was changed. What decides it is {DECIDED[name]}."
            )
    if any(type(each).__name__ == NAME for each in trainer.callback_handler.callbacks):
        raise OptionError(
            f"forebay.use() was called before for this {type(trainer).__name__}\n"
            "  Nothing was changed. Call it once, with all options."
        )
    if seed is None:
        seed = trainer.args.seed if trainer.args.data_seed is None else trainer.args.data_seed
    options |= {"seed": seed, "buffer": buffer}
    options |= {} if num_workers is None else {"num_workers": num_workers}
    _UsedBy(trainer, options, transformers)


class _UsedBy:
    """What is different in one trainer.

    Attributes:
        loader: The loader of the training; None before it begins.
    """

    def __init__(self, trainer: Any, options: dict[str, Any], transformers: Any) -> None:
        self.loader: DataLoader[Any] | None = None
        self._trainer = trainer
        others = {name: value for name, value in options.items() if name in FOR_ALL}
        for name in ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"):
            own = options if name == "get_train_dataloader" else others
            setattr(trainer, name, partial(self._made, getattr(trainer, name), own))
        # The trainer finds a callback by the name of its class, and may make another of that class.
        bases = transformers.TrainerCallback, sys.modules["transformers.trainer"].ExportableState
        methods = {"state": lambda _: self.state(), "on_train_begin": self._began}
        methods |= {"on_train_end": self._ended}
        trainer.add_callback(type(NAME, bases, methods)())
        _skip_nothing(sys.modules["transformers.trainer"])

    # ---- loaders -------------------------------------------------------------------------------

    def _made(
        self, original: Callable[..., Any], options: dict[str, Any], *args: Any, **named: Any
    ) -> Any:
        """Return the loader that a method of the trainer makes, with forebay."""
        accelerator = self._trainer.accelerator
        accelerator.prepare_data_loader = partial(_prepared, accelerator, options)
        try:
            loader = original(*args, **named)
        finally:
            vars(accelerator).pop("prepare_data_loader", None)
        if not isinstance(loader, DataLoader):
            raise OptionError(
                f"{original.__qualname__} of the trainer made a {type(loader).__name__} by itself, "
                "and not with its Accelerator, so forebay.use() has no effect on it\n"
                "  Nothing was read. Return a forebay.DataLoader there, or what "
                "self.accelerator.prepare() returns."
            )
        return loader

    # ---- the position --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the position for `trainer_state.json`, where dicts are sorted by their keys."""
        if self.loader is None:
            return {"args": {}, "attributes": {"position": None}}
        try:
            position = json.dumps(self.loader.state_dict())
        except TypeError as error:
            raise OptionError(
                f"the state of the dataset or sampler cannot be in a checkpoint, as JSON: {error}\n"
                "  The checkpoint was not finished. Return numbers, strings, lists and dicts from "
                "its state_dict()."
            ) from error
        return {"args": {}, "attributes": {"position": position}}

    def _began(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._ended()
        self.loader = others["train_dataloader"]
        known = state.stateful_callbacks
        saved = known.setdefault(NAME, {"args": {}, "attributes": {"position": None}})
        if state.global_step:
            self._resume(args, state.global_step, saved["attributes"]["position"])

    def _resume(self, args: Any, step: int, saved: str | None) -> None:
        """Set the loader to the position of a checkpoint of a step."""
        loader = self.loader
        assert loader is not None
        # Of a dataset without a length the trainer counts one epoch.
        length = None if isinstance(loader.dataset, IterableDataset) else len(loader)
        steps = max(math.ceil((length or 0) / args.gradient_accumulation_steps), 1)
        epoch, within = divmod(step, steps)
        expected = epoch, within * args.gradient_accumulation_steps
        if saved is None:
            if within or length is None:
                raise OptionError(
                    f"the checkpoint of step {step} has no position of forebay's, which it needs "
                    "in the middle of an epoch: it was saved without forebay.use()\n"
                    "  Nothing was read. Resume from a checkpoint of an epoch's end, or without "
                    "forebay.use()."
                )
            loader.load_state_dict(loader.state_dict() | {"epoch": epoch})
            return
        loader.load_state_dict(json.loads(saved))
        state = loader.state_dict()
        found = state["epoch"], state["batch"]
        if length is None and callable(name_epoch := vars(loader).get("set_epoch")):
            # It names epochs from 0 on again, and a stream begins anew where that is another one.
            vars(loader)["set_epoch"] = lambda epoch: name_epoch(found[0] + epoch)
        if length is not None and found != expected:
            raise OptionError(
                f"the checkpoint of step {step} is after {found[1]} batches of epoch {found[0]}, "
                f"and the trainer goes on after {expected[1]} batches of epoch {expected[0]}\n"
                "  Nothing was read. Use the gradient_accumulation_steps that it was saved with "
                f"(now {args.gradient_accumulation_steps})."
            )
        if length is not None and within and args.ignore_data_skip:
            raise OptionError(
                "ignore_data_skip=True would count the steps of this epoch from its beginning, and "
                f"the checkpoint is after {found[1]} of {length} batches\n"
                "  Nothing was read. Leave ignore_data_skip out: no batch is read to be skipped."
            )

    def _ended(self, *args: Any, **others: Any) -> None:
        if self.loader is not None:
            self.loader.close()


def _prepared(
    accelerator: Any,
    options: dict[str, Any],
    data_loader: TorchLoader[Any],
    device_placement: bool | None = None,
    slice_fn_for_dispatch: Any = None,  # noqa: ARG001 - Accelerate's own signature
) -> DataLoader[Any]:
    """Return a loader in place of the one that an Accelerator is to prepare."""
    loader = data_loader
    if not isinstance(loader, DataLoader) or not loader._is_named:
        loader = loader_like(data_loader, options)
    if loader._prepared is None:
        prepare(loader, accelerator, device_placement)
    return loader


def loader_like(stock: TorchLoader[Any], options: dict[str, Any]) -> DataLoader[Any]:
    """Return a loader with the arguments of another one, and options."""
    arguments = {name: getattr(stock, name) for name in TAKEN}
    init = getattr(stock.worker_init_fn, "func", stock.worker_init_fn)
    if getattr(init, "__module__", None) == "transformers.trainer_utils":
        arguments["worker_init_fn"] = None  # it seeds, as `seed` does
    if stock.prefetch_factor != 2:  # torch's own
        arguments["prefetch_factor"] = stock.prefetch_factor
    arguments |= options
    if arguments["num_workers"] == 0:
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            arguments.pop(name, None)
        arguments["timeout"] = 0
    sampler: Any = stock.sampler
    if isinstance(stock.dataset, IterableDataset):
        arguments |= {"batch_size": stock.batch_size, "drop_last": stock.drop_last}
    elif stock.batch_sampler is None:
        arguments |= {"batch_size": None}
    elif type(stock.batch_sampler) is not BatchSampler:
        return DataLoader(stock.dataset, batch_sampler=stock.batch_sampler, **arguments)
    else:
        arguments |= {"batch_size": stock.batch_size, "drop_last": stock.drop_last}
    is_whole = type(sampler) is RandomSampler and not sampler.replacement
    if is_whole and sampler.generator is None and len(sampler) == len(sampler.data_source):
        arguments["shuffle"] = True
    elif type(sampler) is not SequentialSampler and not isinstance(stock.dataset, IterableDataset):
        arguments["sampler"] = sampler
    return DataLoader(stock.dataset, **arguments)


def _skip_nothing(module: Any) -> None:
    """Have `transformers.trainer` skip no batches of a loader of forebay.

    Its `skip_first_batches` is a function of Accelerate, which makes a stock loader of any other.
    A trainer calls it by that name after a resume, and counts steps by what it has skipped; a
    loader of forebay is at that step already.
    """
    former = module.skip_first_batches
    if isinstance(former, partial):
        return

    def skip(former: Any, dataloader: Any, num_batches: int = 0) -> Any:
        return dataloader if isinstance(dataloader, DataLoader) else former(dataloader, num_batches)

    module.skip_first_batches = update_wrapper(partial(skip, former), former)
