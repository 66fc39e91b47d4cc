"""Make the links of the package's page from the repository's address, when a package is built.

The README's links lead from file to file, as they do in a clone. A package index shows the README
alone, so there they begin with the address: HOST/OWNER/forebay/blob/v0.1.0/docs/index.md.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "FOREBAY_REPOSITORY"
# A link to a file of the repository, or a picture of it.
LINK = re.compile(r"(!?)(\[[^\]]*\])\(([^)#:\s]+)(#[^)\s]+)?\)")


class CustomMetadataHook(MetadataHookInterface):
    """Sets what pyproject.toml lists as dynamic, beside the version."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README and the addresses."""
        root = Path(self.root)
        repository = (os.environ.get(VARIABLE) or self.config["repository"]).rstrip("/")
        found = re.search(r'__version__ = "(.+)"', (root / "src/forebay/__init__.py").read_text())
        assert found, "the package has a version"
        tag = "HEAD" if "dev" in found[1] else f"v{found[1]}"
        text = (root / "README.md").read_text(encoding="utf-8")
        if repository:
            text = absolute(text, repository, tag)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = addresses(repository, tag) if repository else {}


def absolute(text: str, repository: str, tag: str) -> str:
    """Return a document of the repository's first folder with links that lead to it from anywhere.

    Args:
        text: The document.
        repository: The address of the repository.
        tag: A tag, a branch or a commit.
    """

    def replaced(link: re.Match[str]) -> str:
        picture, words, path, heading = link.groups(default="")
        kind = "raw" if picture else "blob"
        return f"{picture}{words}({repository}/{kind}/{tag}/{path}{heading})"

    return LINK.sub(replaced, text)


def addresses(repository: str, tag: str) -> dict[str, str]:
    """Return the addresses that the package's page shows beside the README."""
    return {
        "Repository": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
