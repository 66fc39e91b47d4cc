"""What an error of a bucket or another store means: its kind, in few words, and what to do. PURE.

Each library raises its own exceptions, with words that repeat requests, whole XML documents or
their own data structures.
"""

from __future__ import annotations

import re

# Kinds. What is denied, missing or refused does not get better by itself.
THROTTLED, BROKEN, DENIED, MISSING = "throttled", "broken", "denied", "missing"
REFUSED = "refused"

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
    r"|No route to host|invalid peer certificate"
    r"|could not connect|cannot connect|error sending request",
    re.I,
).search
_not_installed = re.compile(
    r"Protocol not known|Install \S+|No module named|please install|to be installed"
    r"|Unable to load lib",
    re.I,
).search
_no_ranges = re.compile(
    r"Range request not supported|NotPartial|non-?partial response|ignores ranges", re.I
).search
_bad_certificate = re.compile(
    r"certificate.{0,20}verify|invalid peer certificate|UnknownIssuer|self.?signed", re.I
).search
# A server says some of what passes with status 400: a body that was cut, or came too late.
_passes = re.compile(r"RequestTimeout|IncompleteBody|BadDigest|InternalError").search
_refused = re.compile(
    r"\b400,? (?:Bad Request|Client Error|message)|\b40[5-7]\b,? (?:Method|Not|Client|message)"
    r"|\b410\b,? (?:Gone|Client|message)|\b501\b,? (?:Not|Server|message)|MethodNotAllowed"
    r"|NotImplemented|InvalidRequest|InvalidArgument|InvalidBucketName|PermanentRedirect"
    r"|AuthorizationHeaderMalformed",
    re.I,
).search
_url = re.compile(r"https?://[^\s,\"'<>)]+")
# Where a number is no status: in a URL, a path, and in what time a request took.
_no_status = re.compile(
    rf"{_url.pattern}|\b\d+(?:\.\d+)?(?:ns|[µμ]s|ms|s)\b"
    r"|\b(?:path|location):? \"?[^\s\",]+|<Resource>[^<]*"
)
_code = re.compile(r"<Code>([^<]+)</Code>(?:\s*<Message>([^<]*)</Message>)?").search
_MOST_CHARACTERS = 300


def store_error_kind(error: BaseException) -> str:
    """Return the kind of an exception of any library."""
    if isinstance(error, FileNotFoundError):
        return MISSING
    text = _no_status.sub("", f"{type(error).__name__}: {error}")
    if _throttled(text):
        return THROTTLED
    if isinstance(error, PermissionError) or _denied(text):
        return DENIED
    if _missing(text):
        return MISSING
    is_permanent = _no_ranges(text) or _bad_certificate(text) or _not_installed(text)
    if is_permanent or isinstance(error, ImportError):
        return REFUSED
    return REFUSED if _refused(text) and not _passes(text) else BROKEN


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
        return (
            "Install the file system of the URL: s3:// needs s3fs, gs:// gcsfs, sftp:// paramiko."
        )
    if _no_ranges(text):
        return (
            "Its server ignores ranges, so no part of an object can be read. Use one that knows "
            "them, such as a bucket; or copy the folder first, and open the copy."
        )
    if _bad_certificate(text):
        return "Check the certificate of the endpoint, and those that this machine trusts."
    if kind == BROKEN and (isinstance(error, ConnectionError | TimeoutError) or _unreached(text)):
        return "Check the endpoint and the network, then make the same call again."
    return otherwise
