"""Credentials in URLs: nothing that is written or shown has them, and they identify no input."""

from __future__ import annotations

import base64
import json
import pickle
import re
import sqlite3
import string
import textwrap
import threading
import traceback
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, urlsplit

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import forebay
from forebay.base.files import shown_values
from forebay.cli import cli
from forebay.errors import (
    InputError,
    OptionError,
    short_tracebacks,
    shown_error,
    shown_location,
    without_credentials,
)
from forebay.failures import Failure
from forebay.ledger.ledger import Ledger
from forebay.observe.progress import Progress
from forebay.predicting.data import shown_rows
from forebay.show.live_page import LiveRun

# ---- the pure function ---------------------------------------------------------------------------

# What a secret is written with in a URL: RFC 3986, but its sub-delimiters that separate parameters.
PLAIN = string.ascii_letters + string.digits + "-._~!$'()*+,="
SECRETS = st.text(PLAIN, min_size=4).map("HUSH{}".format)
NAMES = st.sampled_from(
    re.findall(
        r"\S+",
        "X-Amz-Signature X-Amz-Credential x-goog-signature Signature AWSAccessKeyId sig token "
        "access_token api_key X-Plex-Token GoogleAccessId Key-Pair-Id OSSAccessKeyId q-ak "
        "client_secret password q-signature x-oss-signature",
    )
)
HARMLESS = st.tuples(
    st.sampled_from(["id", "v", "versionId", "page", "design", "key", "author", "x", "file"]),
    st.text(string.ascii_letters + string.digits + "%-._~", max_size=8),
).map("=".join)
HOSTS = st.sampled_from(["host", "host:80", "[::1]", "[::1]:80", "h.example.org", "127.0.0.1:9"])
PATHS = st.text(string.ascii_letters + "/@:~-._%!$'*+,=", max_size=12).map("/{}".format)


@st.composite
def locations(draw):
    """Draw a URL with credentials, and the same without them."""
    first = draw(SECRETS)
    before = draw(st.sampled_from(["", "", "simplecache::", "zip://a/*.wav::"]))
    scheme = draw(st.sampled_from(["https", "http", "ftp", "s3", "sftp", "webdav", "abfs"]))
    user = draw(st.sampled_from(["", "me:{}@", "{}:x@", ":{}@", "a@b.c:{}@"])).format(first)
    host, path = draw(HOSTS), draw(PATHS)
    kept = draw(st.lists(HARMLESS, max_size=3))
    secret = [f"{draw(NAMES)}={draw(SECRETS)}" for _ in range(draw(st.integers(0, 2)))]
    both = draw(st.permutations([*kept, *secret]))
    order = [each for each in both if each in kept]
    mark = draw(st.sampled_from("?#"))
    queries = [mark + "&".join(each) if each else "" for each in (both, order)]
    full = f"{before}{scheme}://{user}{host}{path}{queries[0]}"
    bare = f"{before}{scheme}://{host}{path}{queries[1]}"
    return full, bare


@given(locations())
def test_a_location_is_shown_without_its_credentials(drawn):
    """All else of it stays; what is shown is shown as it is, and so is a URL without any."""
    full, bare = drawn
    assert shown_location(full) == bare
    assert shown_location(bare) == bare


@given(
    locations(), st.sampled_from(["{}", "'{}'", '"{}"', "({})", "<{}>", "['{}', 'b@c']", "{}: no"])
)
@example(("https://u:HUSH@h/a'b", "https://h/a'b"), "'{}'")
@example(("https://u:HUSH'.@h/a", "https://h/a"), "{}")
@example(("https://u:HUSH').x@h/a", "https://h/a"), "['{}', 'b@c']")
@example(("https://h/a?id=1&sig=HUSH'.&token=HUSH", "https://h/a?id=1"), "{}")
def test_a_text_is_shown_without_the_credentials_of_its_urls(drawn, quoted):
    """However the URL is quoted in a message; the words around it stay."""
    full, _ = drawn
    shown = without_credentials(f"before {quoted.format(full)} after")
    assert "HUSH" not in shown
    assert shown.startswith("before ") and shown.endswith(" after")


