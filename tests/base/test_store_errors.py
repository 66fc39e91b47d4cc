"""What stores say becomes a kind, few words, and advice that can help."""

from __future__ import annotations

import re

import pytest

from forebay.base.store_errors import (
    BROKEN,
    DENIED,
    MISSING,
    REFUSED,
    THROTTLED,
    store_advice,
    store_error_kind,
    store_error_words,
)

NO_BUCKET = OSError(
    "Object at location c/x not found: Error performing GET http://127.0.0.1:503/b/c/x in 53.9ms - "
    'Server returned non-2xx status code: 404 Not Found: <?xml version="1.0"?>\n <Error>'
    "<Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>"
)
UNREACHED = OSError(
    "Generic S3 error: Error performing GET http://127.0.0.1:9/b/404/403 in 1.8ms - HTTP error: "
    'error sending request\n\nDebug source:\nGeneric { store: "S3", retry_timeout: 180s, source: '
    'ConnectError("tcp connect error", Os { code: 111, kind: ConnectionRefused, message: '
    '"Connection refused" })'
)
FORBIDDEN = OSError("Server returned non-2xx status code: 403 Forbidden: no such key id")
NO_SFTP = ValueError('SFTPFileSystem requires "paramiko" to be installed')
NO_RANGES = OSError("Operation not supported: Range request not supported by shard-00000.arrow")
NOT_PARTIAL = OSError(
    "Generic S3 error: Received non-partial response\n\nDebug source:\nGeneric { NotPartial }"
)
OWN_CERTIFICATE = OSError(
    "Generic HTTP error: error sending request\n\nDebug source:\nGeneric { source: "
    "invalid peer certificate: UnknownIssuer }"
)
# Of a request that took 429 ms, for a key of numbers.
SLOW = OSError(
    "Lacked the privileges for path a/503/404: Error performing GET http://h/b in 429.08219ms - "
    "Server returned non-2xx status code: 403 Forbidden: <Error><Code>ExpiredToken</Code><Message>"
    'Old</Message><Resource>/b/a/503</Resource></Error>\n\nDebug source:\nP { path: "a/503/404", '
    "elapsed: 429.08219ms, status: 403 }"
)
UNKNOWN = ValueError("Protocol not known: nonsense")


@pytest.mark.parametrize(
    ("error", "kind", "words", "advice"),
    [
        (NO_BUCKET, MISSING, "NoSuchBucket: The specified bucket does not exist", "name of the b"),
        (
            UNREACHED,
            BROKEN,
            "ConnectionRefused: http://127.0.0.1:9/b/404/403",
            "endpoint and the ne",
        ),
        (FORBIDDEN, DENIED, str(FORBIDDEN), "your credentials, .* is of no use"),
        (SLOW, DENIED, "ExpiredToken: Old", "your credentials"),
        (PermissionError("no"), DENIED, "no", "your credentials"),
        (UNKNOWN, REFUSED, "Protocol not known: nonsense", "s3fs"),
        (ImportError("Install s3fs to access S3"), REFUSED, "Install s3fs to access S3", "s3fs"),
        (NO_SFTP, REFUSED, str(NO_SFTP), "sftp:// paramiko"),
        (NO_RANGES, REFUSED, str(NO_RANGES), "ignores ranges"),
        (NOT_PARTIAL, REFUSED, "Generic S3 error: Received non-partial response", "ignores rang"),
        (OWN_CERTIFICATE, REFUSED, "invalid peer certificate", "the certificate"),
        (
            OSError("400 Bad Request: InvalidRequest"),
            REFUSED,
            "400 Bad Request: InvalidRequest",
            "^o",
        ),
        (OSError("405 Method Not Allowed"), REFUSED, "405 Method Not Allowed", "^otherwise$"),
        (
            OSError("400 Bad Request: RequestTimeout"),
            BROKEN,
            "400 Bad Request: RequestTimeout",
            "^o",
        ),
        (OSError("a range of 405 bytes"), BROKEN, "a range of 405 bytes", "^otherwise$"),
        (FileNotFoundError("b/x"), MISSING, "b/x", "^otherwise$"),
        (OSError("SlowDown"), THROTTLED, "SlowDown", "^otherwise$"),
        (ConnectionResetError(), BROKEN, "ConnectionResetError", "endpoint and the network"),
        (OSError("File is not a zip file"), BROKEN, "File is not a zip file", "^otherwise$"),
    ],
)
def test_an_error_is_said_in_few_words_with_what_helps(error, kind, words, advice):
    """A refusal that lasts is not called a fault of the network, nor repeated."""
    assert (store_error_kind(error), store_error_words(error)) == (kind, words)
    assert re.search(advice, store_advice(error, "otherwise"))


def test_a_long_text_is_cut_between_words():
    """Half a word may look like another."""
    words = store_error_words(OSError("bucket " * 200))
    assert len(words) < 310
    assert words.endswith("bucket …")
