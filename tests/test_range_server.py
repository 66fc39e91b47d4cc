"""The range server of tests and benchmarks: what clients get, and that faults are what they say."""

from __future__ import annotations

import http.client
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from buckets import PATIENCE_S
from kit.range_faults import KINDS, Asked, Fault, Script, Settings
from kit.range_server import RangeServer

pytestmark = pytest.mark.full

BODY = bytes(range(256)) * 4096
BLOCK = 4096


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Make a folder with one bucket and one object of 1 MiB."""
    folder = tmp_path_factory.mktemp("buckets")
    (folder / "bucket").mkdir()
    (folder / "bucket" / "a.bin").write_bytes(BODY)
    return folder


@pytest.fixture(scope="module")
def running(root):
    """Serve the folder."""
    with RangeServer(root) as server:
        yield server


class Client:
    """Plain HTTP with one connection that is kept."""

    def __init__(self, server):
        self.connection = http.client.HTTPConnection(server.url.removeprefix("http://"))

    def ask(self, path="/bucket/a.bin", method="GET", body=None, **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(method, path, body, named)
        answer = self.connection.getresponse()
        return answer, answer.read()

    def status(self, *arguments, **headers):
        return self.ask(*arguments, **headers)[0].status


@pytest.fixture
def serve(running):
    """Give the server with other settings, and a client of its own; both several times."""
    clients = []

    def start(**settings):
        running.set(**settings)
        clients.append(Client(running))
        return running, clients[-1]

    yield start
    for client in clients:
        client.connection.close()


@pytest.mark.parametrize(
    ("span", "begin", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=100-4195", 100, 4196),
        ("bytes=-10", len(BODY) - 10, len(BODY)),
        (f"bytes={len(BODY) - 5}-", len(BODY) - 5, len(BODY)),
        (f"bytes=5-{2 * len(BODY)}", 5, len(BODY)),
    ],
)
def test_a_range_is_answered_with_its_bytes(serve, span, begin, end):
    """The body and Content-Range agree with what was asked for."""
    answer, body = serve()[1].ask(range=span)
    assert (answer.status, body) == (206, BODY[begin:end])
    assert answer.headers["Content-Range"] == f"bytes {begin}-{end - 1}/{len(BODY)}"


def test_conditions_are_kept_over_one_connection(serve, root):
    """If-Match and If-None-Match are compared with an ETag that changes with the file."""
    server, client = serve()
    answer, body = client.ask()
    etag = answer.headers["ETag"]
    assert body == BODY
    assert client.ask(method="HEAD")[0].headers["Content-Length"] == str(len(BODY))
    assert client.status(if_match=etag) == 200
    assert client.status(if_none_match=etag) == 304
    assert client.status(range=f"bytes={len(BODY)}-") == 416
    (root / "bucket" / "new").write_bytes(BODY)
    (root / "bucket" / "new").replace(root / "bucket" / "a.bin")
    assert client.status(if_match=etag) == 412
    assert server.counters()["connections_most"] == 1


def test_nothing_outside_the_folder_is_served(serve, root):
    """A path that leaves a bucket is a key that there is not."""
    (root.parent / "secret").write_text("secret")
    client = serve()[1]
    for path in ("/bucket/../../secret", "/../secret", "/bucket/%2e%2e/%2e%2e/secret", "//secret"):
        assert client.status(path) == 404


@pytest.mark.slow
def test_s3_clients_write_list_and_remove(serve, root, monkeypatch):
    """boto3 finds what it needs: pages, prefixes, parts, copies, and names of any kind."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.exceptions import ClientError

    server, _ = serve()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with closing(boto3.client("s3")) as s3:
        s3.create_bucket(Bucket="new")
        s3.put_object(Bucket="new", Key="a/odd name+&é", Body=b"1")
        s3.copy_object(Bucket="new", Key="b", CopySource={"Bucket": "new", "Key": "a/odd name+&é"})
        s3.create_multipart_upload(Bucket="new", Key="never ended")
        parts = TransferConfig(multipart_threshold=2**20, multipart_chunksize=5 * 2**20)
        (root / "large").write_bytes(BODY * 6)
        s3.upload_file(str(root / "large"), "new", "c", Config=parts)
        assert (root / "new" / "c").read_bytes() == BODY * 6
        with pytest.raises(ClientError, match="PreconditionFailed"):
            s3.put_object(Bucket="new", Key="b", Body=b"2", IfNoneMatch="*")
        pager = s3.get_paginator("list_objects_v2")
        pages = list(pager.paginate(Bucket="new", PaginationConfig={"PageSize": 1}))
        assert [each["Key"] for page in pages for each in page["Contents"]] == [
            *("a/odd name+&é", "b", "c")
        ]
        top = s3.list_objects_v2(Bucket="new", Delimiter="/")
        assert [each["Prefix"] for each in top["CommonPrefixes"]] == ["a/"]
        assert [each["Key"] for each in top["Contents"]] == ["b", "c"]
        s3.delete_objects(Bucket="new", Delete={"Objects": [{"Key": "b"}, {"Key": "c"}]})
        s3.delete_object(Bucket="new", Key="a/odd name+&é")
        s3.delete_bucket(Bucket="new")
        with pytest.raises(ClientError, match="NoSuchBucket"):
            s3.list_objects_v2(Bucket="new")
    assert not (root / "new").exists()