@given(st.text(st.characters(exclude_characters="?#"), max_size=200))
def test_a_text_without_urls_stays(text):
    """Nothing is changed that is no URL, no query and no header."""
    assert "://" in text or ":" in text or "=" in text or without_credentials(text) == text


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("https://TOKEN@host/a", "https://host/a"),
        ("abfs://container@account/a", "abfs://container@account/a"),
        ("sftp://me@host/a", "sftp://me@host/a"),
        ("github://org:repo@main/a", "github://org:repo@main/a"),
        ("s3://KEY:SE/CR+ET@bucket/a", "s3://bucket/a"),
        ("https://me:a@b:c@host/a", "https://host/a"),
        ("http://host:80/a@b?c=d@e", "http://host:80/a@b?c=d@e"),
        ("https://h/a?sv=1&se=2&sp=r&sig=S%3D&id=5", "https://h/a?id=5"),
        ("https://h/a?se=2&sp=r&id=5", "https://h/a?se=2&sp=r&id=5"),
        ("https://h/a?Expires=1&Policy=p&Key-Pair-Id=k&Signature=s", "https://h/a"),
        ("https://h/a?Expires=1", "https://h/a?Expires=1"),
        ("https://h/a?key=AIzaSyA1234567890123456789012345678901", "https://h/a"),
        ("https://h/a#access_token=S&state=1", "https://h/a#state=1"),
        ("zip://a.csv::https://u:p@h/z.zip?sig=S::file://x", "zip://a.csv::https://h/z.zip::file://x"),
        ("https://h/?to=https%3A%2F%2Fu%3AS%40g%2Fx", "https://h/?to=https%3A%2F%2Fg%2Fx"),
        ("/data/u:p@x?token=5", "/data/u:p@x?token=5"),
    ],
)  # fmt: skip
def test_locations_are_shown(location, shown):
    """By the rules of each protocol."""
    assert shown_location(location) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Max retries exceeded with url: /a?x=1&Signature=S (Caused by", "url: /a?x=1 (Caused by"),
        ("headers={'Authorization': 'Basic UzpT'}", "{'Authorization': 'Basic ***'}"),
        ("Authorization: Bearer a.b-c\nHost: h", "Authorization: Bearer ***\nHost: h"),
        ("{'account_key': 'S=='}", "{'account_key': '***'}"),
    ],
)
def test_texts_are_shown(text, shown):
    """As urllib3, aiohttp and storage options write them."""
    assert without_credentials(text).endswith(shown)


def test_text_of_the_users_stays():
    """Of the values of a row those are changed that are a URL as a whole."""
    row = {"url": "https://u:p@h/a", "text": "see https://u:p@h/a", "more": [{"u": "s3://a:b@c"}]}
    shown = {"url": "https://h/a", "text": "see https://u:p@h/a", "more": [{"u": "s3://c"}]}
    assert shown_values(row) == shown


def test_a_long_text_takes_linear_time():
    """Also if it is one word, or consists of what URLs are made of."""
    for part in ("x", "a:", "://", "?a=", "@", "://a:", "'", "http://a", "&sig=", "?;"):
        without_credentials(part * (50_000 // len(part)))


# ---- exceptions ----------------------------------------------------------------------------------

URL = "https://me:HUSH@host/a?X-Amz-Signature=HUSH"


class FixedError(Exception):
    """Shows what it was made with, whatever its arguments become."""

    def __init__(self, url):
        super().__init__(url)
        self.url = url

    def __str__(self):
        return f"403 {self.url}"


def test_messages_of_forebay_have_no_credentials():
    """Whatever is put into one, also after pickling."""
    error = InputError(f"{URL}: not there\n  See {URL}")
    assert (
        str(pickle.loads(pickle.dumps(error))) == "https://host/a: not there\n  See https://host/a"
    )


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "none", URL), ValueError(URL), FixedError(URL)]
)
def test_failures_have_no_credentials(error):
    """Neither the message nor the traceback, with its causes."""
    try:
        try:
            raise error
        except Exception as cause:
            raise RuntimeError("it failed") from cause
    except RuntimeError as caught:
        failure = Failure.of(caught)
    assert "https://host/a" in failure.traceback
    assert "HUSH" not in failure.traceback + Failure.of(error).message


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "none", URL), ValueError(URL), FixedError(URL)]
)
@pytest.mark.parametrize("raised", [True, False])
def test_exceptions_that_are_passed_on_show_no_credentials(error, raised):
    """They keep their class if they can; so do their causes, which Python prints, too."""

    @short_tracebacks
    def entry():
        try:
            raise error
        except Exception as cause:
            if raised:
                raise
            raise InputError("it failed") from cause

    with pytest.raises(Exception) as caught:  # noqa: PT011 - the class is looked at
        entry()
    text = "".join(traceback.format_exception(caught.value))
    assert "HUSH" not in text and "https://host/a" in text
    if raised and not isinstance(error, FixedError):
        assert caught.value is error


