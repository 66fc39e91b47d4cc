"""Stores that outputs go to in tests: this process's memory, and buckets on loopback."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing, contextmanager

import fsspec

# Seconds that what is sure to come may take on a busy machine.
PATIENCE_S = 180.0
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def empty_memory():
    """Give fsspec's memory file system, empty before and after."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@contextmanager
def bucket_server():
    """Serve buckets on a free port of loopback; give what a client's environment must say."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        port = process.stdout.readline().strip()
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }
        process.kill()


class Bucket:
    """A bucket as the tests look at it."""

    def __init__(self, client, name):
        self.client, self.name = client, name
        client.create_bucket(Bucket=name)

    def names(self):
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return [each["Key"] for page in pages for each in page.get("Contents", [])]

    def read(self, name):
        with closing(self.client.get_object(Bucket=self.name, Key=name)["Body"]) as body:
            return body.read()

    def outputs(self, folder="out/"):
        return {name.removeprefix(folder): self.read(name) for name in self._outputs(folder)}

    def _outputs(self, folder):
        own = (f"{folder}.forebay/", f"{folder}metadata.")
        names = [name for name in self.names() if name.startswith(folder)]
        return [name for name in names if not name.startswith(own)]

    def remove(self):
        for name in self.names():
            self.client.delete_object(Bucket=self.name, Key=name)
        self.client.delete_bucket(Bucket=self.name)


@contextmanager
def new_bucket(name):
    """Give an empty bucket of the server that the environment tells of, named after a test."""
    import boto3

    with closing(boto3.client("s3")) as client:
        yield Bucket(client, f"b{abs(hash(name))}")
