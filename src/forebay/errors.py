"""All exceptions that forebay defines, and what of an exception is shown.

    ForebayError
    ├── OptionError(ValueError)            a setting is impossible; nothing was started
    ├── InputError(ValueError)             the inputs cannot be used as they are
    ├── OutputError                        an output cannot be written
    ├── LedgerError                        the ledger is damaged, unsupported or not writable
    │   ├── BusyError                      another run holds this output folder
    │   └── ChangedError                   the function changed since the earlier run
    ├── FailuresError                      the run stopped early: too many inputs failed
    ├── SampleTimeoutError(TimeoutError)   one input or sample ran past `timeout`
    └── WorkerDiedError(RuntimeError)      a worker died: its signal or exit code

A message says, in this order: what happened, to what, the numbers, what forebay did, what to do.
Its first line must make sense alone.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache, wraps
from types import TracebackType
from typing import Any, TypeVar, cast


class ForebayError(Exception):
    """The base class of all exceptions that forebay defines."""

    def __init__(self, *args: Any) -> None:
        """Leave passwords, tokens and signatures of URLs out of the message."""
        shown = (without_credentials(each) if isinstance(each, str) else each for each in args)
        super().__init__(*shown)


class OptionError(ForebayError, ValueError):
    """A setting is impossible; raised before anything starts."""


class InputError(ForebayError, ValueError):
    """The inputs cannot be used as they are: a missing folder, a damaged manifest, a duplicate."""


class OutputError(ForebayError):
    """An output cannot be written: a full or read-only folder, an invalid or duplicate name."""


class LedgerError(ForebayError):
    """The ledger is damaged, of an unsupported format, or cannot be written."""


class BusyError(LedgerError):
    """Another run holds this output folder."""

    holder: Any = None  # a `Holder`, where it is known


class ChangedError(LedgerError):
    """The function or its parameters differ from those the ledger was written with."""


class FailuresError(ForebayError):
    """A run stopped early: more inputs failed than allowed, or many in a row alike.

    Or, with ranks, all samples of a rank's batch failed.
    """

    # Of a range of samples: the failed ones, as the ledger records them.
    record: dict[str, Any] | None = None


class SampleTimeoutError(ForebayError, TimeoutError):
    """One input or sample ran past `timeout`; the message holds the stack of the hang."""


class WorkerDiedError(ForebayError, RuntimeError):
    """A worker died; the message names its signal or exit code and what it was doing."""


# ---- credentials ---------------------------------------------------------------------------------
# PURE: what of a URL is written and shown. What opens it keeps the URL as the user gave it.
#
#     https://me:password@host/a.wav?v=2&X-Amz-Expires=60&X-Amz-Signature=…
#  ─> https://host/a.wav?v=2
#
# Locations that are shown alike name one input. So everything goes that another signature for the
# same object changes, and no parameter that may say which object is meant. The patterns are
# strings, since few processes use them.

# A character of a location, and of one that is quoted in a text: not what ends it there. A quote
# before punctuation ends it, unless it is in a password, which "@" follows, or in the value of a
# parameter, which another one follows.
_ANY = r"[\s\S]"
_QUOTED = (
    r"""(?:(?![).,:;!\]}]*(?:\s|$))[^\s"'<>`\\]"""
    r"""|'(?:(?![\s,;:.)\]}]|$)|(?=[^\s"'<>`\\/?#]*@)|(?=[^\s"'<>`\\]*&[\w.-]+=)))"""
)
# User and password: up to the last "@" before the path; or to the first one at all, if characters
# are not escaped that should be. "host:80/a@b", "[::1]:80/a@b" and "a.csv::file" have neither.
_USER = (
    r"://((?:(?![/?#]){0})*@"
    r"|(?!\[)[^/?#@:\s]*:(?!:|\d{{0,5}}(?:[/?#]|$))(?:(?!::|://|@){0})*@)"
)
# "github://organization:repository@branch" has no user. Elsewhere a name alone is no credential,
# as in "abfs://container@account" and "sftp://me@host", but it may be a token where HTTP is spoken.
_NO_USERS = frozenset({"git", "github"})
_TOKEN_USERS = frozenset({"dav", "davs", "http", "https", "webdav", "webdavs"})
# Names of parameters, in lower case without "-", "_" and ".": of signatures (S3, GCS, OSS, COS,
# CloudFront, Azure), and of passwords, keys and tokens.
_CREDENTIAL = (
    r"x(?:amz|goog|oss|cos|tos|obs)\w*|q(?:sign\w*|ak|keytime|headerlist|urlparamlist)|sig|sign|"
    r"\w*(?:signature|token|secret|password|passwd|passphrase|apikey|accesskey|accesskeyid|"
    r"secretkey|accountkey|privatekey|subscriptionkey|credentials?|authorization|accessid|"
    r"keypairid|sessionid|jwt|hmac)|auth|pwd|sas"
)
# Those beside one of them, which change with it; and those beside Azure's "sig".
_BESIDE = frozenset({"exp", "expires", "expiry", "policy"})
_BESIDE_SIG = frozenset({"se", "si", "sp", "sr", "ss", "st", "sv", "sip", "spr", "srt", "sdd"}) | {
    *("ske", "sks", "skt", "skv", "skoid", "sktid", "saoid", "suoid", "scid")
}
# Values that are keys and tokens, whatever the name of the parameter.
_KEY = (
    r"AIza[\w-]{30,}|A[KS]IA[A-Z0-9]{12,}|eyJ[\w-]+\.[\w-]+\.[\w-]*|"
    r"(?:gh[a-z]|github_pat|glpat|hf|sk|xox[a-z])[-_][\w-]{16,}"
)
# Headers and settings in a text, as an exception or a dict shows them.
_HEADER = (
    r"(?i)(\b(?:(?:proxy-)?authorization|account_?key|(?:aws_)?secret_access_key|client_secret|"
    r"shared_?access_?signature|password)\b['\"]?\s*[:=]\s*(?:['\"]|(?=(?:basic|bearer)\s))"
    r"(?:(?:basic|bearer)\s+)?)[^\s'\",;)}]+"
)


