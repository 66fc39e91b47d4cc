"""Accelerate: `use_stateful_dataloader=True` with a seedable sampler and workers, resumed.

Without workers (`WORKERS = 0`) the resumed batches are those expected.
"""

import sys
import tempfile

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

WORKERS = 2


def make() -> tuple[Accelerator, DataLoader[torch.Tensor]]:
    for state in (AcceleratorState, GradientState, PartialState):  # as in a new process
        state._reset_state()
    set_seed(1)
    options = {"use_stateful_dataloader": True, "use_seedable_sampler": True, "data_seed": 5}
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    loader = DataLoader(torch.arange(48), 4, shuffle=True, num_workers=WORKERS)
    return accelerator, accelerator.prepare(loader)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        accelerator, loader = make()
        batches = []
        for batch in loader:
            batches.append(batch.tolist())
            if len(batches) == 5:
                accelerator.save_state(folder)
        accelerator, loader = make()
        accelerator.load_state(folder)
        expected, got = batches[5:], [batch.tolist() for batch in loader]
    print(f"expected {expected}\ngot      {got}")
    sys.exit(got != expected)
