"""What a listing sees of an input, compared with what the ledger has a result of. PURE.

An identity is a string that changes with what an input holds:

    17:1699999999999999999          a file: its bytes, and its time of modification in nanoseconds
    17:1699999999999999999#kJ3…     the same, and a hash of the content that the result was made of
    folder:3:9b1d…                  a folder: the number of its files, and a hash of their names,
                                    sizes and times
    5f1c…                           the etag of an object, the numbers of the samples of a range
    ""                              a row without a file: it is its own content
    ?                               it cannot be seen now: its folder is not mounted, for example
    5f1c…:?                         only what is before the "?" can be seen now
    17:1699…|20:1699…               several files that a row names

Cannot be seen is not changed: whatever the ledger has of such an input stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# What cannot be seen of an input; also the end of an identity of which only a part can be.
NOT_SEEN = "?"
# Before an identity of files that a worker saw after its call, which may have changed them.
AFTERWARDS = "="
# What the identity of a folder begins with.
FOLDER = "folder:"
# Between the size and time of a file and the hash of its content.
_HASH = "#"
# Between the identities of several files.
_AND = "|"

SAME, CHANGED, RETIMED, UNSEEN = range(4)

_file = re.compile(rf"(\d+):-?\d+(?:{_HASH}([\w-]+))?").fullmatch


def identity_change(recorded: str, listed: str) -> int:
    """Return SAME, CHANGED, UNSEEN, or RETIMED for a file of which only the time differs."""
    if listed == recorded or recorded.startswith(listed + _HASH):
        return SAME
    if not listed:  # no column of the table is known to name files: none of them is there now
        return UNSEEN
    if listed.endswith(NOT_SEEN):
        return UNSEEN if recorded.startswith(listed.removesuffix(NOT_SEEN)) else CHANGED
    was, now = _file(recorded), _file(listed)
    return RETIMED if was and now and was[1] == now[1] else CHANGED


def merged_identity(recorded: str, listed: str) -> str:
    """Return the identity of an input whose result stays, now that a listing has seen this."""
    found = identity_change(recorded, listed)
    if found != RETIMED:
        return listed if found == CHANGED else recorded
    content = content_of(recorded)
    return with_content(listed, content) if content else listed


def joined_identity(identities: Iterable[str]) -> str:
    """Return the identity of an input that has several files, given theirs; "" counts for none."""
    found = []
    for each in filter(None, identities):
        found.append(each)
        if each.endswith(NOT_SEEN):
            break
    return _AND.join(found)


def content_of(identity: str) -> str:
    """Return the hash of a file's content that an identity has; "" for none."""
    found = _file(identity)
    return found[2] or "" if found else ""


def with_content(identity: str, content: str) -> str:
    """Return the identity of a file with a hash of its content."""
    return f"{identity}{_HASH}{content}"
