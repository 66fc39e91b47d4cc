"""The bytes of one member of a tar file, as POSIX.1-2001 has them. PURE.

    header      512 bytes (ustar); 1,536 or more for a name that is not ASCII, or has more than 100
                characters, or for 8 GiB or more of data (pax)
    data        as given
    padding     zeros, up to a multiple of 512

A header is a function of name and size alone, so it need not be recorded: the time and the
owner are 0, the mode is 0644.
"""

from __future__ import annotations

BLOCK = 512
# What a tar file ends with.
END = bytes(2 * BLOCK)

_MAX_NAME = 100
_MAX_SIZE = 8**11 - 1

# The fields between the name (100 bytes) and the size (11 octal digits), between the size and the
# checksum (6 octal digits), and after the type (1 character).
_MODE_AND_OWNER = b"0000644\0" + b"0000000\0" * 2
_TIME = b"\0" + b"0" * 11 + b"\0"
_REST = (bytes(100) + b"ustar\0" + b"00").ljust(355, b"\0")
# The checksum counts itself as 8 spaces.
_SUM = sum(_MODE_AND_OWNER) + sum(_TIME) + 8 * ord(" ") + sum(_REST)


def header(name: str, size: int) -> bytes:
    """Return the header blocks that precede the data of a member.

    Args:
        name: Relative, with "/" between its parts; must be encodable as UTF-8.
        size: Bytes of the data.
    """
    if name.isascii() and len(name) <= _MAX_NAME and size <= _MAX_SIZE:
        return _block(name.encode(), size, b"0")
    records = b""
    if not name.isascii() or len(name) > _MAX_NAME:
        records += _record(b"path", name.encode())
    if size > _MAX_SIZE:
        records += _record(b"size", b"%d" % size)
    short = name.encode("ascii", "replace")[:_MAX_NAME]
    return b"".join(
        (
            _block(b"././@PaxHeader", len(records), b"x"),
            records,
            padding(len(records)),
            _block(short, size if size <= _MAX_SIZE else 0, b"0"),
        )
    )


def header_bytes(name: str, size: int) -> int:
    """Return `len(header(name, size))`."""
    if name.isascii() and len(name) <= _MAX_NAME and size <= _MAX_SIZE:
        return BLOCK
    return len(header(name, size))


def padding(size: int) -> bytes:
    """Return the zero bytes that follow the data of a member."""
    return bytes(-size % BLOCK)


def _block(name: bytes, size: int, kind: bytes) -> bytes:
    digits = b"%011o" % size
    checksum = _SUM + sum(name) + sum(digits) + kind[0]
    return b"".join(
        (
            name.ljust(_MAX_NAME, b"\0"),
            _MODE_AND_OWNER,
            digits,
            _TIME,
            b"%06o\0 " % checksum,
            kind,
            _REST,
        )
    )


def _record(key: bytes, value: bytes) -> bytes:
    r"""Return `LENGTH key=value\n`, in which the length counts its own digits."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)
