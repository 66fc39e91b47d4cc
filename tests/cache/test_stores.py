"""What may pass in a bucket is tried again, and silence ends with an error that says its limit."""

from __future__ import annotations

import pytest

from kit.range_server import Fault, RangeServer

READ = """
from forebay.base import files
files.SILENT_S, files.PATIENCE_S = 0.3, 1.5
from forebay.caching import stores
stores.SILENT_S, stores.PATIENCE_S = 0.3, 1.5
store = getattr(stores, sys.argv[1])(sys.argv[2])
try:
    found, tag = store.read_tagged("x", 100, 50_000)
    print(bytes(found) == (bytes(range(256)) * 400)[100:50_100])
except stores.BucketError as error:
    print(error.kind, error)
"""
FAULTS = [
    ([Fault("stall", count=2, seconds=60.0)], "True"),
    ([Fault("cut", count=2), Fault("short", count=1)], "True"),
    ([Fault("slowdown", count=2), Fault("error", count=1)], "True"),
    ([Fault("expired", count=1)], "True"),
    ([Fault("stall", seconds=60.0)], "broken no answer within "),
    ([Fault("denied")], "denied AccessDenied"),
    ([Fault("missing")], "missing NoSuchKey"),
]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Serve one object."""
    folder = tmp_path_factory.mktemp("stores")
    (folder / "bucket").mkdir()
    (folder / "bucket" / "x").write_bytes(bytes(range(256)) * 400)
    with RangeServer(folder) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize(("faults", "answer"), FAULTS)
@pytest.mark.parametrize("client", ["_Obstore", "_Fsspec"])
def test_what_may_pass_is_tried_again_and_silence_ends_in_words(
    running, monkeypatch, script, client, faults, answer
):
    """By obstore or fsspec: a cut answer, a refusal, silence; not what stays as it is."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    running.set(faults=faults)
    code, out, err = script(READ, client, "s3://bucket").end()
    assert code == 0, err
    assert out.startswith(answer)
    if answer.startswith("broken"):
        assert "which is tried for 1.5 s" in out


STORE = """
from forebay.base import files
files.SILENT_S, files.PATIENCE_S = 0.3, 1.5
from forebay.base.file_stores import Store
try:
    print(len(Store(sys.argv[1], forebay.InputError).read("x")))
except forebay.InputError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize("protocol", ["s3", "http"])
def test_a_store_that_is_silent_ends_a_call_and_one_that_answers_again_does_not(
    running, monkeypatch, script, protocol, count
):
    """As `cache` and `preprocess` read a URL: in words that name the object."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    running.set(faults=[Fault("stall", count=count, seconds=60.0)])
    url = "s3://bucket" if protocol == "s3" else f"{running.url}/bucket"
    code, out, err = script(STORE, url).end()
    assert code == 0, err
    assert out.startswith("102400" if count else f"{url}/x cannot be read: ")