def test_an_exception_without_credentials_is_not_changed():
    """Not even its arguments."""
    error = ValueError("https://host/a", 5)
    assert shown_error(error) is error and error.args == ("https://host/a", 5)


def test_a_loader_shows_no_credentials_of_its_samples():
    """In the record of a failure, and in the note that names the item of an exception."""
    dataset = forebay.from_ids([URL, URL], load=int)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        dataset[0]
    assert caught.value.__notes__ == ["forebay: it was raised for item 0: 'https://host/a'"]
    failure = Failure("exception", "ValueError", "no", source=URL)
    assert "HUSH" not in repr(failure) + str(failure)


@pytest.mark.parametrize("words", [[URL, "b", "c"], [URL]])
def test_the_command_line_shows_no_credentials(words, tmp_path, monkeypatch):
    """Neither if it is used in a wrong way."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "works.py").write_text("def work(source, out): ...")
    with pytest.raises(click.UsageError) as caught:
        cli.main(["preprocess", "works.py:work", *words, "-q"], standalone_mode=False)
    assert "HUSH" not in caught.value.message


# ---- stores --------------------------------------------------------------------------------------


def test_a_table_beside_predictions_has_no_credentials():
    """In strings, lists and dictionaries; other columns stay the same objects."""
    table = pa.table(
        {
            "url": pa.array([URL, None]),
            "more": pa.array([[URL], []]),
            "coded": pa.array([URL, "x"]).dictionary_encode(),
            "text": pa.array([f"see {URL}", ""]),
        }
    )
    shown = shown_rows(table)
    assert shown.schema == table.schema
    assert shown.to_pydict() == {
        "url": ["https://host/a", None],
        "more": [["https://host/a"], []],
        "coded": ["https://host/a", "x"],
        "text": table["text"].to_pylist(),
    }


def test_top_shows_an_output_without_credentials():
    """The page of a run has the output's name, which `forebay top NAME` compares."""
    progress = Progress(1, 0, False)
    page = LiveRun("preprocess", "memory://me:HUSH@bucket/out", progress)
    try:
        assert page.state_of(progress.trace)["title"] == "memory://bucket/out"
    finally:
        page.remove()


def listed(ledger, urls):
    """Enrol rows with these URLs as `preprocess` does; return what is to be done."""
    from forebay.inputs.listing import list_inputs

    listing = list_inputs([{"url": url} for url in urls])
    enrolment = ledger.enrol(listing, listing.columns, complete=True)
    return enrolment, [*ledger.todo()]


def test_the_ledger_has_no_credentials_and_its_inputs_keep_them(tmp_path):
    """They come from each listing, and are in no file; a listing with others is the same one."""
    with Ledger.open(tmp_path) as ledger:
        _, todo = listed(ledger, [URL, "https://host/b"])
        assert [json.loads(each.row)["url"] for each in todo] == [
            "https://host/a",
            "https://host/b",
        ]
        assert [each.opens and json.loads(each.opens)["url"] for each in todo] == [URL, None]
        renewed = URL.replace("HUSH", "HUSH2")
        enrolment, todo = listed(ledger, [renewed, "https://host/b"])
        assert (enrolment.new, enrolment.same, enrolment.changed) == (0, 2, 0)
        assert json.loads(todo[0].opens)["url"] == renewed
        assert not ledger.needs_listing
    with Ledger.open(tmp_path) as ledger:
        assert ledger.needs_listing
        assert [each.opens for each in ledger.todo()] == [None, None]
        listed(ledger, ["https://host/a", "https://host/b"])
        assert not ledger.needs_listing
    assert not any(b"HUSH" in path.read_bytes() for path in tmp_path.iterdir())


