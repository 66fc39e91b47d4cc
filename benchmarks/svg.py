"""SVG pictures of labelled bars, readable on light and on dark pages.

A picture has its own background, which follows the reader's colour scheme together with the text,
so it is readable even if the page around it does not follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

# By class of an element: its fill on light and on dark backgrounds.
COLOURS = {
    "page": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#f0f6fc"),
    "note": ("#59636e", "#9198a1"),
    "main": ("#0969da", "#4493f8"),
    "other": ("#818b98", "#656c76"),
    "wait": ("#d1242f", "#f85149"),
}
FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', sans-serif"
# A narrow estimate of a character's width, as a part of the font's size.
CHARACTER = 0.56


def rectangle(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a filled rectangle; `kind` is one of `COLOURS`."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.4g}" height="{height:g}" class="{kind}"/>'


def words(x: float, y: float, text: str, kind: str = "ink", anchor: str = "start") -> str:
    """Return a line of text whose baseline starts, has its middle or ends at a point."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def picture(title: str, width: int, height: int, parts: Iterable[str]) -> str:
    """Return an SVG document; a screen reader reads the title."""
    rules = [_rules(scheme) for scheme in (0, 1)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="{FONT}" font-size="13">',
            f"<title>{escape(title)}</title>",
            f"<style>{rules[0]} @media (prefers-color-scheme: dark) {{ {rules[1]} }}</style>",
            f'<rect width="{width}" height="{height}" rx="6" class="page"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _rules(scheme: int) -> str:
    return " ".join(f".{kind} {{ fill: {fills[scheme]} }}" for kind, fills in COLOURS.items())
