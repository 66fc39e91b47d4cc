"""What a loader has measured, as numbers on a page: the same diagnosis, whoever wrote them."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_diagnosis import trace_of, workers

from forebay.observe import page_numbers as module
from forebay.observe.diagnosis import diagnose
from forebay.observe.measurements import Fetched, Measured, SlowSample
from forebay.observe.page_numbers import (
    ON_PAGE,
    as_numbers,
    from_numbers,
    verdict_of,
)

SETUP = workers(2, tried={2: 20.5, 3: 30.0}, fetched=Fetched(requests=3, nbytes=10**9))


def taken(count=300, at=0.0, **more) -> Measured:
    """Return what a loader measured whose workers are too few, from a time on."""
    chance = random.Random(0)
    times = [0.084 * chance.uniform(0.9, 1.1) for _ in range(count)]
    steps, batches = trace_of([0.02] * count, workers(2), times, **more)
    return Measured(
        [each._replace(asked_at=each.asked_at + at) for each in steps],
        [each._replace(ended_at=each.ended_at + at) for each in batches],
        SlowSample(0.2, 17, 0, 3),
        "",
        11.0,
    )


@pytest.mark.parametrize("more", [{"cpu": 0.9}, {"cpu": 0.3, "idle": 0.1}], ids=str)
def test_the_diagnosis_of_a_page_is_that_of_its_last_batches(more):
    """Also after months, when the clock and the totals are large."""
    found = taken(at=1e7, **more)
    recent = found._replace(steps=found.steps[-ON_PAGE:], batches=found.batches[-ON_PAGE:])
    here = diagnose(recent, SETUP)
    there = diagnose(*from_numbers(json.loads(json.dumps(as_numbers(found, SETUP)))))
    assert (there.cause, there.advice, str(there)) == (here.cause, here.advice, str(here))
    assert there.evidence == pytest.approx(here.evidence, rel=1e-3, abs=1e-4)


def test_the_setup_of_a_page_is_the_loaders():
    """With what its fetcher said, and how fast other numbers of workers were."""
    _, setup = from_numbers(json.loads(json.dumps(as_numbers(taken(), SETUP))))
    assert setup == SETUP


def test_a_loader_without_batches_says_how_many_steps_it_takes():
    """Its page has no records."""
    numbers = as_numbers(Measured([], [], None, "", 0.0), SETUP)
    assert "too little to judge by: 0 steps" in verdict_of(json.loads(json.dumps(numbers)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
KNOWN = json.loads(json.dumps(as_numbers(taken(40), SETUP)))


@given(st.data())
def test_of_hostile_numbers_there_is_a_verdict_or_none(data):
    """Any value in any place: no error, no control character, no more than a page's records."""
    changed = {**KNOWN, "setup": dict(KNOWN["setup"])}
    place = data.draw(st.sampled_from([changed, changed["setup"]]))
    for name in data.draw(st.sets(st.sampled_from(sorted(place)), max_size=3)):
        place[name] = data.draw(JSON)
    text = verdict_of(changed)
    assert text.isprintable()
    assert len(text) <= 1000


def test_numbers_too_large_to_simulate_are_refused(monkeypatch):
    """They would take all memory of whoever looks."""
    with pytest.raises(ValueError, match="workers"):
        from_numbers(KNOWN | {"setup": KNOWN["setup"] | {"num_workers": 10**9}})
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(module, "ON_PAGE", ON_PAGE + 1)
        long = as_numbers(taken(), SETUP)
    with pytest.raises(ValueError, match="no records"):
        from_numbers(long)
    assert verdict_of(long) == ""
