"""Pages that load nothing and run nothing, and a string that wants to be more than text."""

from __future__ import annotations

import html.parser
import json

HOSTILE = "</script><script>alert(1)</script><img src=http://example.com/x>\u202e\x1b[31m"


class Page(html.parser.HTMLParser):
    """Collects the elements, the text and the attributes of a page, and that it is well-formed."""

    VOID = ("meta", "img", "br", "link")

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self._open = [], [], [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if not self._open or self._open[-1] not in ("script", "style"):
            self.text.append(data)


def check_self_contained(content: str) -> Page:
    """Check that a file loads nothing and runs nothing."""
    page = Page(content)
    assert not {"link", "img", "iframe", "object", "embed", "audio", "video"} & set(page.tags)
    assert page.tags.count("script") == 1  # the data
    assert not [name for name, _ in page.attributes if name in ("src", "href", "xlink:href")]
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "url(" not in content
    assert "@import" not in content
    return page


def data_of(path) -> dict:
    """Return the JSON that a report holds."""
    text = path.read_text()
    return json.loads(text.partition('id="forebay-data">')[2].partition("</script>")[0])
