"""Shards at `hf://`, by a stand-in for the file system of `huggingface_hub`."""

from __future__ import annotations

import gc
import sys
from importlib import import_module

import pytest
from test_formats import SAMPLES, WRITERS, opened

import forebay
from forebay.shards.location import find_shards

# As the library has it: names keep the revision as it was given, and say what a file's content is.
PACKAGE = """
import hashlib
import os

from fsspec import AbstractFileSystem


class HfFileSystem(AbstractFileSystem):
    protocol = "hf"

    def _there(self, path):
        return os.path.join(os.environ["HUB_OF_THE_TESTS"], self._strip_protocol(path))

    def info(self, path, **_):
        path, there = self._strip_protocol(path), self._there(path)
        if not os.path.exists(there):
            raise FileNotFoundError(path)
        if os.path.isdir(there):
            return {"name": path, "size": 0, "type": "directory"}
        with open(there, "rb") as file:
            blob = hashlib.sha1(file.read()).hexdigest()
        return {"name": path, "size": os.path.getsize(there), "type": "file", "blob_id": blob}

    def ls(self, path, detail=True, **_):
        path = self._strip_protocol(path)
        names = [path]
        if os.path.isdir(self._there(path)):
            names = [f"{path}/{name}" for name in sorted(os.listdir(self._there(path)))]
        infos = [*map(self.info, names)]
        return infos if detail else names

    def cat_file(self, path, start=None, end=None, **_):
        with open(self._there(path), "rb") as file:
            return file.read()[start:end]
"""
registry = import_module("fsspec.registry")  # a name of fsspec itself is a dict there
FOLDER = "datasets/user/set@~parquet/default/train"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Return the folder of a dataset; the package is found by processes that start, too."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "huggingface_hub.py").write_text(PACKAGE)
    folder = tmp_path / "hub" / FOLDER
    folder.mkdir(parents=True)
    for number in range(3):
        data = WRITERS[".parquet"](SAMPLES[30 * number : 30 * number + 30])
        (folder / f"{number:04}.parquet").write_bytes(data)
    monkeypatch.syspath_prepend(tmp_path / "package")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'package'}:{':'.join(sys.path)}")
    monkeypatch.setenv("HUB_OF_THE_TESTS", str(tmp_path / "hub"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(tmp_path))  # by which the tests find fetchers
    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
    registry._registry.pop("hf", None)
    yield folder
    registry._registry.pop("hf", None)
    sys.modules.pop("huggingface_hub", None)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["", "/*.parquet", "/{0000..0002}.parquet"])
def test_shards_of_a_branch_are_read_where_they_are(hub, names):
    """A revision in the URL stays as it was written; some columns, too."""
    from reading import await_no_fetcher

    url = f"hf://{FOLDER}{names}"
    samples = opened(url)
    assert samples.location == f"hf://{FOLDER}"
    assert samples.__getitems__([89, 0, 31]) == [SAMPLES[at] for at in (89, 0, 31)]
    assert opened(url, columns=["id"])[45] == {"id": 45}
    before = find_shards(url).shards
    (hub / "0001.parquet").write_bytes((hub / "0001.parquet").read_bytes()[::-1])
    after = find_shards(url).shards
    assert [one == two for one, two in zip(before, after, strict=True)] == [True, False, True]
    del samples
    gc.collect()
    await_no_fetcher()


def test_without_the_package_the_error_names_it(monkeypatch):
    """With what to install."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    registry._registry.pop("hf", None)
    with pytest.raises(forebay.InputError, match=r"hf://.*huggingface_hub"):
        opened(f"hf://{FOLDER}")
