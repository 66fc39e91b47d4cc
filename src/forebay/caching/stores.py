"""Read ranges of objects: with obstore where it is installed and knows the bucket, else by fsspec.

Only the fetcher's process uses obstore: it starts threads of its own, and must not be forked. What
may pass is tried again, by obstore itself or as `base/files.py` does, and every exception becomes a
`BucketError`.

obstore in threads takes a tenth of s3fs's processor time for a request (docs/design/0011).
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from forebay.base.files import PATIENCE_S, SILENT_S, connect_url, explained, settings_of, tried
from forebay.base.store_errors import (
    BROKEN,
    DENIED,
    MISSING,
    REFUSED,
    store_error_kind,
    store_error_words,
)
from forebay.errors import InputError, shown_location, without_credentials

# How often an answer may be shorter than what was asked for.
_MOST_SHORT = 3
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


class ObjectStore(ABC):
    """The folder that a URL names, for reading; used by many threads at once."""

    _is_silent_at_end = False  # whether nothing comes, and no error, for bytes behind an object

    def __init__(self, url: str) -> None:
        """Connect."""
        self.url = url.rstrip("/")
        self._connection, self._lock = self._connect(), threading.Lock()

    @abstractmethod
    def _connect(self) -> Any:
        """Return a connection, with the credentials of now."""

    @abstractmethod
    def _read(self, name: str, offset: int, length: int | None) -> tuple[Any, str]:
        """Return bytes of an object, all of them if `length` is None, and its ETag if known."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> memoryview:
        """Return `length` bytes of an object from `offset` on, or all; raise BucketError."""
        return self.read_tagged(name, offset, length)[0]

    def read_tagged(
        self, name: str, offset: int = 0, length: int | None = None
    ) -> tuple[memoryview, str]:
        """Return bytes, as `read` does, and the ETag of their object; "" if it is not known."""
        for _ in range(_MOST_SHORT):
            data, tag = self._answer(name, offset, length)
            if length is None or len(data) == length:
                return data, tag
            if len(data) > length:
                words = f"its server ignores ranges: {len(data):,} bytes came instead of {length:,}"
                raise BucketError(REFUSED, words)
            if length > 1:  # MISSING if the object ends before: then no other try helps
                self.read(name, offset + length - 1, 1)
            elif self._is_silent_at_end:
                break
        kind = MISSING if length == 1 and self._is_silent_at_end else BROKEN
        raise BucketError(kind, f"{len(data):,} bytes came instead of {length:,}")

    def _answer(self, name: str, offset: int, length: int | None) -> tuple[memoryview, str]:
        """Return what the bucket answers; credentials that are refused are read again, once."""
        connection, began = self._connection, time.monotonic()
        for is_last in (False, True):
            try:
                data, tag = self._read(name, offset, length)
                return memoryview(data).cast("B"), tag
            except Exception as error:
                known, took = BucketError.of(error), time.monotonic() - began
                if known.kind == BROKEN and took >= PATIENCE_S:
                    words = f"no answer within {took:.0f} s, which is tried for {PATIENCE_S:g} s"
                    known = BucketError(BROKEN, f"{words}: {known}")
                if is_last or known.kind != DENIED:
                    raise known from error
            with self._lock:
                if self._connection is connection:
                    self._connection = self._connect()
        raise AssertionError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {shown_location(self.url)!r}>"


class _Fsspec(ObjectStore):
    """Any file system of fsspec."""

    _is_silent_at_end = True

    def _connect(self) -> Any:
        return connect_url(self.url, anew=True)

    def _read(self, name: str, offset: int, length: int | None) -> tuple[Any, str]:
        system, root = self._connection
        part = {} if length is None else {"start": offset, "end": offset + length}
        return tried(lambda: system.cat_file(f"{root}/{name}", **part)), ""


class _Obstore(ObjectStore):
    """S3, Google Cloud Storage, Azure or HTTP by obstore."""

    def _connect(self) -> Any:
        from obstore.store import from_url

        # Silence ends a request, and not how long it takes: a link may be slow.
        silence = timedelta(seconds=SILENT_S)
        client: Any = {"connect_timeout": silence, "read_timeout": silence, "allow_http": True}
        retries: Any = {"max_retries": 10, "retry_timeout": timedelta(seconds=PATIENCE_S)}
        return from_url(
            self.url,
            client_options=client | {"timeout": timedelta(days=1)},
            retry_config=retries,
            **_settings_of(self.url),
        )

    def _read(self, name: str, offset: int, length: int | None) -> tuple[Any, str]:
        import obstore

        options: Any = None if length is None else {"range": (offset, offset + length)}
        found = obstore.get(self._connection, name, options=options)
        return found.bytes(), str(found.meta["e_tag"] or "").strip('"')


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


def bucket_at(url: str) -> ObjectStore:
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


def answers_have_tags(url: str) -> bool:
    """Return whether each answer has the ETag that a listing has: then a listing says no more."""
    return url.startswith("s3://") and find_spec("obstore") is not None


def fsspec_bucket(url: str) -> ObjectStore:
    """Return what reads the folder at a URL in a process that starts others: by fsspec.

    Raises:
        InputError: It cannot be reached.
    """
    try:
        return _Fsspec(url)
    except Exception as error:
        words, advice = explained(error, "Check the URL.")
        raise InputError(f"{shown_location(url)} cannot be reached: {words}\n  {advice}") from error
