"""The objects of the range server: a folder whose subfolders are buckets, and S3's answers on them.

Not like S3: a key cannot be both an object and the beginning of another one's name before a slash,
parts of an upload are in memory until it is complete, and bodies in chunks are not understood.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

STATUS = {
    "AccessDenied": 403,
    "ExpiredToken": 403,
    "InternalError": 500,
    "InvalidRange": 416,
    "MethodNotAllowed": 405,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "PreconditionFailed": 412,
    "SlowDown": 503,
}
# Unfinished files are in here, and no bucket has this name.
UNFINISHED = ".unfinished"
PAGE = 1000


class RefusedError(Exception):
    """A request that is answered with an error of S3; its code is the argument."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class Object:
    """What a HEAD request says of an object."""

    path: Path
    size: int
    etag: str
    modified: int


class Objects:
    """The buckets under a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._uploads: dict[str, dict[int, bytes]] = {}

    def find(self, name: str) -> Object:
        """Return an object by "bucket/key".

        Raises:
            RefusedError: There is none.
        """
        path = self._path(name)
        try:
            found = path.stat()
        except OSError:
            found = None
        if found is None or not stat.S_ISREG(found.st_mode):
            bucket = self._root / name.partition("/")[0]
            raise RefusedError("NoSuchKey" if bucket.is_dir() else "NoSuchBucket")
        # A file that was written anew has another inode, time or size.
        etag = f'"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"'
        return Object(path, found.st_size, etag, int(found.st_mtime))

    def put(self, name: str, body: bytes, only_new: bool = False) -> str:
        """Store an object and return its ETag; with `only_new`, none may be there."""
        path = self._path(name)
        if only_new and path.exists():
            raise RefusedError("PreconditionFailed")
        if not (self._root / name.partition("/")[0]).is_dir():
            raise RefusedError("NoSuchBucket")
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._root / UNFINISHED / uuid.uuid4().hex
        unfinished.parent.mkdir(exist_ok=True)
        unfinished.write_bytes(body)
        unfinished.replace(path)
        return self.find(name).etag

    def delete(self, name: str) -> None:
        """Remove an object, if it is there, and folders that are empty then."""
        path = self._path(name)
        with contextlib.suppress(OSError):  # not there, or a folder
            path.unlink()
            bucket = self._root / name.partition("/")[0]
            while (path := path.parent) != bucket:
                path.rmdir()

    def make(self, bucket: str) -> None:
        """Make a bucket."""
        self._path(f"{bucket}/").mkdir(exist_ok=True)

    def drop(self, bucket: str) -> None:
        """Remove an empty bucket."""
        self._bucket(bucket).rmdir()

    def begin_upload(self) -> str:
        """Begin an upload of several parts and return its ID."""
        identity = uuid.uuid4().hex
        self._uploads[identity] = {}
        return identity

    def put_part(self, identity: str, number: int, body: bytes) -> str:
        """Keep one part and return its ETag."""
        self._upload(identity)[number] = body
        return f'"{identity[:8]}-{number}"'

    def end_upload(self, identity: str, name: str, only_new: bool) -> str:
        """Store an object of its parts and return its ETag."""
        parts = self._upload(identity)
        etag = self.put(name, b"".join(parts[number] for number in sorted(parts)), only_new)
        del self._uploads[identity]
        return etag

    def drop_upload(self, identity: str) -> None:
        """Forget an upload."""
        self._uploads.pop(identity, None)

    def buckets(self) -> bytes:
        """Answer ListBuckets."""
        names = sorted(each.name for each in self._root.iterdir() if each.name != UNFINISHED)
        inside = "".join(f"<Bucket><Name>{escape(name)}</Name></Bucket>" for name in names)
        return document("ListAllMyBucketsResult", f"<Buckets>{inside}</Buckets>")

    def listing(self, bucket: str, query: dict[str, str]) -> bytes:
        """Answer ListObjectsV2."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        limit = min(int(query.get("max-keys", PAGE)), PAGE)
        quoted = query.get("encoding-type") == "url"
        shown = quote if quoted else escape
        inside: list[str] = []
        last = ""
        truncated = False
        for key in self._keys(self._bucket(bucket), prefix):
            beyond, found, _ = (
                key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            )
            entry = prefix + beyond + delimiter if found else key
            if entry <= after or entry == last:
                continue
            if len(inside) == limit:
                truncated = True
                break
            last = entry
            if found:
                part = f"<CommonPrefixes><Prefix>{shown(entry)}</Prefix></CommonPrefixes>"
            else:
                one = self.find(f"{bucket}/{key}")
                part = (
                    f"<Contents><Key>{shown(key)}</Key><LastModified>{iso_date(one.modified)}"
                    f"</LastModified><ETag>{escape(one.etag)}</ETag><Size>{one.size}</Size>"
                    "<StorageClass>STANDARD</StorageClass></Contents>"
                )
            inside.append(part)
        head = (
            f"<Name>{escape(bucket)}</Name><Prefix>{shown(prefix)}</Prefix>"
            f"<KeyCount>{len(inside)}</KeyCount><MaxKeys>{limit}</MaxKeys>"
            f"<IsTruncated>{str(truncated).lower()}</IsTruncated>"
        )
        if quoted:
            head += "<EncodingType>url</EncodingType>"
        if delimiter:
            head += f"<Delimiter>{shown(delimiter)}</Delimiter>"
        if truncated:
            head += f"<NextContinuationToken>{escape(last)}</NextContinuationToken>"
        return document("ListBucketResult", head + "".join(inside))

    def delete_listed(self, bucket: str, body: bytes) -> bytes:
        """Answer DeleteObjects."""
        keys = [each.text or "" for each in ElementTree.fromstring(body).iter() if _is_key(each)]
        for key in keys:
            self.delete(f"{bucket}/{key}")
        inside = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return document("DeleteResult", inside)

    def _path(self, name: str) -> Path:
        if any(part in ("", ".", "..", UNFINISHED) for part in name.removesuffix("/").split("/")):
            raise RefusedError("NoSuchKey")
        return self._root / name

    def _bucket(self, bucket: str) -> Path:
        folder = self._path(bucket)
        if not folder.is_dir():
            raise RefusedError("NoSuchBucket")
        return folder

    def _upload(self, identity: str) -> dict[int, bytes]:
        try:
            return self._uploads[identity]
        except KeyError:
            raise RefusedError("NoSuchUpload") from None

    @staticmethod
    def _keys(folder: Path, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, in S3's order."""
        start = prefix.rpartition("/")[0]
        found = [
            os.path.relpath(os.path.join(at, name), folder)
            for at, _, names in os.walk(folder / start)
            for name in names
        ]
        return sorted((key for key in found if key.startswith(prefix)), key=str.encode)


def document(name: str, inside: str) -> bytes:
    """Return an answer of S3 in XML."""
    space = "http://s3.amazonaws.com/doc/2006-03-01/"
    text = f'<?xml version="1.0" encoding="UTF-8"?><{name} xmlns="{space}">{inside}</{name}>'
    return text.encode()


def refusal(code: str, name: str) -> bytes:
    """Return an error of S3 in XML."""
    inside = f"<Code>{code}</Code><Message>{code}</Message><Resource>/{escape(name)}</Resource>"
    return f'<?xml version="1.0" encoding="UTF-8"?><Error>{inside}</Error>'.encode()


@functools.lru_cache(1024)
def http_date(seconds: int) -> str:
    """Return a time as HTTP says it."""
    return formatdate(seconds, usegmt=True)


def iso_date(seconds: int) -> str:
    """Return a time as S3's listings say it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _is_key(element: ElementTree.Element) -> bool:
    return element.tag.rpartition("}")[2] == "Key"
