"""What a loader recorded, as Prometheus and Chrome's traces have it."""

from __future__ import annotations

import json
import re

import torch
from torch.utils.data import TensorDataset

import forebay
from forebay.observe.exports import chrome_trace, prometheus_text
from forebay.observe.measurements import MadeRecord, StepRecord, recent_work

# A line of the text format: a name, labels, a number.
METRIC = re.compile(r'forebay_loader_[a-z0-9_]+(\{([a-z_]+="[^"\n]*",?)+\})? [-+.e0-9]+')


def step(asked_at, waited_s=0.0, *, taken, total=0.0, is_first=False):
    return StepRecord(asked_at, waited_s, is_first, 2, taken, total, 0.0, 0.0)


def test_totals_are_counters_and_other_numbers_gauges():
    """Times are in seconds by name; a source is a label."""
    numbers = {"waited_s": 1.5, "ready_batches": 3, "sources/a b/samples": 7, "tokens/x": 9}
    assert prometheus_text(numbers, {"rank": "0"}).splitlines() == [
        "# TYPE forebay_loader_waited_seconds_total counter",
        'forebay_loader_waited_seconds_total{rank="0"} 1.5',
        "# TYPE forebay_loader_ready_batches gauge",
        'forebay_loader_ready_batches{rank="0"} 3',
        "# TYPE forebay_loader_source_samples_total counter",
        'forebay_loader_source_samples_total{rank="0",source="a b"} 7',
        "# TYPE forebay_loader_tokens_total counter",
        'forebay_loader_tokens_total{rank="0",source="x"} 9',
    ]


def test_a_label_may_be_any_text():
    """What would end a label, or a line, is escaped."""
    text = prometheus_text({"epoch": 1}, {"loader": 'a "b"\\\n'})
    assert text.splitlines()[1] == 'forebay_loader_epoch{loader="a \\"b\\"\\\\\\n"} 1'


def test_all_numbers_of_a_mixture_are_metrics():
    """Each line is one of the format, and none of the numbers is left out."""
    dataset = TensorDataset(torch.arange(8.0))
    mixed = forebay.mix({"one": (dataset, 1.0), "two": (dataset, 1.0)}, samples=16)
    loader = forebay.DataLoader(mixed, batch_size=4, seed=0)
    list(loader)
    statistics = loader.statistics()
    lines = statistics.to_prometheus().splitlines()
    metrics = [line for line in lines if not line.startswith("#")]
    assert all(map(METRIC.fullmatch, metrics))
    assert len(metrics) == len(statistics.to_dict())
    assert 'forebay_loader_source_samples_total{source="one"}' in "\n".join(metrics)


def test_recent_work_is_that_of_the_last_half_minute():
    """Earlier steps do not count; without a second step nothing is known."""
    nothing = {"recent_rate": 0.0, "recent_wait_share": 0.0}
    assert recent_work([]) == recent_work([step(5.0, taken=1)]) == nothing
    steps = [
        step(0.0, 50.0, taken=1, total=50.0),  # before
        step(60.0, taken=2, total=50.0),
        step(69.0, 3.0, taken=20, total=53.0),
        step(90.0, taken=32, total=53.0),
    ]
    assert recent_work(steps) == {"recent_rate": 1.0, "recent_wait_share": 0.1}


def test_a_trace_has_a_row_for_training_and_for_each_worker():
    """Waits and steps do not overlap; times are microseconds of the clock of the day."""
    steps = [step(1.0, 0.5, taken=1), step(2.0, taken=2), step(3.0, taken=5)]
    made = MadeRecord(1.4, 0.4, 0.0, 100, 0.1, 1, 0.4, 0.0, 0.0, worker_id=1)
    events = chrome_trace(steps, [made], "train", 100.0)["traceEvents"]
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert names == {0: "training", 2: "worker 1"}
    found = [
        (each["name"], each["tid"], each["ts"], each["dur"]) for each in events if each["ph"] == "X"
    ]
    assert found == [
        ("wait", 0, 101e6, 0.5e6),
        ("step", 0, 101.5e6, 0.5e6),
        ("3 steps", 0, 102e6, 1e6),
        ("batch", 2, 101e6, 0.4e6),
    ]


def test_a_loader_writes_its_trace(tmp_path):
    """It is JSON with the batches that workers made; an earlier trace is replaced."""
    dataset = TensorDataset(torch.arange(8.0))
    path = tmp_path / "loader.trace.json"
    path.write_text("an earlier one")
    with forebay.DataLoader(dataset, 4, num_workers=1, name="train") as loader:
        list(loader)
        assert loader.save_trace(path) == path
    events = json.loads(path.read_text())["traceEvents"]
    assert {"ready", "batch"} <= {each["name"] for each in events}
    (process,) = (each for each in events if each["name"] == "process_name")
    assert process["args"]["name"].startswith("train: ")
