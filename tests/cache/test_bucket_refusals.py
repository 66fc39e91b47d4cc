"""What a store refuses for good is said at once, and not tried again."""

from __future__ import annotations

import pytest
import torch
from served import served

import forebay
from forebay.caching import stores
from forebay.errors import InputError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A cache of one shard."""
    folder = tmp_path_factory.mktemp("served") / "cache"
    samples = [torch.full((1000,), float(number)) for number in range(200)]
    forebay.cache(samples, folder, num_workers=0, progress=False)
    return folder


def test_a_server_without_ranges_is_said_and_asked_once(folder):
    """Every range would be answered with the whole object."""
    with served(folder) as server:
        with pytest.raises(InputError, match="Its server ignores ranges") as raised:
            _ = forebay.open_cache(server.url)[3]
        assert "network" not in str(raised.value)
        assert server.gets["shard-00000.arrow"] <= 1


def test_a_client_that_returns_the_whole_object_is_refused():
    """As one of HTTP does, without an error, where the server ignores ranges."""

    class Whole(stores.ObjectStore):
        def _connect(self):
            pass

        def _read(self, name, offset, length):
            return bytes(100), ""

    with pytest.raises(stores.BucketError, match="ignores ranges: 100 bytes came") as caught:
        Whole("http://host/cache").read("shard-00000.arrow", 8, 16)
    assert caught.value.kind == "refused"


@pytest.mark.parametrize(
    ("url", "words", "advice"),
    [
        ("sftp://me@localhost/cache", "paramiko", "sftp:// paramiko"),
        ("nonsense://bucket/cache", "Protocol not known", "Install the file system of the URL"),
    ],
)
def test_a_file_system_that_is_not_installed_is_said_by_the_caller(url, words, advice, capfd):
    """By the error itself: the fetcher did not die, and prints nothing."""
    with pytest.raises(InputError, match=words) as caught:
        len(forebay.open_cache(url))
    assert advice in str(caught.value)
    assert "ended" not in str(caught.value)
    assert capfd.readouterr().err == ""