FSSPEC = """
import sys
import fsspec
url = sys.argv[1]
s3 = fsspec.filesystem("s3")
assert s3.ls("bucket") == ["bucket/a.bin"]
assert s3.cat_file("bucket/a.bin", start=3, end=9) == bytes(range(3, 9))
s3.pipe_file("bucket/x/y", b"z")
s3.mv("bucket/x/y", "bucket/x/z")
assert s3.find("bucket/x") == ["bucket/x/z"]
s3.rm("bucket/x", recursive=True)
with fsspec.open(f"{url}/bucket/a.bin") as file:
    file.seek(258)
    assert file.read(2) == bytes((2, 3))
"""


OBSTORE = """
import obstore
from obstore.store import S3Store
store = S3Store("bucket", client_options={"allow_http": True})
body = bytes(6 * 2**20)
assert bytes(obstore.get_range(store, "a.bin", start=3, length=6)) == bytes(range(3, 9))
obstore.put(store, "x/y", body, chunk_size=5 * 2**20)
assert [each["path"] for each in obstore.list(store).collect()] == ["a.bin", "x/y"]
assert bytes(obstore.get(store, "x/y").bytes()) == body
obstore.delete(store, ["x/y"])
"""


def run(script, server):
    """Run a program with what S3 clients read from the environment."""
    environment = os.environ | server.environment
    subprocess.run([sys.executable, "-c", script, server.url], check=True, env=environment)


@pytest.mark.slow
def test_fsspec_works_by_s3_and_by_http(serve, root):
    """The file systems that forebay opens URLs with."""
    run(FSSPEC, serve()[0])
    assert [each.name for each in (root / "bucket").iterdir()] == ["a.bin"]


@pytest.mark.slow
def test_obstore_reads_writes_and_lists(serve, root):
    """The same for obstore, where it is installed; it keeps descriptors as long as its process."""
    pytest.importorskip("obstore")
    run(OBSTORE, serve()[0])
    assert [each.name for each in (root / "bucket").iterdir()] == ["a.bin"]


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("slowdown", 503, b"<Code>SlowDown</Code>"),
        ("error", 500, b"<Code>InternalError</Code>"),
        ("expired", 403, b"<Code>ExpiredToken</Code>"),
        ("denied", 403, b"<Code>AccessDenied</Code>"),
        ("missing", 404, b"<Code>NoSuchKey</Code>"),
    ],
)
def test_a_refusal_has_the_status_and_the_code_of_s3(serve, kind, status, code):
    """One request is refused, and the connection is good for the next."""
    server, client = serve(faults=[Fault(kind, count=1)])
    answer, body = client.ask()
    assert answer.status == status and code in body
    assert client.ask()[1] == BODY
    counted = server.counters()
    assert counted["faults"] == {kind: 1}
    assert counted["requests"] == {"GET": 2}
    assert counted["bytes_by_key"] == {"bucket/a.bin": len(BODY)}
    assert counted["repeated"] == counted["connections_most"] == 1


