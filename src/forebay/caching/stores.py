"""Where the fetcher gets blocks, and where they stay: ranges of objects, and a file on disk."""

from __future__ import annotations

import json
import mmap
import os
import shutil
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from forebay.base.files import atomic_file, connect, open_regular, read_regular, settings_of
from forebay.base.process import kernel
from forebay.base.store_errors import BROKEN, store_error_kind, store_error_words
from forebay.errors import OutputError, shown_location, without_credentials

# ---- bucket --------------------------------------------------------------------------------------
# Read ranges of objects: with obstore where it is installed and knows the bucket, else by fsspec.
#
# Only the fetcher's process does: the libraries start threads of their own, and must not be forked.
# They make no attempts of their own, and every exception becomes a `BucketError`, so that
# `fetch_policy.py` decides what to try again.
#
# obstore in threads takes a tenth of s3fs's processor time for a request (docs/design/0011).

# Longer than `fetch_policy` lets a request take.
_TIMEOUT = timedelta(seconds=120)
# What fsspec's settings are called in obstore.
_S3_SETTINGS = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "anon": "skip_signature",
}


class BucketError(Exception):
    """A request failed.

    Attributes:
        kind: What happened; see `store_errors`.
    """

    def __init__(self, kind: str, message: str) -> None:
        """Leave out credentials, which libraries may repeat."""
        super().__init__(without_credentials(message))
        self.kind = kind

    @classmethod
    def of(cls, error: BaseException) -> BucketError:
        """Return what an exception of a library means."""
        return cls(store_error_kind(error), store_error_words(error))


