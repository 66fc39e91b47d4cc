"""What an error of a bucket or another store means: its kind, in few words, and what to do. PURE.

Each library raises its own exceptions, with words that repeat requests, whole XML documents or
their own data structures.
"""

from __future__ import annotations

import re

# Kinds. What is denied or missing does not get better by itself.
THROTTLED, BROKEN, DENIED, MISSING = "throttled", "broken", "denied", "missing"

_throttled = re.compile(
    r"\b(?:503|429)\b|SlowDown|TooManyRequests|RequestLimitExceeded", re.I
).search
_denied = re.compile(
    r"\b40[13]\b|AccessDenied|Forbidden|ExpiredToken|InvalidAccessKeyId|SignatureDoesNotMatch"
    r"|NoCredential|Unable to locate credentials|token.{0,20}expired",
    re.I,
).search
_no_bucket = re.compile(r"NoSuchBucket|bucket does not exist", re.I).search
# Also of an object that ends before the range: it was written anew, or cut.
_missing = re.compile(
    r"\b404\b|\b416\b|InvalidRange|NoSuchKey|NoSuchBucket|not ?found|bucket does not exist", re.I
).search
_unreached = re.compile(
    r"Connection ?refused|Connection ?reset|dns error|Name or service not known"
    r"|(?:failed to |not )resolve|timed out|(?:read|connect) timeout|Network is unreachable"
    r"|No route to host|certificate"
    r"|could not connect|cannot connect|error sending request",
    re.I,
).search
_not_installed = re.compile(
    r"Protocol not known|Install \S+|No module named|please install", re.I
).search
_url = re.compile(r"https?://[^\s,\"'<>)]+")
_code = re.compile(r"<Code>([^<]+)</Code>(?:\s*<Message>([^<]*)</Message>)?").search
_MOST_CHARACTERS = 300


def store_error_kind(error: BaseException) -> str:
    """Return the kind of an exception of any library."""
    if isinstance(error, FileNotFoundError):
        return MISSING
    # A number in a URL is no status.
    text = _url.sub("", f"{type(error).__name__}: {error}")
    if _throttled(text):
        return THROTTLED
    if isinstance(error, PermissionError) or _denied(text):
        return DENIED
    return MISSING if _missing(text) else BROKEN


def store_error_words(error: BaseException) -> str:
    """Return what an exception says, on one line, without what only its library understands."""
    text = " ".join(str(error).split())
    if found := _code(text):
        code, message = found.groups()
        return f"{code}: {message}" if message else str(code)
    said, _, debug = text.partition("Debug source:")
    url = _url.search(said)
    if debug and (reason := _unreached(debug) or _unreached(said)):
        return reason[0] + (f": {url[0]}" if url else "")
    said = said.strip() or type(error).__name__
    if len(said) <= _MOST_CHARACTERS:
        return said
    return said[:_MOST_CHARACTERS].rpartition(" ")[0] + " …"


def store_advice(error: BaseException, otherwise: str) -> str:
    """Return what to do about an exception, or `otherwise` where that is not known."""
    text = f"{type(error).__name__}: {error}"
    if _no_bucket(text):
        return "Check the name of the bucket: it has to exist before it is used."
    kind = store_error_kind(error)
    if kind == DENIED or getattr(error, "kind", "") == DENIED:
        return (
            "Check your credentials, and what they allow: those of the environment count, or of "
            "fsspec's settings. To try again without a change is of no use."
        )
    if isinstance(error, ImportError) or _not_installed(text):
        return "Install the file system of the URL: s3:// needs s3fs, gs:// gcsfs."
    if kind == BROKEN and (isinstance(error, ConnectionError | TimeoutError) or _unreached(text)):
        return "Check the endpoint and the network, then make the same call again."
    return otherwise
