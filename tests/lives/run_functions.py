"""The user's script: a function of some kind, what it returns and what it leaves. PURE.

A script is a text, since forebay compares functions by their source, and users have scripts. What
is made of an input is worked out here once more, for the oracle.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import io
import re
import tarfile
from collections.abc import Mapping
from typing import Any

SCRIPT = "jobs.py"
MODULE = "work_helper.py"
LOG = "log"

_HEAD = """
import datetime, decimal, functools, hashlib, os, pathlib, signal, threading, time
from dataclasses import dataclass
from typing import NamedTuple
"""

_BODY = """
VERSION = {version!r}
KEPT = []


@dataclass
class Record:
    n: int
    text: str


@dataclass
class Located:
    destination: object
    n: int
    text: str


class Fields(NamedTuple):
    n: int
    text: str


class LocatedFields(NamedTuple):
    destination: object
    n: int
    text: str


def read(source):
    if isinstance(source, dict) and "stem" in source:
        return source["stem"], [source["text"].encode()]
    if isinstance(source, dict):
        paths = [source[each] for each in ("path", "image", "mask") if each in source]
    else:
        paths = [source]
    contents = [pathlib.Path(each).read_bytes() for each in paths]
    return pathlib.Path(paths[0]).stem, contents


def begin(source, version):
    stem, contents = read(source)
    text = hashlib.sha1(b"".join([version.encode(), *contents])).hexdigest()
    if contents[0].startswith(b"flaky"):  # it fails once; that is no execution
        mark = pathlib.Path({log!r} + "-" + stem + "-" + text)
        if not mark.exists():
            mark.touch()
            raise OSError("flaky " + stem)
    with open({log!r}, "ab", buffering=0) as file:
        file.write((stem + chr(10)).encode())
    if contents[0].startswith(b"slow"):
        time.sleep(0.03)
    if contents[0].startswith(b"raises"):
        raise ValueError("bad input " + stem)
    if contents[0].startswith(b"dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    return stem, text, contents[0][:4]


def records(text):
    n = int(text[:4], 16)
    return {records}


def work_on(source, version, out=None):
    stem, text, how = begin(source, version)
    files = leave(stem, text, out)
    if how == b"open":
        KEPT.append(open(out / (stem + ".open"), "w"))
        KEPT[-1].write("not all of it")
    made = records(text)
    if how == b"mode":
        return {{"model": "fails"}}
    if how[:3] == b"odd":
        return {{"odd": object()}}
    if not made:
        return None
    if len(files) < 2:
        return made if {is_list} else made[0]
    return [located(made[k % len(made)], each) for k, each in enumerate(files)]


def located(record, file):
    if isinstance(record, Record):
        return Located(file, record.n, record.text)
    if isinstance(record, Fields):
        return LocatedFields(file, record.n, record.text)
    return {{"destination": file, **record}}


def leave(stem, text, out):
{leave}
"""

_RECORDS = {
    "none": "[]",
    "dict": '[{"n": n, "text": text}]',
    "dataclass": "[Record(n, text)]",
    "namedtuple": "[Fields(n, text)]",
    "several": '[{"n": n + k, "text": text} for k in range(1 + n % 3)]',
    "typed": (
        '[{"when": datetime.datetime(2000 + n % 50, 1, 2, 3, 4, 5), "price": '
        'decimal.Decimal(n) / 4, "raw": text.encode(), "day": datetime.date(2000 + n % 50, 2, 3)}]'
    ),
}

_LEAVE = {
    "nothing": "    return []",
    "one": """
    file = out / f"{stem}.bin"
    file.write_text(text)
    return [file]
""",
    "several": """
    files = [out / f"{stem}-{k}.bin" for k in range(2 + int(text[0], 16) % 3)]
    for k, file in enumerate(files):
        file.write_text(f"{k} {text}")
    return files
""",
    "nested": """
    (out / stem / "deep").mkdir(parents=True)
    (out / stem / "a.bin").write_text(text)
    (out / stem / "deep" / f"{text[:2]}.bin").write_text(text)
    return [out / stem]
""",
    "tar": """
    with out.tar(f"{stem}.tar") as tar:
        tar.add(f"{stem}/a", text.encode())
        tar.add(f"{stem}/b", text[:9].encode())
    return []
""",
    "list": """
    file = out / f"{stem}.bin"
    file.write_text(text)
    (out / f"{stem}.list").write_text(f"{stem} {file}")
    return [file, out / f"{stem}.list"]
""",
}

_KINDS = {
    "plain": """
def work(source{out}):
    return work_on(source, VERSION{out})
""",
    "lambda": """
work = lambda source{out}: work_on(source, VERSION{out})
""",
    "closure": """
def made(version):
    def work(source{out}):
        return work_on(source, version{out})
    return work


work = made(VERSION)
""",
    "instance": """
class Work:
    def __init__(self, version):
        self.version = version

    def __call__(self, source{out}):
        return work_on(source, self.version{out})


work = Work(VERSION)
""",
    "partial": """
def of_version(version, source{out}):
    return work_on(source, version{out})


work = functools.partial(of_version, VERSION)
""",
    "cached": """
@functools.cache
def loaded():
    return [VERSION]


def work(source{out}):
    return work_on(source, loaded()[0]{out})
""",
    "lock": """
LOCK = threading.Lock()


def work(source{out}):
    with LOCK:
        return work_on(source, VERSION{out})
""",
    "module": """
from work_helper import VERSION, work_on


def work(source{out}):
    return work_on(source, VERSION{out})
""",
}
KINDS = tuple(_KINDS)
RETURNS = tuple(_RECORDS)
LEAVES = tuple(_LEAVE)

_DATA = """

class All:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        path = f"in/d{{1 + index // 2 % 2}}/{{chr(97 + index * 7 % 26)}}{{index:02}}.txt"
        return {whole}


class Data:
    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return {item}

    def source_of(self, index):
        return self.paths[index]


def model(batch):
    if {{"model": "fails"}} in batch:
        raise ValueError("the model fails")
    return list(batch)
"""


def files_of_script(setup: Mapping[str, str], version: str, log: str) -> dict[str, str]:
    """Return the script and, for one kind, the module that it imports."""
    has_out = setup["leaves"] != "nothing"
    body = _BODY.format(
        version=version,
        log=log,
        is_list=setup["returns"] == "several",
        records=_RECORDS[setup["returns"]],
        leave=_LEAVE[setup["leaves"]].strip("\n"),
    )
    kind = _KINDS[setup["function"]].format(out=", out" if has_out else "")
    kind += _DATA.format(
        item="self.paths[index]" if has_out else "work(self.paths[index])",
        whole="path" if has_out else "work(path)",
    )
    if setup["function"] == "module":
        return {MODULE: _HEAD + body, SCRIPT: _HEAD + kind}
    return {SCRIPT: _HEAD + body + kind}


# ---- what the oracle expects of them -------------------------------------------------------------


def text_of(contents: list[bytes], version: str) -> str:
    """Return the text that is made of an input's files."""
    return hashlib.sha1(b"".join([version.encode(), *contents])).hexdigest()


def records_of(returns: str, text: str) -> list[dict[str, Any]]:
    """Return the records of one text."""
    n = int(text[:4], 16)
    match returns:
        case "none":
            return []
        case "several":
            return [{"n": n + k, "text": text} for k in range(1 + n % 3)]
        case "typed":
            year = 2000 + n % 50
            return [
                {
                    "when": datetime.datetime(year, 1, 2, 3, 4, 5),  # noqa: DTZ001 as a user has it
                    "price": decimal.Decimal(n) / 4,
                    "raw": text.encode(),
                    "day": datetime.date(year, 2, 3),
                }
            ]
    return [{"n": n, "text": text}]


def files_left(leaves: str, stem: str, text: str) -> dict[str, bytes]:
    """Return the files of one text, by their names in the output folder."""
    match leaves:
        case "one":
            return {f"{stem}.bin": text.encode()}
        case "several":
            count = 2 + int(text[0], 16) % 3
            return {f"{stem}-{k}.bin": f"{k} {text}".encode() for k in range(count)}
        case "nested":
            names = f"{stem}/a.bin", f"{stem}/deep/{text[:2]}.bin"
            return dict.fromkeys(names, text.encode())
        case "tar":
            members = {f"{stem}/a": text.encode(), f"{stem}/b": text[:9].encode()}
            return {f"{stem}.tar": _tar(members)}
        case "list":
            return {f"{stem}.bin": text.encode(), f"{stem}.list": b""}
    return {}


def _tar(members: dict[str, bytes]) -> bytes:
    """Return what `is_same_tar` compares with."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def members_of(data: bytes) -> dict[str, bytes]:
    """Return what a tar has."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {each.name: tar.extractfile(each).read() for each in tar}  # type: ignore[union-attr]


def is_as_expected(name: str, found: bytes, expected: bytes) -> bool:
    """Return whether a file has what it should have."""
    if name.endswith(".tar"):
        return members_of(found) == members_of(expected)
    if name.endswith(".list") and not expected:  # it names a file, wherever the outputs were then
        stem = re.escape(name.removesuffix(".list").encode())
        path = re.fullmatch(stem + rb" (/[^\0]*/)" + stem + rb"\.bin", found)
        return path is not None and b".forebay" not in path[1]
    return found == expected


def is_altered(name: str, found: bytes, expected: bytes) -> bool:
    """Return whether a file has another size than the output that was made."""
    if name.endswith(".list"):  # its size depends on where the outputs were
        return not is_as_expected(name, found, expected)
    return len(found) != len(expected)


def prediction_of(returns: str, contents: list[bytes], version: str) -> dict[str, Any]:
    """Return the columns of an input's prediction."""
    records = records_of(returns, text_of(contents, version))
    return {"prediction": records} if returns == "several" else records[0]


def sample_of(returns: str, contents: list[bytes], version: str) -> Any:
    """Return an input's sample in a cache, as `plain` shows it."""
    records = records_of(returns, text_of(contents, version))
    names = {"dataclass": "Record", "namedtuple": "Fields"}
    if returns in names:
        return [names[returns], records[0]]
    return records if returns == "several" else records[0] if records else None


def plain(value: Any) -> Any:
    """Return a sample without the classes of the script, with their names."""
    if hasattr(value, "_asdict"):
        return [type(value).__name__, value._asdict()]
    return [type(value).__name__, vars(value)] if hasattr(value, "__dict__") else value


def rows_of(
    returns: str, leaves: str, stem: str, contents: list[bytes], version: str
) -> list[dict[str, Any]]:
    """Return an input's rows: `destination`, and the columns that the function returned."""
    text = text_of(contents, version)
    records = records_of(returns, text)
    names = [*files_left(leaves, stem, text)]
    if leaves == "nested":
        names = [stem] if records else names
    if len(names) > 1 and records:
        return [{"destination": each} | records[k % len(records)] for k, each in enumerate(names)]
    if not records:
        return [{"destination": each} for each in names]
    return [{"destination": names[0] if names else None} | each for each in records]