def test_two_inputs_that_differ_in_credentials_alone_are_one(tmp_path):
    """The error comes before anything starts; a column that tells them apart makes them two."""
    urls = ["https://h/get?token=a", "https://h/get?token=b"]
    with pytest.raises(InputError, match=r"https://h/get\S* is listed twice[\s\S]*credentials"):
        forebay.preprocess(lambda row, out: None, [{"u": url} for url in urls], tmp_path / "out")
    rows = [{"u": url, "id": at} for at, url in enumerate(urls)]
    report = forebay.preprocess(
        lambda row, out: {"given": row["u"] == urls[row["id"]]},
        rows,
        tmp_path / "out",
        num_workers=0,
        progress=False,
    )
    assert report.metadata.to_pydict()["given"] == [True, True]


def test_an_output_with_credentials_keeps_them_to_be_opened(memory, machine, tmp_path):
    """The report opens its table, and shows the output without them; so does the next run."""
    output = "memory://me:HUSH@bucket/out"
    inputs = [{"n": 1}, {"n": 2}]
    report = forebay.preprocess(keep, inputs, output, num_workers=0, progress=False)
    assert report.metadata.num_rows == 2
    assert "HUSH" not in repr(report) + report._repr_html_()
    assert "memory://bucket/out" in repr(report)
    again = forebay.preprocess(keep, inputs, output, num_workers=0, progress=False)
    assert again.resumed == 2


def keep(row, out):
    """Write nothing."""
    return {"n": row["n"]}


def test_retry_says_that_it_has_no_credentials(tmp_path):
    """It reads the ledger alone; the same call of `preprocess` tries failed inputs again."""
    inputs = [{"url": URL, "n": 1}]
    report = forebay.preprocess(fail, inputs, tmp_path / "out", num_workers=0, progress=False)
    assert report.failed == 1 and "HUSH" not in str(report.failures)
    with pytest.raises(OptionError, match="Make the call of preprocess again"):
        forebay.runs.preprocess.retry(fail, tmp_path / "out", num_workers=0, progress=False)


def fail(row, out):
    """Fail as a library does that puts a URL into its message."""
    raise ConnectionError(f"403 for {row['url']}")


# ---- from end to end -----------------------------------------------------------------------------

SIGNATURE, PASSWORD = "HUSHsignature%2B", "HUSHpassword"
# Data of an image or a row, by name; "gone" is missing, and "shut" refuses every signature.
FILES = {f"{n}.txt": f"text {n}".encode() for n in range(6)}


class Handler(BaseHTTPRequestHandler):
    """Serves files to those who have the signature of the day, or the password."""

    def do_GET(self):
        """Answer; a HEAD likewise."""
        parts = urlsplit(self.path)
        name = parts.path.rpartition("/")[2]
        given = parse_qs(parts.query).get("X-Amz-Signature", [""])[0]
        basic = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
        is_allowed = quote(given, safe="") == self.server.signature or (
            self.headers.get("Authorization") == f"Basic {basic}"
        )
        body = self.server.files.get(name, b"")
        code = 403 if name == "shut.txt" or not is_allowed else 200 if body else 404
        self.send_response(code)
        self.send_header("Content-Length", str(len(body) if code == 200 else 0))
        self.send_header("ETag", f'"{name}"')
        self.end_headers()
        if code == 200 and self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - the name that the server calls

    def log_message(self, *_):
        """Print nothing."""


