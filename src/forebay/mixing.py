"""`forebay.mix`: several datasets as one, sampled in proportion to their weights.

    {"web": (web, 0.7), "code": (code, 0.3)} ──> MixedDataset ──> DataLoader: 7 of 10 are from web

The source of the sample at a position depends only on the seed and the position
(`plan.py`), so mixing works over ranks, after a resume, and with any number of workers.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from forebay.base.datasets import getitems_of, is_map_style, sequence_rows
from forebay.base.formatting import summary
from forebay.errors import OptionError, short_tracebacks
from forebay.mixture import Mixture
from forebay.options import check_positive
from forebay.seeds import EPOCH, Integers

Schedule = tuple[tuple[int, tuple[float, ...]], ...]

# Larger weights could overflow when they are added.
MOST = 1e100


@short_tracebacks
def mix(
    sources: Mapping[str, tuple[Any, float]],
    *,
    samples: int | None = None,
    schedule: Mapping[int, Mapping[str, float]] | None = None,
) -> MixedDataset:
    """Mix datasets by weight, for a `forebay.DataLoader`.

    Among any consecutive samples, each source has its share, to within a few samples. A source
    goes through all its samples before any is repeated, however long an epoch of the mixture
    is: a small source with a large weight has several epochs in one of the mixture, and
    a large source continues in the next epoch where it stopped.

    Args:
        sources: By name, a map-style dataset and its weight. Weights are relative to each other; 0
            leaves a source out until `DataLoader.set_weights` changes that.
        samples: Samples of one epoch of the mixture; None for as many as the sources have together.
        schedule: Weights from certain steps on, such as `{0: {...}, 50_000: {...}}`, where a step
            is a batch over all ranks, counted over all epochs. It replaces the weights of
            `sources` from its first step on, and `set_weights`.

    Returns:
        A map-style dataset: the concatenated sources. The weights take effect in a
        `forebay.DataLoader`, which needs no sampler; `shuffle=True` shuffles each source.

    Raises:
        OptionError: A weight or a dataset is impossible.
    """
    if not sources:
        raise OptionError("mix() got no sources\n  Pass at least one: {'name': (dataset, 1.0)}.")
    if not isinstance(sources, Mapping):
        raise OptionError(
            f"mix() takes sources by name; got {type(sources).__name__}\n"
            "  Name each of them: {'name': (dataset, 1.0)}."
        )
    datasets, weights = {}, {}
    pair: Any
    for name, pair in sources.items():
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise OptionError(
                f"mix({{{name!r}: ...}}) takes a dataset and a weight; got {type(pair).__name__}\n"
                f"  Write {{{name!r}: (dataset, 0.5)}}."
            )
        dataset, weights[name] = pair
        if not is_map_style(dataset):
            raise OptionError(
                f"source {name!r} is a {type(dataset).__name__}, which has no samples to choose "
                "from\n  mix() takes map-style datasets, with __getitem__ and __len__."
            )
        if not len(dataset):
            raise OptionError(f"source {name!r} is empty\n  Leave it out of mix().")
        datasets[name] = dataset
    if samples is not None:
        check_positive("samples", samples, " or None")
    names = tuple(datasets)
    return MixedDataset(
        datasets, checked_weights(weights, names), samples, _checked_schedule(schedule or {}, names)
    )


def _checked_schedule(schedule: Any, names: Sequence[Any]) -> Schedule:
    """Return the weights of each stage, in the order of their steps and of the names."""
    for step in schedule if isinstance(schedule, Mapping) else [schedule]:
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise OptionError(
                f"schedule has the step {step!r}; it takes weights by steps, which are integers "
                "from 0\n  Write schedule={0: {'name': 1.0}, 50_000: {'name': 0.5}}."
            )
    return tuple((step, checked_weights(schedule[step], names)) for step in sorted(schedule))


def checked_weights(weights: Mapping[Any, float], names: Sequence[Any]) -> tuple[float, ...]:
    """Return the weights in the order of the names."""
    if set(weights) != set(names):
        raise OptionError(
            f"weights are needed for {', '.join(map(repr, names))}; got "
            f"{', '.join(map(repr, weights)) or 'none'}"
        )
    weight: Any
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight <= MOST:
            raise OptionError(
                f"the weight of {name!r} is {weight!r}; it takes a number from 0 to {MOST:g}"
            )
    if not any(weights.values()):
        raise OptionError("all weights are 0\n  At least one source must have a weight above 0.")
    return tuple(float(weights[name]) for name in names)


def weights_for(dataset: Any, weights: Mapping[str, float]) -> tuple[float, ...]:
    """Return new weights for a mixture in the order of its sources; refuse any other dataset."""
    if not isinstance(dataset, MixedDataset):
        raise OptionError("set_weights() is for a dataset made by forebay.mix()")
    if dataset.schedule:
        raise OptionError(
            "set_weights() is not for a mixture with a schedule, which decides its weights\n"
            "  Nothing was changed. Leave out schedule= of mix(), or the call."
        )
    return checked_weights(weights, tuple(dataset.datasets))


class MixedDataset(Dataset[Any]):
    """The concatenation of several datasets, with a weight for each; made by `mix`.

    Attributes:
        datasets: The sources, by name.
        lengths: Their lengths, by name.
        samples: Samples of one epoch of the mixture.
        mixture: The lengths and weights.
        schedule: Steps, and the weights from there on.
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        weights: tuple[float, ...],
        samples: int | None,
        schedule: Schedule = (),
    ) -> None:
        """See `mix`."""
        self.datasets, self.schedule = dict(datasets), schedule
        self.lengths = {name: len(dataset) for name, dataset in self.datasets.items()}
        lengths = tuple(self.lengths.values())
        sources = enumerate(self.datasets.values())
        rows = frozenset(at for at, each in sources if sequence_rows(each))
        self.mixture = Mixture(lengths=lengths, weights=weights, by_epoch=rows)
        # Only costs of one kind can be compared.
        self.costs_of = self._costs_of if len(rows) == len(lengths) else None
        self.samples = sum(lengths) if samples is None else samples
        self._ends = list(accumulate(lengths))
        self._sources = list(self.datasets.values())
        if any(getitems_of(source) is not None for source in self._sources):
            self.__getitems__ = self._get_together

    def __len__(self) -> int:
        """Return the total number of samples of the sources."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """Return a sample: index 0 is the first of the first source."""
        source, index_there = self._find(index)
        return self._sources[source][index_there]

    def _get_together(self, indices: Sequence[int]) -> list[Any]:
        """Return samples, with one call to each source."""
        samples: dict[int, Any] = {}
        wanted: dict[int, list[tuple[int, int]]] = {}
        for position, index in enumerate(indices):
            source, index_there = self._find(index)
            wanted.setdefault(source, []).append((position, index_there))
        for source, pairs in wanted.items():
            dataset = self._sources[source]
            together = getitems_of(dataset)
            own = [index_there for _, index_there in pairs]
            found = together(own) if together is not None else [dataset[each] for each in own]
            samples.update(zip((position for position, _ in pairs), found, strict=True))
        return [samples[position] for position in range(len(indices))]

    def _find(self, index: int) -> tuple[int, int]:
        index = operator.index(index)  # a Subset may have a tensor of indices
        epoch, at = divmod(index, EPOCH) if index >= 0 else (0, index + len(self))
        if not 0 <= at < len(self):
            raise IndexError(f"there is no sample {index}: there are {len(self):,}")
        source = bisect_right(self._ends, at)
        return source, at - (self._ends[source - 1] if source else 0) + epoch * EPOCH

    def _costs_of(self, indices: Integers) -> npt.NDArray[np.float64]:
        """Return what rows cost, by their indices."""
        rows = indices % EPOCH
        sources = np.searchsorted(self._ends, rows, side="right")
        costs = np.empty(len(rows))
        for source, dataset in enumerate(self._sources):
            own = sources == source
            costs[own] = dataset.costs_of(rows[own] - (self._ends[source - 1] if source else 0))
        return costs

    def __repr__(self) -> str:
        """Return the sources with their lengths and weights."""
        pairs = zip(self.datasets, self.mixture.lengths, self.mixture.weights, strict=True)
        shown = ", ".join(f"{name}: {length:,} x {weight:g}" for name, length, weight in pairs)
        return f"<MixedDataset {shown}>"

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        weights = self.mixture.weights
        facts: dict[str, object] = {"samples of an epoch": self.samples}
        for name, length, weight in zip(self.datasets, self.mixture.lengths, weights, strict=True):
            share = weight / sum(weights)
            facts[f"{name}"] = f"{length:,} samples, weight {weight:g}: {share:.1%} of an epoch"
        return summary("MixedDataset", facts)
