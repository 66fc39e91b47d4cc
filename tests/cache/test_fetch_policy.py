"""What is fetched when, and what stays: decisions on a virtual clock, under random faults."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.caching.fetch_policy import (
    BROKEN,
    DENIED,
    HEDGE_SHARE,
    MIB,
    MISSING,
    MOST_BYTES,
    MOST_TRIES,
    NEEDED,
    START_BYTES,
    THROTTLED,
    TIMEOUT_S,
    WRONG,
    Requests,
    Unit,
)
from forebay.caching.residency import Residency

SIZE = 4 * MIB


def unit(block, size=SIZE, shard=None):
    """Return a block of a shard with 16 of them."""
    return Unit(block, block // 16 if shard is None else shard, block % 16 * size, size)


class Bucket:
    """A bucket on a virtual clock: a delay, a rate for all requests together, and faults.

    No block fails so often that it would be given up.
    """

    def __init__(self, seed=0, rate=500e6, faults=0.0, tail=0.02):
        self.random, self.rate, self.faults, self.tail = Random(seed), rate, faults, tail
        self.now = self.busy = 0.0
        self.answers, self.order, self.most = [], 0, 0
        self.failed = Counter()

    def run(self, requests, is_over, arrived):
        """Serve requests until all are answered that matter."""
        while not is_over():
            for get in requests.due(self.now):
                delay = 0.03 * (20 if self.random.random() < self.tail else 1)
                begin = max(self.now + delay, self.busy)
                self.busy = max(self.now, self.busy) + get.length / self.rate
                self.order += 1
                heapq.heappush(self.answers, (begin + get.length / self.rate, self.order, get))
            self.most = max(self.most, sum(get.length for _, _, get in self.answers))
            times = [requests.wakes_at(self.now), *(when for when, _, _ in self.answers[:1])]
            assert min(times) < math.inf, "nothing is under way, and something is missing"
            self.now = max(self.now, min(times))
            while self.answers and self.answers[0][0] <= self.now:
                self._answer(requests, heapq.heappop(self.answers)[2], arrived)

    def _answer(self, requests, get, arrived):
        draw = self.random.random() / self.faults if self.faults else 1.0
        if any(self.failed[each.key] == MOST_TRIES - 1 for each in get.units):
            draw = 1.0
        if draw < 1.0:
            self.failed.update(each.key for each in get.units)
        if draw < 0.3:
            assert requests.failed(get.number, THROTTLED, "503", self.now) == []
        elif draw < 0.6:
            assert requests.failed(get.number, BROKEN, "reset", self.now) == []
        else:
            broken = get.units if 0.6 <= draw < 1.0 else ()
            wrong = {each.key: self.random.getrandbits(32) for each in broken}
            done, lost = requests.arrived(get.number, wrong, self.now)
            assert lost == []
            arrived(done)


@given(st.integers(0, 10**6), st.integers(1, 200), st.sampled_from([0.0, 0.1, 0.4]))
def test_everything_arrives_once_whatever_breaks(seed, count, faults):
    """Throttling, resets, flipped bits: none lost, none doubled, and it comes to an end."""
    bucket, requests, got = Bucket(seed, faults=faults), Requests(Random(seed)), []
    blocks = [*range(count)]
    bucket.random.shuffle(blocks)
    for at, block in enumerate(blocks):
        requests.want(unit(block), (1, 0, at))
    bucket.run(requests, lambda: len(got) == count, lambda done: got.extend(u.key for u in done))
    assert sorted(got) == sorted(blocks)
    assert requests.due(bucket.now + 60) == []
    assert bucket.most <= MOST_BYTES + 32 * MIB
    assert requests.counts.hedges <= HEDGE_SHARE * requests.counts.requests + 1


def test_what_is_needed_now_overtakes_what_is_needed_later():
    """A reader waits for it."""
    requests = Requests(Random(0))
    for block in range(0, 320, 2):
        requests.want(unit(block), (1, 0, block))
    sent = [get.units[0].key for get in requests.due(0.0)]
    assert sent == [*range(0, 32, 2)]
    requests.want(unit(300), NEEDED)
    requests.arrived(1, {}, 0.1)
    assert [get.units[0].key for get in requests.due(0.1)] == [300]


def test_the_next_epoch_waits_until_this_one_keeps_the_link_busy_no_more():
    """They would share the link, and this epoch would end later."""
    bucket, requests, got = Bucket(tail=0.0), Requests(Random(0)), list[int]()
    for block in range(400):
        requests.want(unit(block, shard=block), (1, block // 200, block))
    bucket.run(
        requests,
        lambda: sum(each < 200 for each in got) == 200,
        lambda done: got.extend(each.key for each in done),
    )
    ahead = sum(each >= 200 for each in got) + len(bucket.answers)
    assert 0 < ahead * SIZE < START_BYTES / 2


def test_what_is_needed_now_is_requested_at_once_unless_the_bucket_refuses():
    """More than the limit at first: else the first batch takes several round trips."""
    count = 2 * START_BYTES // SIZE
    requests = Requests(Random(0))
    for block in range(count):
        requests.want(unit(block, shard=block), NEEDED)
    gets = requests.due(0.0)
    assert len(gets) == count
    for get in gets:
        requests.failed(get.number, THROTTLED, "503", 0.1)
    assert len(requests.due(1000.0)) == START_BYTES // 2 // SIZE


def test_neighbours_in_a_shard_are_one_request_but_not_all_of_them():
    """So that several are under way; never across shards."""
    requests = Requests(Random(0))
    for block in range(40):
        requests.want(unit(block, MIB), (1, 0, 0))
    gets = requests.due(0.0)
    assert [get.length // MIB for get in gets] == [8, 8, 8, 8, 8]
    assert all(len({each.shard for each in get.units}) == 1 for get in gets)


def test_a_request_is_not_longer_for_a_neighbour_that_is_due_later():
    """Somebody waits for the first of them."""
    requests = Requests(Random(0))
    for block in range(10):
        requests.want(unit(block, MIB), (1, 0, block % 2))
    assert [get.units[0].key for get in requests.due(0.0)] == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]


def test_the_bytes_in_flight_grow_as_long_as_that_helps():
    """Until the link is full: the rest would only wait in a queue."""
    fast, requests, got = Bucket(rate=4e9, tail=0.0), Requests(Random(0)), []
    for block in range(3000):
        requests.want(unit(block, shard=block), (1, 0, block))
    fast.run(requests, lambda: len(got) == 3000, got.extend)
    assert requests.limit > START_BYTES
    assert 3000 * SIZE / fast.now > 0.7 * 4e9
    slow, requests, got = Bucket(rate=150e6, tail=0.0), Requests(Random(0)), []
    for block in range(600):
        requests.want(unit(block, shard=block), (1, 0, block))
    slow.run(requests, lambda: len(got) == 600, got.extend)
    assert requests.limit == START_BYTES
    assert 600 * SIZE / slow.now > 0.95 * 150e6


def test_the_bytes_in_flight_do_not_grow_where_a_few_keep_the_bucket_busy():
    """Though its rate grew at first, as other programs left the link."""
    slow, requests, got = Bucket(rate=150e6, tail=0.0), Requests(Random(0)), []
    for block in range(40):
        requests.want(unit(block, shard=block), (1, 0, block))
    slow.run(requests, lambda: len(got) >= 1, got.extend)
    slow.busy = slow.now + 0.4
    for block in range(40, 300):
        requests.want(unit(block, shard=block), (1, 0, block))
    slow.run(requests, lambda: len(got) == 300, got.extend)
    assert slow.most <= START_BYTES + SIZE


def test_a_refusal_halves_what_is_in_flight_once_for_all_that_were_sent_together():
    """And it grows again by steps."""
    requests = Requests(Random(0))
    for block in range(1000):
        requests.want(unit(block, shard=block), (1, 0, block))
    sent = requests.due(0.0)
    for get in sent:
        requests.failed(get.number, THROTTLED, "503", 0.1)
    assert requests.limit == START_BYTES // 2
    assert requests.counts.failed[THROTTLED] == len(sent)


def test_a_slow_request_gets_a_second_and_the_first_answer_counts():
    """After twice the 95th percentile; the other answer is ignored."""
    requests = Requests(Random(0))
    for block in range(100):
        requests.want(unit(block, shard=block), (1, 0, block))
    now = 0.0
    while requests.counts.requests < 100:
        for get in requests.due(now):
            requests.arrived(get.number, {}, now + 0.1)
        now += 0.1
    requests.want(unit(500, shard=500), NEEDED)
    (first,) = requests.due(now)
    assert requests.due(now + 0.15) == []
    (second,) = requests.due(requests.wakes_at(now))
    assert second.units == first.units
    assert [each.key for each in requests.arrived(second.number, {}, now + 0.3)[0]] == [500]
    assert requests.arrived(first.number, {}, now + 0.4) == ([], [])


def test_a_request_that_does_not_end_is_given_up_for_another():
    """The longer the more bytes it asks for."""
    requests = Requests(Random(0))
    requests.want(unit(0), NEEDED)
    (get,) = requests.due(0.0)
    assert requests.due(TIMEOUT_S) == []
    late = TIMEOUT_S + get.length / (2 * MIB)
    again = [each for at in (late, late + 1) for each in requests.due(at)]
    assert [each.units for each in again] == [get.units]
    assert requests.arrived(get.number, {}, 9.0) == ([], [])


def test_a_wrong_checksum_is_fetched_again_and_the_same_twice_is_an_error():
    """What the network flips differs each time; what was written does not."""
    requests = Requests(Random(0))
    requests.want(unit(0), NEEDED)
    for checksum in (1, 2, 3):
        (get,) = requests.due(0.0)
        assert requests.arrived(get.number, {0: checksum}, 0.0) == ([], [])
    (get,) = requests.due(0.0)
    done, (lost,) = requests.arrived(get.number, {0: 2}, 0.0)
    assert (done, lost.unit.key, lost.kind, lost.message) == ([], 0, WRONG, "00000002")


@pytest.mark.parametrize(("kind", "tries"), [(MISSING, 1), (DENIED, 2), (BROKEN, MOST_TRIES)])
def test_what_cannot_be_had_is_given_up(kind, tries):
    """At once if it does not exist; after new credentials; or after many tries."""
    requests, now, lost = Requests(Random(0)), 0.0, []
    requests.want(unit(0), NEEDED)
    sent = 0
    while not lost:
        for get in requests.due(now):
            sent += 1
            lost += requests.failed(get.number, kind, "why", now)
        now += 30.0
    assert sent == tries
    assert requests.must_renew == (kind == DENIED)
    assert requests.due(now + 60) == []


# ---- what stays ----------------------------------------------------------------------------------


def test_a_block_of_two_clients_is_fetched_once_and_stays_for_both():
    """Workers that read one window."""
    residency = Residency()
    assert residency.hold(1, [0, 1], 0) == [0, 1]
    residency.put_in_memory(0)
    assert residency.hold(2, [0, 2], 0) == [2]
    assert residency.leave(1) == [1]
    assert residency.is_here(0)
    assert sorted(residency.leave(2)) == [0, 2]


def test_what_is_on_disk_is_read_into_memory_when_it_is_held():
    """And leaves memory with who held it."""
    residency = Residency()
    residency.put_on_disk(0)
    assert residency.hold(1, [0, 1, 2], 0) == [0, 1, 2]
    residency.put_in_memory(0)
    assert residency.hold(2, [0]) == []
    assert residency.leave(1) == [1, 2]
    assert residency.leave(2) == [0]
    assert not residency.is_here(0)


def test_what_two_epochs_did_not_use_makes_place_and_what_an_earlier_job_left_does_not_at_once():
    """Lanes that moved to another node."""
    residency = Residency()
    for block in range(4):
        residency.put_on_disk(block)
    residency.hold(1, [0, 1], 7)
    assert residency.stale() == []
    residency.hold(1, [0, 1], 8)
    assert residency.stale() == []
    residency.hold(1, [0], 9)
    residency.release(1, [0, 1, 0, 1, 0])
    assert residency.stale() == [2, 3]
    assert residency.stale() == []
    residency.forget(1)
    residency.hold(1, [9], 11)
    assert residency.stale() == [0]


@pytest.mark.slow
@given(st.data())
def test_a_block_is_here_if_and_only_if_it_is_held(data):
    """Whatever clients do; and nothing is held when all have left."""
    residency, here, held = Residency(), set(), {1: [], 2: []}
    for _ in range(data.draw(st.integers(1, 25))):
        client = data.draw(st.sampled_from([1, 2]))
        if held[client] and data.draw(st.booleans()):
            some = data.draw(st.lists(st.sampled_from(held[client]), min_size=1, unique=True))
            for block in some:
                held[client].remove(block)
            here.difference_update(residency.release(client, some))
        else:
            blocks = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True))
            held[client] += blocks
            for block in residency.hold(client, blocks, data.draw(st.sampled_from([None, 0]))):
                residency.put_in_memory(block)
                here.add(block)
        assert {block for block in range(12) if residency.is_held(block)} == here
        assert here == {*held[1], *held[2]}
    for client in held:
        here.difference_update(residency.leave(client))
    assert here == set()