@contextmanager
def serving():
    """Serve the files on a free port of loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = False
        server.files, server.signature = dict(FILES), SIGNATURE
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


SCRIPT = """
import json, os, sys, urllib.request, logging
import forebay, torch
from forebay.cli import failures_command, status_command
from pathlib import Path
logging.basicConfig(level=logging.DEBUG)
for name in ("asyncio", "fsspec", "fsspec.http", "urllib3", "fsspec.local"):
    logging.getLogger(name).setLevel(logging.WARNING)
STORE, BASIC, TOKEN = os.environ["STORE"], os.environ["BASIC"], "HUSHtoken"

def signed(name):
    return (f"{STORE}/in/{name}?v=1&X-Amz-Algorithm=AWS4&X-Amz-Credential=HUSHkey%2Faws4&"
            f"X-Amz-Expires=60&X-Amz-Signature={os.environ['SIGNATURE']}")

def read(url):
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        error.close()
        raise ConnectionError(f"{error} for {url}") from error

def work(source, out):
    given, source = source, Path(source)
    if source.name == "3.txt" and TOKEN:
        raise ValueError(f"{out.source} is odd")
    out.file(source.name).write_bytes(source.read_bytes())
    return {"given": str(given), "size": source.stat().st_size}

def of_row(row, out):
    out.file(row["name"]).write_bytes(read(row["url"]))
    return {"mirror": row["url"], "all": [row["url"]]}

def load(row):
    return torch.tensor([len(read(row["url"]))], dtype=torch.float32)

class Signed(torch.utils.data.Dataset):
    def __init__(self, names):
        self.urls = [signed(name) for name in names]
    def __len__(self):
        return len(self.urls)
    def __getitem__(self, index):
        return {"data": read(self.urls[index])}
    def source_of(self, index):
        return self.urls[index]

def nothing(sample, out):
    pass

def model(batch):
    return batch * 2

def tried(call, *arguments, **options):
    try:
        return call(*arguments, **options)
    except Exception as error:
        import traceback
        traceback.print_exc()
        print("raised", type(error).__name__)

def show(name, report):
    if report is None:
        return
    print(name, report)
    print(report._repr_html_())
    report.save(f"{name}.html")
    for failure in report.failures:
        print(repr(failure), failure, failure.traceback)
    print("#", name, report.done, report.failed, report.resumed)

def main(workers):
    quiet = {"num_workers": workers}
    names = [f"{n}.txt" for n in range(6)]
    urls = [*map(signed, names), signed("gone.txt"), signed("shut.txt"), f"{BASIC}/in/shut.txt?a=1"]
    urls += [f"{BASIC}/in/{name}" for name in names[:2]]
    def named(source, out):
        out.file(f"{len(out.source)}-{Path(source).name}").write_bytes(Path(source).read_bytes())
        return {"given": str(source)}
    show("files", tried(forebay.preprocess, work, urls[:8], "files", **quiet))
    show("basic", tried(forebay.preprocess, named, urls[8:], "basic", **quiet))
    show("rows", tried(forebay.preprocess, of_row, signed("table.csv"), "rows", **quiet))
    show("list", tried(forebay.preprocess, of_row, f"{BASIC}/in/table.jsonl", "list", **quiet,
                       metadata="jsonl"))
    tried(forebay.preprocess, of_row, signed("table.csv"), "first", max_failures=0, **quiet)
    tried(forebay.preprocess, work, [signed("shut.txt")], "shut", max_failures=0, **quiet)
    tried(forebay.preprocess, work, signed("gone.csv"), "gone", **quiet)
    tried(forebay.preprocess, work, f"http://me:HUSHhost@127.0.0.1:1/in.csv", "gone", **quiet)
    data = Signed(names)
    show("data", tried(forebay.preprocess, data, output="data", save=nothing, **quiet))
    cached = tried(forebay.cache, data, "cached", **quiet)
    print(cached, cached[0])
    tried(forebay.cache, Signed([*names, "gone.txt"]), "broken", **quiet)
    show("parts", tried(forebay.predict, model, signed("table.csv"), "parts", load=load,
                        batch_size=2, **quiet))
    table = tried(forebay.from_table, signed("table.csv"), load)
    print(table, table._repr_html_())
    tried(forebay.from_table, signed("gone.csv"), load)
    loader = forebay.DataLoader(table, batch_size=2, seed=0, on_error="skip", num_workers=workers)
    print([len(batch) for batch in loader], loader.statistics(), loader.statistics()._repr_html_())
    print(loader.failures, [each.traceback for each in loader.failures], loader.diagnose())
    loader.report("loader.html")
    if workers:
        tried(list, forebay.DataLoader(table, batch_size=2, num_workers=workers))
    else:
        tried(list, forebay.DataLoader(Signed(names), batch_size=2, collate_fn=len))
    for output in ("files", "rows", "data", "parts", "broken"):
        tried(failures_command.main, [output, "--traceback"], standalone_mode=False)
        tried(failures_command.main, [output, "--json"], standalone_mode=False)
        tried(status_command.main, [output], standalone_mode=False)