def test_a_reset_comes_in_the_middle_of_the_body(serve):
    """What is read before it is less than was promised."""
    server, client = serve(faults=[Fault("reset")])
    with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
        client.ask()
    assert server.counters()["bytes"] == len(BODY) // 2


def test_a_body_is_cut_where_it_is_asked_for(serve):
    """The bytes until there are delivered, and then the connection ends."""
    _, client = serve(faults=[Fault("cut", at=0.25)])
    with pytest.raises(http.client.IncompleteRead) as found:
        client.ask()
    assert found.value.partial == BODY[: len(BODY) // 4]


def test_a_short_body_agrees_with_its_length(serve):
    """Only Content-Range says that more was asked for: nothing fails in a client that trusts."""
    _, client = serve(faults=[Fault("short", at=0.5)])
    answer, body = client.ask(range=f"bytes=0-{BLOCK - 1}")
    assert body == BODY[: BLOCK // 2]
    assert answer.headers["Content-Range"] == f"bytes 0-{BLOCK - 1}/{len(BODY)}"


def test_a_flipped_bit_is_one_and_the_same_by_seed(serve):
    """The length is right, one bit is not, and a second run flips the same one."""
    found = []
    for _ in range(2):
        _, client = serve(seed=7, faults=[Fault("flip", count=1)])
        body = client.ask(range=f"bytes=0-{BLOCK - 1}")[1]
        changed = int.from_bytes(body, "big") ^ int.from_bytes(BODY[:BLOCK], "big")
        assert len(body) == BLOCK and changed.bit_count() == 1
        found.append(changed)
        assert client.ask(range=f"bytes=0-{BLOCK - 1}")[1] == BODY[:BLOCK]
    assert found[0] == found[1]


def test_a_rewritten_object_has_another_etag(serve):
    """A client that holds on to the old one is refused, in GET and in HEAD."""
    server, client = serve()
    etag = client.ask(method="HEAD")[0].headers["ETag"]
    server.set(faults=[Fault("rewritten", methods=("GET", "HEAD"))])
    assert client.status(if_match=etag) == 412
    assert client.ask(method="HEAD")[0].headers["ETag"] != etag


def test_a_token_expires_and_another_one_does_not(serve):
    """Who signs with a new token is served again."""
    _, client = serve(faults=[Fault("expired", token="old-*")])
    assert client.status(x_amz_security_token="old-1") == 403
    assert client.status(x_amz_security_token="new-1") == 200
    signed = "AWS4-HMAC-SHA256 Credential=old-key/20260101/us-east-1/s3/aws4_request, Signature=0"
    assert client.status(authorization=signed) == 403


@pytest.mark.slow
def test_a_stall_holds_up_its_own_connection_only(serve):
    """Others are served while one waits; what stalled arrives whole."""
    server, client = serve(faults=[Fault("stall", count=1, seconds=3.0)])
    found = []
    stalled = threading.Thread(target=lambda: found.append(client.ask()[1]))
    stalled.start()
    deadline = time.monotonic() + PATIENCE_S
    while not server.counters()["faults"]:
        assert time.monotonic() < deadline
    other = Client(server)
    with closing(other.connection):
        assert other.ask()[1] == BODY
        stalled.join()
    assert found == [BODY]
    assert server.counters()["serving_most"] == server.counters()["connections_most"] == 2


def test_a_connection_is_no_faster_than_its_rate(serve):
    """1 MiB at 10 MB/s, less what may be made up for, takes a twentieth of a second at least."""
    _, client = serve(rate=10e6, first_byte_s=0.001)
    began = time.monotonic()
    assert client.ask()[1] == BODY
    assert time.monotonic() - began > 0.05


def test_all_connections_share_the_link(serve):
    """Two of 1 MiB each at 10 MB/s, less what may be made up for, take a tenth of a second."""
    server, client = serve(link=10e6)
    other = Client(server)
    began = time.monotonic()
    with closing(other.connection):
        thread = threading.Thread(target=client.ask)
        thread.start()
        assert other.ask()[1] == BODY
        thread.join()
    assert time.monotonic() - began > 0.1


def test_an_unknown_fault_or_setting_is_refused(serve):
    """A slip in a test does not serve without faults."""
    server, _ = serve()
    with pytest.raises(ValueError, match="no fault 'slow'"):
        server.set(faults=[replace(Fault("cut"), kind="slow")])
    with pytest.raises(ValueError, match="first_bite_s"):
        server.set(first_bite_s=1)


PARENT = """
import os, sys, time
from kit.range_server import RangeServer
server = RangeServer(sys.argv[1]).__enter__()
if os.fork() == 0:
    time.sleep(1000)
print(server.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_the_server_ends_with_a_parent_that_is_killed(root):
    """Also where a child of the parent lives on with copies of all its descriptors."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(root)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parent,
    ) as parent:
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        ended, _, _ = select.select([pidfd], [], [], PATIENCE_S)
        os.killpg(parent.pid, signal.SIGKILL)
    os.close(pidfd)
    assert ended


ASKED = [Asked("GET", "bucket/a.bin", f"bytes={at}-", 0, "") for at in range(2000)]


def test_draws_depend_on_the_request_and_the_seed_alone():
    """Whatever the order of arrival, the same requests fail; another seed chooses others."""
    faults = (Fault("reset", share=0.1), Fault("slowdown", share=0.1))
    forth, back, other = (Script(Settings(seed=seed, faults=faults), 0.0) for seed in (1, 1, 2))
    found = {asked: forth.fault(asked, 0.0) for asked in ASKED}
    assert found == {asked: back.fault(asked, 9.0) for asked in reversed(ASKED)}
    assert found != {asked: other.fault(asked, 0.0) for asked in ASKED}
    # Four standard deviations of 2000 draws.
    for fault, share in zip(faults, (0.1, 0.09), strict=True):
        expected = 4 * math.sqrt(share / len(ASKED))
        assert list(found.values()).count(fault) / len(ASKED) == pytest.approx(share, abs=expected)


def test_a_second_try_is_a_draw_of_its_own():
    """A retry of a request that failed is not bound to fail again."""
    script = Script(Settings(faults=(Fault("reset", share=0.5),)), 0.0)
    asked = next(each for each in ASKED if script.fault(each, 0.0))
    tries = [script.fault(replace(asked, before=before), 0.0) for before in range(1, 20)]
    assert None in tries and script.settings.faults[0] in tries


def test_a_sequence_skips_counts_and_ends():
    """The third and fourth request of a key meet the fault, between two times."""
    fault = Fault("cut", keys="*/a.bin", skip=2, count=2, begin_s=10, end_s=20)
    script = Script(Settings(faults=(fault,)), 100.0)
    other = replace(ASKED[0], name="bucket/b.bin")
    assert script.fault(ASKED[0], 105.0) is None  # too early: not counted
    assert [script.fault(each, 110.0) is fault for each in (*ASKED[:2], other, *ASKED[2:5])] == [
        *(False, False, False, True, True, False)
    ]
    late = Script(script.settings, 100.0)
    assert [late.fault(each, 121.0) for each in ASKED[:4]] == [None] * 4


def test_latency_is_lognormal_with_a_slow_tail():
    """Its median is what was set; the slow share takes `slow_factor` times as long."""
    settings = Settings(first_byte_s=0.03, spread=0.3, slow_share=0.1, slow_factor=100)
    delays = [Script(settings, 0.0).delay_s(asked) for asked in ASKED]
    slow = [each for each in delays if each > 0.5]
    assert statistics.median(delays) == pytest.approx(0.03, rel=0.1)
    assert len(slow) / len(ASKED) == pytest.approx(0.1, abs=0.03)
    usual = sorted(map(math.log, set(delays) - set(slow)))
    assert statistics.stdev(usual) == pytest.approx(0.3, rel=0.1)


def test_requests_above_the_rate_are_throttled():
    """At 100 a second, a tenth of a second's worth passes at once, and half of that a bit later."""
    script = Script(Settings(requests_per_s=100), 0.0)
    assert 10 <= [script.throttled(1000.0) for _ in range(100)].count(False) <= 11
    assert [script.throttled(1000.05) for _ in range(100)].count(False) == 5


def test_every_kind_of_fault_is_described():
    """`KINDS` is the list that a test or a person chooses from."""
    assert all(Fault(kind).kind == kind for kind in KINDS)
