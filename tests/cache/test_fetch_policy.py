"""What is fetched when, and what stays: pure decisions."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.base.store_errors import BROKEN, DENIED, MISSING
from forebay.caching.fetch_policy import (
    LIMIT_BYTES,
    MIB,
    MOST_BYTES,
    NEEDED,
    WRONG,
    Requests,
    Unit,
)
from forebay.caching.residency import Residency

SIZE = 4 * MIB


def unit(block, size=SIZE, shard=None):
    """Return a block of a shard with 16 of them."""
    return Unit(block, block // 16 if shard is None else shard, block % 16 * size, size)


@given(st.integers(0, 10**6), st.integers(1, 200), st.sampled_from([0.0, 0.3]))
def test_everything_arrives_once_within_the_limit_of_bytes(seed, count, wrong):
    """Also what arrives with wrong bytes at first, and what is wanted twice or cancelled."""
    random, requests, got, flights = Random(seed), Requests(), [], []
    blocks = random.sample(range(count), count)
    for at, block in enumerate(blocks):
        requests.want(unit(block), (1, 0, at))
        if random.random() < 0.1:
            requests.cancel(block)
            requests.want(unit(block), (1, 0, at))
    while len(got) < count:
        flights += requests.due(0.0)
        assert 0 < sum(get.length for get in flights) <= LIMIT_BYTES
        get = flights.pop(random.randrange(len(flights)))
        bad = {each.key: random.getrandbits(32) for each in get.units if random.random() < wrong}
        done, lost = requests.arrived(get.number, bad, 0.0)
        assert lost == []
        got += [each.key for each in done]
    assert sorted(got) == sorted(blocks)
    assert requests.due(0.0) == []


def test_what_is_needed_now_overtakes_what_is_needed_later():
    """A reader waits for it; an earlier epoch comes before a later one."""
    requests = Requests()
    for block in range(0, 320, 2):
        requests.want(unit(block), (1, block < 160, block))
    sent = requests.due(0.0)
    after = 160 + 2 * LIMIT_BYTES // SIZE
    assert [get.units[0].key for get in sent] == [*range(160, after, 2)]
    requests.want(unit(301), NEEDED)
    assert [get.units[0].key for get in requests.due(0.1)] == [301]
    requests.arrived(sent[0].number, {}, 0.1)
    assert requests.due(0.1) == []
    requests.arrived(sent[1].number, {}, 0.1)
    assert [get.units[0].key for get in requests.due(0.1)] == [after]


def test_more_is_requested_at_once_of_what_is_needed_now():
    """Else the first batch takes several round trips."""
    requests = Requests()
    for block in range(2 * MOST_BYTES // SIZE):
        requests.want(unit(block, shard=block), NEEDED)
    assert len(requests.due(0.0)) == MOST_BYTES // SIZE


def test_neighbours_in_a_shard_are_one_request_but_not_all_of_them():
    """So that several are under way; never across shards."""
    requests = Requests()
    for block in range(40):
        requests.want(unit(block, MIB), (1, 0, 0))
    gets = requests.due(0.0)
    assert [get.length // MIB for get in gets] == [8, 8, 8, 8, 8]
    assert all(len({each.shard for each in get.units}) == 1 for get in gets)


def test_a_request_is_not_longer_for_a_neighbour_that_is_due_later():
    """Somebody waits for the first of them."""
    requests = Requests()
    for block in range(10):
        requests.want(unit(block, MIB), (1, 0, block % 2))
    assert [get.units[0].key for get in requests.due(0.0)] == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]


def test_a_wrong_checksum_is_fetched_again_and_the_same_twice_is_an_error():
    """What the network flips differs each time; what was written does not."""
    requests = Requests()
    requests.want(unit(0), NEEDED)
    for checksum in (1, 2, 3):
        (get,) = requests.due(0.0)
        assert requests.arrived(get.number, {0: checksum}, 0.0) == ([], [])
    (get,) = requests.due(0.0)
    done, (lost,) = requests.arrived(get.number, {0: 2}, 0.0)
    assert (done, lost.unit.key, lost.kind, lost.message) == ([], 0, WRONG, "00000002")


@pytest.mark.parametrize("kind", [MISSING, DENIED, BROKEN])
def test_what_cannot_be_had_is_given_up_at_once(kind):
    """The client of the bucket has tried again what may pass."""
    requests = Requests()
    requests.want(unit(0), NEEDED)
    (get,) = requests.due(0.0)
    (lost,) = requests.failed(get.number, kind, "why", 0.0)
    assert (lost.unit.key, lost.kind, lost.message) == (0, kind, "why")
    assert requests.due(0.0) == []


def test_what_failed_while_the_process_was_frozen_is_requested_again():
    """Its time ran out while nothing ran; a request that was sent later has no excuse."""
    requests = Requests()
    requests.want(unit(0), NEEDED)
    (get,) = requests.due(0.0)
    requests.excuse()
    assert requests.failed(get.number, BROKEN, "timed out", 900.0) == []
    (again,) = requests.due(900.0)
    assert again.units == get.units
    assert len(requests.failed(again.number, BROKEN, "timed out", 1000.0)) == 1


# ---- what stays ----------------------------------------------------------------------------------


def test_a_block_of_two_clients_is_fetched_once_and_stays_for_both():
    """Workers that read one window."""
    residency = Residency()
    assert residency.hold(1, [0, 1]) == [0, 1]
    residency.put_in_memory(0)
    assert residency.hold(2, [0, 2]) == [2]
    assert residency.leave(1) == [1]
    assert residency.is_here(0)
    assert sorted(residency.leave(2)) == [0, 2]


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
            for block in residency.hold(client, blocks):
                residency.put_in_memory(block)
                here.add(block)
        assert {block for block in range(12) if residency.is_held(block)} == here
        assert here == {*held[1], *held[2]}
    for client in held:
        here.difference_update(residency.leave(client))
    assert here == set()