def shown_location(location: str) -> str:
    """Return a path or URL without the credentials in it; without any, it is the same string."""
    return _stripped(location, _ANY) if "://" in location else location


def without_credentials(text: str) -> str:
    """Return a text without the credentials in the URLs and headers that it quotes."""
    text = _stripped(text, _QUOTED) if "://" in text or "?" in text else text
    return re.sub(_HEADER, r"\1***", text) if ":" in text or "=" in text else text


@lru_cache(4096)
def is_credential(name: str) -> bool:
    """Return whether the value of a variable or parameter of this name may be a credential."""
    return re.fullmatch(_CREDENTIAL, _plain(name)) is not None


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(".", "")


@lru_cache
def _patterns(character: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    return re.compile(_USER.format(character)), re.compile(f"[?#]{character}+")


def _stripped(text: str, character: str) -> str:
    user, query = _patterns(character)
    before = "" if "@" in text else text
    while text != before:  # "a:b/c@d@host" takes two steps
        before, text = text, user.sub(_without_user, text)
    return query.sub(_without_secrets, text)


def _without_user(match: re.Match[str]) -> str:
    text, at = match.string, match.start()
    scheme = re.findall(r"[a-z0-9.-]*$", text[max(at - 20, 0) : at].lower())[0]
    is_name = ":" not in match[1] and scheme not in _TOKEN_USERS
    return match[0] if is_name or scheme in _NO_USERS else "://"


def _without_secrets(match: re.Match[str]) -> str:
    """Return a query or fragment without the parameters that are credentials."""
    marks, pieces = re.findall("[?#&;]", match[0]), re.split("[?#&;]", match[0])[1:]
    given = [each.partition("=") for each in pieces]
    names = [_plain(name) if equals else "" for name, equals, _ in given]
    are_secret = [
        is_credential(name)
        or (len(value) > 16 and bool(re.fullmatch(_KEY, value.partition("::")[0])))
        for name, (_, _, value) in zip(names, given, strict=True)
    ]
    if any(are_secret):
        beside = (_BESIDE | _BESIDE_SIG) if "sig" in names else _BESIDE
        pairs = zip(are_secret, names, strict=True)
        are_secret = [is_secret or name in beside for is_secret, name in pairs]
    found, opening = "", ""
    for mark, piece, is_secret in zip(marks, pieces, are_secret, strict=True):
        opening = mark if mark in "?#" else opening
        if is_secret:
            found += "".join(piece.partition("::")[1:])  # a chain goes on: a.zip?sig=1::https://…
        else:
            found, opening = f"{found}{opening or mark}{_without_nested(piece)}", ""
    return found


def _without_nested(piece: str) -> str:
    """Return a parameter whose value may be a URL itself, with "://" escaped."""
    name, equals, value = piece.partition("=")
    if "%3a%2f%2f" not in value.lower():
        return piece
    from urllib.parse import quote, unquote

    nested = unquote(value)
    shown = shown_location(nested)
    return piece if shown == nested else f"{name}{equals}{quote(shown, safe='')}"


# ---- text ----------------------------------------------------------------------------------------

# Characters of a message and of a traceback: an exception's message may contain a whole array.
MAX_TEXT = 32_768


def shortened(value: object) -> str:
    """Return the repr of a value, shortened to fit into a message."""
    text = without_credentials(repr(value))
    return text if len(text) <= 200 else text[:200] + " ..."


def printable(text: str) -> str:
    """Return a string to print: control characters are escaped, credentials are left out."""
    text = without_credentials(text)
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def one_line(text: str, most: int) -> str:
    """Return a string on one line of at most `most` characters, safe to print on a terminal."""
    return printable(" ".join(without_credentials(text)[:most].split()))[:most]


def message_of(error: BaseException) -> str:
    """Return the message of an exception, even if its `__str__` raises."""
    try:
        return without_middle(without_credentials(str(error)))
    except Exception as second:  # noqa: BLE001 - the user's __str__
        return f"<its __str__ raised {type(second).__name__}>"


def traceback_of(error: BaseException, trace: TracebackType | None) -> str:
    """Return the formatted traceback of an exception, with its causes."""
    text = "".join(traceback.format_exception(type(error), error, trace))
    return without_middle(without_credentials(text))


def without_middle(text: str) -> str:
    """Return a string, its middle omitted if it is longer than `MAX_TEXT`."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters omitted ...\n{text[-half:]}"


# ---- tracebacks ----------------------------------------------------------------------------------
# Tracebacks that show the user's frames: forebay's own are cut where they explain nothing.
#
# An error that forebay raises on purpose says in its message what is wrong, and an exception of the
# user's code is about the user's frames. An unexpected exception in forebay's own code, which would
# be a bug, keeps every frame.

_F = TypeVar("_F", bound=Callable[..., Any])

# Modules that only pass a call or an exception on for forebay.
_PASSING_ON = ("contextlib", "torch._utils")


def short_tracebacks(function: _F) -> _F:
    """Decorate an entry point: what it raises on purpose shows none of its internal frames.

    A misspelt argument is refused with the name of the nearest one, as Python does from 3.13 on.
    """
    code: Any = function.__code__
    known = frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # for IPython and pytest
        if not known.issuperset(kwargs):
            raise _unexpected(function, known, kwargs)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            cut_below_entry(error)
            _show_causes(error)
            if (shown := shown_error(error)) is not error:
                raise shown from error.__cause__
            raise

    return cast("_F", call)


def _unexpected(function: Any, known: Iterable[str], given: Iterable[str]) -> TypeError:
    from difflib import get_close_matches

    name = next(each for each in given if each not in set(known))
    close = get_close_matches(name, known, 1, 0.5)
    return TypeError(
        f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
        + (f". Did you mean {close[0]!r}?" if close else "")
    )


def cut_below_entry(error: BaseException) -> None:
    """Cut forebay's frames below the first, if forebay raises or passes on this exception.

    It passes on what it has added a note to; see `BaseException.add_note`.
    """
    notes = getattr(error, "__notes__", ())
    first = error.__traceback__
    if first is None or not _is_on_purpose(error):
        return
    first.tb_next = _without_own(first.tb_next)
    if notes:
        error.__notes__ = [*map(_shown, notes)]
    _cut_causes(error)
    _show_causes(error)


def _is_on_purpose(error: BaseException) -> bool:
    """Return whether forebay raised an exception, or passes it on with a note."""
    notes = getattr(error, "__notes__", ())
    is_passed_on = any(isinstance(each, str) and each.startswith("forebay: ") for each in notes)
    return isinstance(error, ForebayError) or is_passed_on


def cut_own_frames(error: BaseException) -> None:
    """Cut forebay's frames from an exception that the user's code raised, or forebay on purpose."""
    frames = list(_frames(error.__traceback__))
    if frames and _is_own(frames[-1]) and not _is_on_purpose(error):
        return
    error.__traceback__ = _without_own(error.__traceback__)
    _cut_causes(error)


def _cut_causes(error: BaseException) -> None:
    seen = {id(error)}  # causes may go round in a circle
    cause = error.__cause__
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        cause.__traceback__ = _without_own(cause.__traceback__)
        cause = cause.__cause__


def shown_error(error: BaseException) -> BaseException:
    """Return an exception that shows no credentials: the same one, or one in its place."""
    with suppress(Exception):  # whatever a class does with its attributes
        if _shows_none(error):
            return error
        error.args = tuple(map(_shown, error.args))
        for name in ("filename", "filename2"):  # of an OSError
            if isinstance(getattr(error, name, None), str):
                setattr(error, name, _shown(getattr(error, name)))
        error.__notes__ = [*map(_shown, getattr(error, "__notes__", ()))]
        if _shows_none(error):
            return error
    other = FailuresError(f"{type(error).__name__}: {message_of(error)}")
    other.__cause__, other.__context__ = error.__cause__, error.__context__
    other.__notes__ = [*map(_shown, getattr(error, "__notes__", ()))]
    return other.with_traceback(error.__traceback__)


def _shown(value: Any) -> Any:
    return without_credentials(value) if isinstance(value, str) else value


def _shows_none(error: BaseException) -> bool:
    said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    return said == without_credentials(said)


def _show_causes(error: BaseException) -> None:
    """Remove credentials from the exceptions that Python prints above this one."""
    shown: dict[int, tuple[BaseException, BaseException]] = {}  # holds them, so no ID is reused
    waiting = [error]
    while waiting:
        each = waiting.pop()
        is_suppressed = each.__suppress_context__
        for name in ("__cause__", "__context__"):
            other = getattr(each, name)
            if other is None:
                continue
            if id(other) not in shown:
                shown[id(other)] = other, shown_error(other)
                waiting.append(shown[id(other)][1])
            if shown[id(other)][1] is not other:
                setattr(each, name, shown[id(other)][1])
        each.__suppress_context__ = is_suppressed


def _without_own(trace: TracebackType | None) -> TracebackType | None:
    kept: TracebackType | None = None
    for each in reversed([each for each in _frames(trace) if not _is_own(each)]):
        each.tb_next, kept = kept, each
    return kept


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_own(trace: TracebackType) -> bool:
    # Not the file: methods that dataclasses generates have none.
    module = str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] == "forebay" or module in _PASSING_ON
