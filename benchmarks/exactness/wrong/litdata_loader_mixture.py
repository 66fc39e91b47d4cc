"""LitData: a CombinedStreamingDataset with weights, resumed in the middle, with the same workers.

Its README: "resume only with the same `world_size`, `num_workers`, and `batch_size`", as here.
"""

import sys
import tempfile
from itertools import chain

from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, optimize


def identity(number: int) -> int:
    return number


def make(folder: str) -> StreamingDataLoader:
    parts = [StreamingDataset(f"{folder}/{name}", shuffle=True, seed=11) for name in "ab"]
    both = CombinedStreamingDataset(parts, seed=11, weights=[0.75, 0.25], iterate_over_all=False)
    return StreamingDataLoader(both, batch_size=4, num_workers=2)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, begin in (("a", 0), ("b", 100)):
            numbers = list(range(begin, begin + 48))
            optimize(identity, numbers, f"{folder}/{name}", chunk_size=6, num_workers=1)
        loader, batches, states = make(folder), [], []
        for batch in chain(loader, loader):  # two epochs
            batches.append(batch.tolist())
            states.append(loader.state_dict())
        resumed = make(folder)
        resumed.load_state_dict(states[4])
        expected, got = batches[5:], [batch.tolist() for batch in chain(resumed, resumed)]
    print(f"expected {expected}\ngot      {got}")
    sys.exit(got != expected)