if __name__ == "__main__":
    main(int(sys.argv[1]))
"""


def tables_of(folder):
    """Return as text what Parquet files and ledgers hold."""
    for path in folder.rglob("*.parquet"):
        yield path, str(pq.read_table(path).to_pydict())
    for path in folder.rglob("ledger.sqlite"):
        with closing(sqlite3.connect(path)) as db:
            for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'"):
                yield path, str(db.execute(f"SELECT * FROM {name}").fetchall())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.thorough), 2])
def test_nothing_that_a_run_writes_or_prints_has_credentials(trainers, tmp_path, workers):
    """Inputs, outputs, tables, ledgers, reports and streams; with signatures renewed in between."""
    there, script = tmp_path / "there", tmp_path / "program.py"
    there.mkdir()
    script.write_text(textwrap.dedent(SCRIPT))
    with serving() as server:
        place = f"127.0.0.1:{server.server_address[1]}"
        endings = []
        for signature in (SIGNATURE, "HUSHother"):
            server.signature = signature
            rows = [
                {"name": name, "url": f"http://{place}/in/{name}?X-Amz-Signature={signature}"}
                for name in [*sorted(FILES), "gone.txt"]
                if "txt" in name
            ]
            lines = [f"{row['name']},{row['url']}" for row in rows]
            server.files["table.csv"] = "\n".join(["name,url", *lines, ""]).encode()
            server.files["table.jsonl"] = "\n".join(map(json.dumps, rows)).encode()
            ending = trainers.run(
                script,
                workers,
                cwd=there,
                STORE=f"http://{place}",
                BASIC=f"http://me:{PASSWORD}@{place}",
                SIGNATURE=signature,
                TMPDIR=str(there),
            )
            assert ending.code == 0, ending.err
            endings.append(ending)
    hidden = [b"HUSH", base64.b64encode(f"me:{PASSWORD}".encode())]
    for path in there.rglob("*"):
        if path.is_file():
            found = [word for word in hidden if word in path.read_bytes()]
            assert not found, (path, found)
    for path, text in tables_of(there):
        assert "HUSH" not in text, path
    for ending in endings:
        for text in (ending.out, ending.err):
            lines = [line for line in text.splitlines() if "HUSH" in line]
            assert not lines, "\n".join(lines)
    counts = [
        {line.split()[1]: tuple(map(int, line.split()[2:])) for line in ending.out.splitlines()
         if line.startswith("# ")}
        for ending in endings
    ]  # fmt: skip
    assert counts[0] == {
        "files": (5, 3, 0),
        "basic": (2, 1, 0),
        "rows": (6, 1, 0),
        "list": (6, 1, 0),
        "data": (6, 0, 0),
        "parts": (6, 1, 0),
    }
    # The same objects with other signatures: what was done is not done again. (Of a part that is
    # done, samples that failed count, too.)
    again = {name: (done, failed, done) for name, (done, failed, _) in counts[0].items()}
    assert counts[1] == again | {"parts": (6, 1, 7)}
    names = pq.read_table(there / "files" / "metadata.parquet")["source"].to_pylist()
    assert names[0] == f"http://{place}/in/0.txt?v=1"
