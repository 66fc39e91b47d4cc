"""What the site's builder is told of pages: how the search ranks them; and llms.txt beside them.

Somebody who searches wants to do something, or to look a name up; not to read why a format is as it
is, or what was changed when. The pages themselves stay plain Markdown, without a header for this.
"""

import re
from pathlib import Path
from typing import Any

# By how a page's path begins; the longest one counts. 1 is the builder's own. A word in a title
# counts a thousand times, so what comes last has less than a thousandth.
BOOSTS = {
    "": 1.0,
    "README.md": 2.0,
    "docs/how-to/": 3.0,
    "docs/tutorial/": 2.0,
    "docs/reference/": 3.0,
    "docs/explanation/": 1.0,
    "docs/glossary.md": 0.5,
    "docs/benchmarks/": 0.001,
    "docs/design/": 0.0003,
    "ARCHITECTURE.md": 0.0003,
    "AGENTS.md": 0.0003,
    "CONTRIBUTING.md": 0.0003,
    "CHANGELOG.md": 0.0003,
}


def boost_of(path: str) -> float:
    """Return how much more the words of a page count than others' in the search."""
    return BOOSTS[max((each for each in BOOSTS if path.startswith(each)), key=len)]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Set the rank of a page; the builder calls this for each."""
    page.meta.setdefault("search", {})["boost"] = boost_of(page.file.src_uri)
    return markdown


def on_post_page(output: str, **_: Any) -> str:
    """Leave the link to the repository alone: its script asks the host for stars and forks."""
    return output.replace(' data-md-component="source"', "")


def on_post_build(config: Any, **_: Any) -> None:
    """Write llms.txt, which programs look for at a site's root; its links lead to pages there."""
    text = Path(config["config_file_path"]).with_name("llms.txt").read_text(encoding="utf-8")
    text = re.sub(r"\]\(README\.md\)", "](index.html)", text)
    text = re.sub(r"\]\(([^)]+)\.md\)", r"](\1.html)", text)
    Path(config["site_dir"], "llms.txt").write_text(text, encoding="utf-8")
