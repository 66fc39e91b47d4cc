"""The site, the continuous integration and the version agree with the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import forebay
import forebay.collate

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_public_name_is_on_one_page_of_the_reference() -> None:
    """Nothing public is left out, and nothing is there that is not public."""
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs/reference").glob("*.md")]
    # A function in a module of the same name is written `preprocess.preprocess`.
    found = [
        re.sub(r"^(\w+)\.\1$", r"\1", name)
        for text in pages
        for name in re.findall(r"^::: forebay\.(\S+)$", text, re.M)
    ]
    received = {"outputs.staging.Output", "outputs.tars.OutputTar"}  # by functions, as `out`
    # What a format of one's own is made of.
    names = "BlockDecoder", "FoundBlocks", "ShardFile", "ShardFormat", "blocks_of"
    formats = {f"shards.format.{name}" for name in names}
    collating = {f"collate.{name}" for name in forebay.collate.__all__}
    public = {*forebay.__all__, *collating, *received, *formats} - {"collate"}
    assert sorted(found) == sorted(public)


def test_the_site_needs_no_server_and_nothing_from_elsewhere() -> None:
    """The search has its index in a script, and what runs it in a frame is the site's own."""
    config = text_of("mkdocs.yml")
    (script,) = re.findall(r"^  polyfills: \[(\S+)\]$", config, re.M)
    assert (ROOT / script).name == "iframe-worker.js", "the name that the plugin looks for"
    assert (ROOT / script).is_file()
    assert "\n  - search\n  - offline" in config
    assert "use_directory_urls: false" in config


def test_every_document_is_in_the_sites_navigation() -> None:
    """A page that nothing leads to is not read."""
    listed = re.findall(r"(?:: |- )(\S+\.md)$", text_of("mkdocs.yml").split("\nnav:")[1], re.M)
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(str(path.relative_to(ROOT)) for path in files)


def test_ci_runs_what_the_readme_says() -> None:
    """The README's two commands, and whatever its test command leaves out."""
    script = text_of(".ci/run")
    lines = [line for line in script.splitlines() if line and not line.startswith("#")]
    assert lines[2:] == ['make test "$@"', 'make test-rest "$@"']
    commands = re.findall(r"run: (make \w+|.ci/run)", text_of(".github/workflows/ci.yml"))
    assert commands == ["make demo", ".ci/run"]
    assert re.findall(r"^(make \w+) ", text_of("README.md"), re.M) == ["make demo", "make test"]


def test_the_workflow_has_the_versions_that_the_package_names() -> None:
    """Each Python in the classifiers is tried."""
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert re.findall(r'"(3\.\d+)"', text_of(".github/workflows/ci.yml")) == named
    assert project["requires-python"] == f">={named[0]}"


def test_the_version_is_in_one_place() -> None:
    """The build takes it from the package."""
    settings = tomllib.loads(text_of("pyproject.toml"))
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["hatch"]["version"]["path"] == "src/forebay/__init__.py"
    assert f'__version__ = "{forebay.__version__}"' in text_of("src/forebay/__init__.py")