class Bucket(ABC):
    """The folder that a URL names, for reading; used by many threads at once."""

    def __init__(self, url: str) -> None:
        """Connect."""
        self.url = url.rstrip("/")
        self.renew()

    @abstractmethod
    def renew(self) -> None:
        """Read the credentials again, and connect with them."""

    @abstractmethod
    def _read(self, name: str, offset: int, length: int | None) -> Any:
        """Return bytes of an object, all of them if `length` is None."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> memoryview:
        """Return `length` bytes of an object from `offset` on, or all; raise BucketError."""
        try:
            found = memoryview(self._read(name, offset, length)).cast("B")
        except Exception as error:
            raise BucketError.of(error) from error
        if length not in (None, len(found)):
            raise BucketError(BROKEN, f"{len(found):,} bytes came instead of {length:,}")
        return found

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {shown_location(self.url)!r}>"


class _Fsspec(Bucket):
    """Any file system of fsspec."""

    def renew(self) -> None:
        """See `Bucket`."""
        self._system, self._root = connect(self.url, anew=True)

    def _read(self, name: str, offset: int, length: int | None) -> Any:
        part = {} if length is None else {"start": offset, "end": offset + length}
        return self._system.cat_file(f"{self._root}/{name}", **part)


class _Obstore(Bucket):
    """S3, Google Cloud Storage, Azure or HTTP by obstore."""

    def renew(self) -> None:
        """See `Bucket`."""
        from obstore.store import from_url

        self._store = from_url(
            self.url,
            client_options={"timeout": _TIMEOUT, "allow_http": True},
            retry_config={"max_retries": 0},
            **_settings_of(self.url),
        )

    def _read(self, name: str, offset: int, length: int | None) -> Any:
        import obstore

        if length is None:
            return obstore.get(self._store, name).bytes()
        return obstore.get_range(self._store, name, start=offset, length=length)


def _settings_of(url: str) -> dict[str, Any]:
    """Return what obstore needs to know beside the URL: fsspec's settings and boto3's credentials.

    Raises:
        ValueError: fsspec has settings that obstore lacks.
    """
    protocol = url.partition("://")[0]
    given = settings_of(protocol)
    if protocol not in ("s3", "s3a"):
        if given:
            raise ValueError(f"{protocol} has settings")
        return {}
    client = dict(given.pop("client_kwargs", {}))
    config = {"region": client.pop("region_name")} if "region_name" in client else {}
    given |= client
    config |= {_S3_SETTINGS[name]: given.pop(name) for name in [*given] if name in _S3_SETTINGS}
    if given:
        raise ValueError(f"fsspec's settings {', '.join(given)}")
    settings: dict[str, Any] = {"config": config}
    # obstore reads keys of the environment by itself, and importing boto3 takes half a second.
    has_keys = all(os.environ.get(f"AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    if not has_keys and not {"access_key_id", "skip_signature"} & {*config}:
        try:
            from obstore.auth.boto3 import Boto3CredentialProvider

            settings["credential_provider"] = Boto3CredentialProvider()
        except Exception:  # noqa: BLE001 - without boto3 or its credentials: obstore looks itself
            return settings
    return settings


def bucket_at(url: str) -> Bucket:
    """Return what reads the folder at a URL: by obstore if it can, else by fsspec.

    Raises:
        BucketError: Neither can.
    """
    try:
        return _Obstore(url)
    except Exception:  # noqa: BLE001 - not installed, or it does not know the protocol
        try:
            return _Fsspec(url)
        except Exception as error:
            raise BucketError.of(error) from error


# ---- pins ----------------------------------------------------------------------------------------
# Blocks that stay on disk from epoch to epoch, and from job to job.
#
#     blocks.data   preallocated; each block lies at a page of its own
#     blocks.pins   for each block: where it lies, and a check of that; written after the block
#
# So the disk can be full only at the start, and usage never exceeds the limit. A kill leaves a
# block without its entry, which does not count. After a restart of the machine, entries may be
# there without their blocks: then each block is verified before it is used.

PAGE = mmap.PAGESIZE
_ENTRY = np.dtype([("place", "<u8"), ("check", "<u8")])  # 0 and 0 for a block that is not there
_META_BYTES = 4096


def rounded(nbytes: int) -> int:
    """Return a number of bytes in whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Extents:
    """The free parts of a file: first fit, and neighbours become one. PURE."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)] if size else []

    def take(self, nbytes: int) -> int | None:
        """Return where so many bytes are free; None if they are nowhere."""
        for at, (offset, length) in enumerate(self._free):
            if length >= nbytes:
                rest = [(offset + nbytes, length - nbytes)] if length > nbytes else []
                self._free[at : at + 1] = rest
                return offset
        return None

    def give_back(self, offset: int, nbytes: int) -> None:
        """Make bytes free again."""
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and offset + nbytes == self._free[at][0]:
            nbytes += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            before, length = self._free.pop(at - 1)
            offset, nbytes = before, length + nbytes
        insort(self._free, (offset, nbytes))


class Pins:
    """The blocks of one cache in a folder; used by one process at a time.

    Attributes:
        blocks: Those that are there, and where each begins in the file.
        unverified: Those of them that were there before the machine restarted.
        descriptor: Of the file; -1 if nothing fits into it.
    """

    def __init__(
        self,
        folder: Path | None,
        identity: str,
        nbytes: int,
        lengths: Sequence[int] | npt.NDArray[np.int64],
    ) -> None:
        """Open the files; make them anew if they are of another cache.

        Args:
            folder: None to keep nothing.
            identity: Of the cache.
            nbytes: How much of the disk may be used.
            lengths: Bytes of each block.

        Raises:
            OutputError: There is no space for so many bytes, or the folder cannot be written to.
        """
        self.blocks: dict[int, int] = {}
        self.unverified: set[int] = set()
        self.descriptor, self._lengths, self._extents = -1, lengths, Extents(0)
        if folder is None:
            return
        entries = len(lengths) * _ENTRY.itemsize
        size = max(nbytes - rounded(entries) - PAGE, 0) // PAGE * PAGE
        meta = {"cache": identity, "size": size, "boot": kernel()}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.geteuid():
                raise OSError("another user owns it")
            known = self._known(folder, meta)
            self._check_space(folder, size + entries)
            flags = os.O_RDWR | os.O_CREAT
            self._data = open_regular(folder / "blocks.data", flags, follows=False)
            self._pins = open_regular(folder / "blocks.pins", flags, follows=False)
            if not known:
                os.ftruncate(self._pins.fileno(), 0)
                os.ftruncate(self._data.fileno(), 0)
            os.ftruncate(self._data.fileno(), size)
            os.ftruncate(self._pins.fileno(), entries)
            if size:
                self.descriptor = self._data.fileno()
                os.posix_fallocate(self.descriptor, 0, size)
            with atomic_file(folder / "blocks.json") as file:
                file.write(json.dumps(meta).encode())
        except OSError as error:
            raise OutputError(
                f"directory={str(folder)!r} cannot keep {nbytes:,} bytes of blocks: "
                f"{error.strerror or error}\n"
                "  Nothing was fetched. Choose a smaller disk=, or a directory on a disk with free "
                "space that you own."
            ) from error
        self._adopt(size)
        if known != meta["boot"]:
            self.unverified = set(self.blocks)

    @staticmethod
    def _known(folder: Path, meta: dict[str, object]) -> str:
        """Return on which boot of the machine the blocks were written; "" if they are of no use."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads(read_regular(folder / "blocks.json", _META_BYTES))
            if (found["cache"], found["size"]) == (meta["cache"], meta["size"]):
                return str(found["boot"]) or "unknown"
        return ""

    @staticmethod
    def _check_space(folder: Path, nbytes: int) -> None:
        used = 0
        for name in ("blocks.data", "blocks.pins"):
            with suppress(OSError):
                used += os.lstat(folder / name).st_blocks * 512
        free = shutil.disk_usage(folder).free
        if nbytes - used > free:
            raise OSError(f"only {free:,} bytes are free")

    def _adopt(self, size: int) -> None:
        """Read the entries; those that cannot be true do not count."""
        found = np.frombuffer(os.pread(self._pins.fileno(), len(self._lengths) * 16, 0), _ENTRY)
        blocks, end = np.flatnonzero(found["place"]), 0
        for block in blocks[np.argsort(found["place"][blocks], kind="stable")].tolist():
            place, check = int(found["place"][block]) - 1, int(found["check"][block])
            length = rounded(int(self._lengths[block]))
            is_true = check == self._check(block, place) and not place % PAGE
            if not is_true or not end <= place <= size - length:
                continue
            if place > end:
                self._extents.give_back(end, place - end)
            self.blocks[block], end = place, place + length
        if size > end:
            self._extents.give_back(end, size - end)

    def _check(self, block: int, place: int) -> int:
        return crc32(f"{block} {place} {self._lengths[block]}".encode())

    def take(self, block: int) -> int | None:
        """Return where to write a block; None if there is no space."""
        return self._extents.take(rounded(int(self._lengths[block])))

    def give_back(self, block: int, place: int) -> None:
        """Return space that `take` returned and that was not used."""
        self._extents.give_back(place, rounded(int(self._lengths[block])))

    def add(self, block: int, place: int) -> None:
        """Note that a block has been written."""
        entry = np.array([(place + 1, self._check(block, place))], _ENTRY)
        os.pwrite(self._pins.fileno(), entry.tobytes(), block * _ENTRY.itemsize)
        self.blocks[block] = place

    def remove(self, block: int) -> None:
        """Forget a block, whose space is then free."""
        os.pwrite(self._pins.fileno(), bytes(_ENTRY.itemsize), block * _ENTRY.itemsize)
        self.unverified.discard(block)
        self.give_back(block, self.blocks.pop(block))

    def close(self) -> None:
        """Close the files, which stay."""
        self._data.close()
        self._pins.close()
