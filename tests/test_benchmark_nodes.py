"""The model of nodes that the benchmark of 64 nodes uses, and its virtual clock."""

from __future__ import annotations

import pytest
from benchmarks.nodes import MESSAGE_S, ORDER_S, TASK_S, Clock, SimulatedPool, rate
from benchmarks.simulated_nodes import Cluster, SimulatedNodes

from forebay.pools.events import Assignment, TaskFinished, WorkerDied, WorkerStarted

pytestmark = pytest.mark.full

LATENCY, START = 0.01, 1.0


def cluster(**settings):
    plain = {"nodes": 1, "workers": 1, "input_s": 0.1, "spread": 0.0}
    return Cluster(**plain | {"latency_s": LATENCY, "start_s": START} | settings)


def started(settings):
    """Return nodes whose workers have started, and that time."""
    nodes = SimulatedNodes(settings)
    for incarnation in range(settings.nodes * settings.workers):
        nodes.start(0.0, incarnation)
    now = START + LATENCY
    messages = nodes.due(now)
    assert all(isinstance(each, WorkerStarted) for message in messages for each in message)
    return nodes, now


def messages_of(nodes):
    """Return all messages that are to come, as (time, tasks of the answers in it)."""
    found = []
    while (at := nodes.next_at()) is not None:
        for message in nodes.due(at):
            found.append((round(at, 6), [each.task for each in message]))
    return found


def test_answers_are_collected_while_there_is_more_to_do():
    """The first comes after 0.1 s and waits for 0.03 s; the last one does not wait."""
    nodes, now = started(cluster())
    nodes.send(now, [(0, [(1, 1), (2, 1), (3, 1)])])
    began = now + LATENCY
    assert messages_of(nodes) == [
        (pytest.approx(began + 0.13 + LATENCY), [1]),
        (pytest.approx(began + 0.23 + LATENCY), [2]),
        (pytest.approx(began + 0.3 + LATENCY), [3]),
    ]


def test_workers_of_a_node_share_messages():
    """What both finish in the time that the host collects is one message."""
    nodes, now = started(cluster(workers=2, input_s=0.01))
    nodes.send(now, [(0, [(1, 1), (2, 1)]), (1, [(3, 1), (4, 1), (5, 1)])])
    assert [sorted(tasks) for _, tasks in messages_of(nodes)] == [[1, 2, 3, 4, 5]]


def test_a_lost_node_reports_nothing_more_and_its_workers_are_dead():
    """The answer that was not sent is lost with it; the driver learns of it later."""
    nodes, now = started(cluster(losses=(START + 0.43,), notice_s=2.0))
    nodes.send(now, [(0, [(task, 1) for task in range(20)])])
    heard = []
    while (at := nodes.next_at()) is not None:
        heard += [(at, each) for message in nodes.due(at) for each in message]
    (at, death), answers = heard[-1], [each for _, each in heard[:-1]]
    assert isinstance(death, WorkerDied) and death.external
    assert at == pytest.approx(START + 2.43)
    assert all(isinstance(each, TaskFinished) for each in answers)
    assert len(answers) == 3, "the fourth was finished and not sent"
    assert nodes.finished_in_vain == 1


def test_a_worker_without_room_waits_for_a_node_that_joins():
    """It starts when the node is there."""
    nodes, _ = started(cluster(joins=(5.0,)))
    nodes.start(2.0, 7)
    assert nodes.node_of(7) is None
    assert nodes.due(5.0 + START + LATENCY) == [[WorkerStarted(7)]]


def test_the_same_seed_gives_the_same_run():
    """Durations and losses come from it alone; another seed gives others."""

    def run(seed):
        nodes, now = started(cluster(workers=3, spread=0.5, seed=seed))
        nodes.send(now, [(worker, [(9 * worker + n, 1) for n in range(9)]) for worker in range(3)])
        return messages_of(nodes)

    assert run(1) == run(1)
    assert run(1) != run(2)


class Meter:
    """Processor time that a test decides."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


def test_the_clock_counts_the_drivers_processor_time_and_not_the_models():
    """And jumps where the driver waits."""
    meter = Meter()
    clock = Clock(meter)
    meter.seconds += 2.0
    with clock.stopped():
        meter.seconds += 50.0
        assert clock.now() == 2.0
    assert (clock.now(), clock.driver_cpu) == (2.0, 2.0)
    clock.rest_until(7.0)
    clock.rest_until(3.0)
    assert (clock.now(), clock.driver_cpu) == (7.0, 2.0)


def test_rays_threads_work_while_the_driver_sleeps():
    """What they take longer than that counts."""
    clock = Clock(Meter())
    clock.sleep(0.01)
    clock.spend(0.004)
    assert clock.now() == pytest.approx(0.01)
    clock.spend(0.004)
    assert clock.now() == pytest.approx(0.014)
    assert clock.driver_cpu == pytest.approx(0.008)


def test_orders_and_messages_take_the_drivers_time():
    """One order for both workers of a node, and one message with their answers."""
    pool = SimulatedPool(cluster(workers=2, input_s=0.01), Clock(Meter()))
    for incarnation in range(2):
        pool.start(incarnation, incarnation)
    heard = pool.wait(None)
    while len(heard) < 2:
        heard += pool.wait(None)
    before = pool._clock.driver_cpu
    pool.send_to_all([(worker, [Assignment(worker, 1, None)]) for worker in range(2)])
    answers = pool.wait(None)
    assert sorted(each.task for each in answers) == [0, 1]
    spent = pool._clock.driver_cpu - before
    assert spent == pytest.approx(ORDER_S + 2 * TASK_S + MESSAGE_S, rel=0.01)


def test_the_rate_leaves_out_the_edges():
    """Twenty slow answers at the beginning and twenty at the end do not count."""
    slow, fast = 1.0, 0.1
    now, progress = 0.0, []
    for count in range(1, 101):
        now += fast if 20 < count <= 80 else slow
        progress.append((now, count, now / 2))
    found = rate(progress)
    assert found["rate"] == pytest.approx(10.0)
    assert found["busy"] == pytest.approx(0.5)
    assert found["cpu_us"] == pytest.approx(50_000.0)
