"""Batches are on the device before the model is called, and results are fetched meanwhile."""

from __future__ import annotations

import pyarrow.dataset
import pytest
import torch
from models import Numbers

import forebay
from forebay.failures import Failure
from forebay.predicting.model import Predicted, in_host_memory
from kit.fake_device import FakeDevice


class Wide(Numbers):
    """A sample whose batches do not fit into a message."""

    def __getitem__(self, index):
        return super().__getitem__(index).repeat(2000)


def predicted(device, folder, **settings):
    """Predict on a device; return the report and the rows."""
    report = forebay.predict(
        lambda batch: batch.amax(1),
        Wide(50, bad=(7,)),
        folder,
        num_workers=2,
        batch_size=8,
        device=device,
        progress=False,
        **settings,
    )
    table = pyarrow.dataset.dataset(folder, exclude_invalid_files=True).to_table()
    return report, dict(zip(*(table[name].to_pylist() for name in table.column_names), strict=True))


EXPECTED = {index: float(index) for index in range(50) if index != 7}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_predictions_are_those_of_the_host(tmp_path, seed):
    """One copy a batch, on a device that copies late; a bad sample is left out of its batch."""
    device = FakeDevice(seed)
    report, rows = predicted(device, tmp_path)
    assert rows == EXPECTED
    assert report.failed == 1
    assert device.copied == 7
    assert device.allocated == 0


def test_a_batch_that_the_device_has_no_memory_for_is_left_to_the_model(tmp_path):
    """It is moved when the model is called, so that it is halved if it does not fit."""
    device = FakeDevice(1, capacity=100_000)
    _, rows = predicted(device, tmp_path)
    assert rows == EXPECTED
    assert device.copied == 0


def test_results_are_awaited_one_batch_later():
    """The model is called for the next batch before anything waits for the last one."""
    log = []

    def outcomes():
        for index in range(3):
            log.append(f"model {index}")
            yield Predicted([index], torch.tensor([index]))
            if index == 1:
                yield Failure.of(ValueError("bad"), source=9)

    def start(outputs):
        name = int(outputs)
        log.append(f"copy {name}")
        return outputs + 10, lambda: log.append(f"wait {name}")

    found = list(in_host_memory(outcomes(), start))
    assert log == [
        *("model 0", "copy 0", "model 1", "copy 1", "wait 0", "wait 1"),
        *("model 2", "copy 2", "wait 2"),
    ]
    results = [int(each.outputs) for each in found if isinstance(each, Predicted)]
    assert results == [10, 11, 12]
    assert isinstance(found[2], Failure), "the order is kept"


def test_results_in_host_memory_are_not_held_back():
    """On the CPU each outcome is yielded before the model is called again."""
    log = []

    def outcomes():
        for index in range(2):
            log.append(index)
            yield Predicted([index], torch.ones(1))

    for outcome in in_host_memory(outcomes()):
        log.append(f"got {outcome.indices[0]}")
    assert log == [0, "got 0", 1, "got 1"]
