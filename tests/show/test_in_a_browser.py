"""Reports in a real browser: nothing is requested, nothing goes wrong, and there is something.

The browser is Chromium, by the name in `FOREBAY_CHROMIUM` or one of the usual ones. Its traffic
goes to a proxy of the test, which notes what is asked for and answers nothing. The screenshots are
in the folder that `FOREBAY_SCREENSHOTS` names, for people to look at.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import forebay

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("FOREBAY_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)

SITE = Path(__file__).parents[2] / "build" / "site"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]

# Of what Chromium asks for by itself; a page cannot have these addresses.
ITS_OWN = ("google.com", "googleapis.com", "gstatic.com", "gvt1.com")


class Proxy(ThreadingHTTPServer):
    """Notes the address of each request."""

    daemon_threads = True

    def __init__(self):
        self.asked = []
        super().__init__(("127.0.0.1", 0), Refusing)


class Refusing(BaseHTTPRequestHandler):
    """Answers every request with an error."""

    def refuse(self):
        self.server.asked.append(self.path)
        self.send_error(403)

    do_GET = do_HEAD = do_POST = do_CONNECT = refuse  # noqa: N815 - the names are the library's

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def proxy():
    """Yield a proxy on a port of this machine."""
    with Proxy() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def look(page: Path, picture: Path, proxy: Proxy, size: str, *more: str) -> tuple[str, list[str]]:
    """Open a page; return what the console says, and which addresses were asked for."""
    # A container has no sandbox, and its /dev/shm may be small.
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options += ["--hide-scrollbars", "--disable-background-networking", "--no-first-run"]
    options += ["--disable-component-update", "--disable-sync", "--enable-logging=stderr"]
    options += [f"--proxy-server=127.0.0.1:{proxy.server_port}", "--proxy-bypass-list=<-loopback>"]
    options += [f"--user-data-dir={picture.parent / 'profile'}", f"--window-size={size}", *more]
    done = subprocess.run(
        [CHROMIUM, *options, f"--screenshot={picture}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert picture.is_file(), done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    asked = [each for each in proxy.asked if not any(own in each for own in ITS_OWN)]
    return "\n".join(console), asked


def keep(picture: Path) -> None:
    """Copy a screenshot to where people look at it."""
    if folder := os.environ.get("FOREBAY_SCREENSHOTS"):
        shutil.copy(picture, folder)


def colours(picture: Path) -> int:
    """Return how many colours a picture has."""
    with Image.open(picture) as image:
        return len(image.convert("RGB").getcolors(1 << 24))


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return a report of each kind."""
    folder = tmp_path_factory.mktemp("reports")
    dataset = TensorDataset(torch.arange(4000))
    with forebay.DataLoader(dataset, batch_size=4, num_workers=2, seed=0, buffer="1MB") as loader:
        for _ in loader:
            pass
        first = loader.report(folder / "loader.html")
    inputs = folder / "inputs"
    inputs.mkdir()
    for number in range(40):
        (inputs / f"{number}.txt").write_text("x")
    done = forebay.preprocess(fails, inputs, folder / "out", num_workers=0, progress=False)
    second = done.save(folder / "run.html")
    return {"loader": first, "run": second}


def fails(source, out):
    """Fail now and then, with a message that wants to be markup."""
    if source.stem.endswith("7"):
        raise ValueError("<img src=http://example.com/x.png onerror=alert(1)>")


@pytest.mark.parametrize("kind", ["loader", "run"])
@pytest.mark.parametrize(
    ("name", "size", "more"),
    [
        ("wide", "1000,2400", []),
        ("phone", "500,2600", ["--blink-settings=preferredColorScheme=0"]),
    ],
)
def test_a_report_opens_without_a_network(tmp_path, proxy, reports, kind, name, size, more) -> None:
    """In light and dark, wide and narrow: no request, no message, and more than a blank page."""
    picture = tmp_path / f"{kind}-{name}.png"
    assert look(reports[kind], picture, proxy, size, *more) == ("", [])
    assert colours(picture) > 20
    keep(picture)


# It searches for a word, and says how many pages were found, and how many lines of code are cut.
LOOKS = """<script>
const all = (selector) => [...document.querySelectorAll(selector)];
const cut = () => all("pre code").filter((each) => each.scrollWidth > each.clientWidth + 1).length;
const results = () => all(".md-search-result__item").length;
const timer = setInterval(() => {
  const field = document.querySelector(".md-search__input");
  field.focus();
  field.value = "replay";
  field.dispatchEvent(new Event("keyup", { bubbles: true }));
  if (results() && !clearInterval(timer)) console.log(`${results() > 2} ${cut()} cut`);
}, 200);
</script></body>"""


@pytest.mark.skipif(not SITE.is_dir(), reason="make docs was not called")
def test_the_site_opens_from_a_disk_with_its_search(tmp_path, proxy) -> None:
    """Nothing is requested, the search finds pages, and no code is cut on a common screen."""
    site = shutil.copytree(SITE, tmp_path / "site")
    page = site / "docs" / "tutorial" / "preprocess.html"
    page.write_text(page.read_text().replace("</body>", LOOKS))
    more = ["--virtual-time-budget=20000"]
    console, asked = look(page, tmp_path / "site.png", proxy, "1280,1000", *more)
    assert "true 0 cut" in console
    assert asked == []


def test_requests_and_messages_would_be_seen(tmp_path, proxy) -> None:
    """The test of the test: a page that loads something and says something."""
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><img src='http://example.com/x.png'><script>console.error('oh')</script>"
    )
    console, asked = look(page, tmp_path / "page.png", proxy, "400,400")
    assert "oh" in console
    assert asked == ["http://example.com/x.png"]


def test_a_script_in_a_report_would_not_run(tmp_path, proxy, reports) -> None:
    """The second line of defence: what if a name were not escaped after all."""
    content = reports["loader"].read_text()
    page = tmp_path / "page.html"
    injected = "<script>console.error('ran')</script><img src='http://example.com/x.png'>"
    page.write_text(content.replace("<main>", f"<main>{injected}"))
    console, asked = look(page, tmp_path / "page.png", proxy, "400,400")
    assert "Content Security Policy" in console
    assert "'ran'" not in console
    assert asked == []
    assert json.loads(content.partition('id="forebay-data">')[2].partition("</script>")[0])
