"""The site, the continuous integration and the version agree with the repository."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
import types
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
    alone = {"torchtitan.PackedLoader"}  # imported by those who have torchtitan
    public = {*forebay.__all__, *collating, *received, *formats, *alone}
    public -= {"collate"}
    assert sorted(found) == sorted(public)


def test_the_site_needs_no_server_and_nothing_from_elsewhere() -> None:
    """The search has its index in a script, and what runs it in a frame is the site's own."""
    config = text_of("mkdocs.yml")
    (script,) = re.findall(r"^  polyfills: \[(\S+)\]$", config, re.M)
    assert (ROOT / script).name == "iframe-worker.js", "the name that the plugin looks for"
    assert (ROOT / script).is_file()
    assert "\n  - search\n  - offline" in config
    assert "use_directory_urls: false" in config
    assert "mermaid" not in config  # diagrams whose script comes from a server
    # The theme's script finds a link to a repository by this, and asks its host for stars.
    link = '<a href="https://github.com/a/b" class="md-source" data-md-component="source">'
    on_post_page = runpy.run_path(str(ROOT / ".ci" / "site.py"))["on_post_page"]
    assert on_post_page(link) == '<a href="https://github.com/a/b" class="md-source">'


def test_every_document_is_in_the_sites_navigation() -> None:
    """A page that nothing leads to is not read."""
    listed = re.findall(r"(?:: |- )(\S+\.md)$", text_of("mkdocs.yml").split("\nnav:")[1], re.M)
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    files += ROOT.glob("packages/*/README.md")
    assert sorted(listed) == sorted(str(path.relative_to(ROOT)) for path in files)


def test_a_page_is_the_front_of_its_tab_only_where_that_is_meant() -> None:
    """The builder leaves a README or index out of a tab's list, if it is the first in it."""
    navigation = text_of("mkdocs.yml").split("\nnav:")[1]
    fronts = re.findall(r"- (.*(?:README|index)\.md)$", navigation, re.M)
    first, last = "docs/reference/index.md", "docs/benchmarks/index.md"
    package = "resume-check: packages/resume-check/README.md"
    assert fronts == ["README.md", "All pages: docs/index.md", first, package, last]


def test_ci_runs_what_the_readme_says() -> None:
    """The README's two commands, and whatever its test command leaves out."""
    script = text_of(".ci/run")
    lines = [line for line in script.splitlines() if line and not line.startswith("#")]
    assert lines[2:] == ['make test "$@"', 'make test-rest "$@"']
    commands = re.findall(r"run: (make \w+|\.ci/\w+)", text_of(".github/workflows/ci.yml"))
    assert commands == ["make demo", ".ci/run", "make check", ".ci/wheel", ".ci/matrix"]
    assert re.findall(r"^(make \w+) ", text_of("README.md"), re.M) == ["make demo", "make test"]


def test_the_workflow_has_the_versions_that_the_package_names() -> None:
    """Each Python in the classifiers is tried, with all tests and with the wheel."""
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    tests, wheel = re.findall(r"python: \[(.*)\]", text_of(".github/workflows/ci.yml"))
    tried = re.findall(r"3\.\d+", tests)
    assert {*named} <= {*tried}, "a version is named once it was tried"
    assert re.findall(r"3\.\d+", wheel) == tried[1:], "`make check` tries the first one's"
    assert project["requires-python"] == f">={named[0]}"


def test_the_workflow_runs_every_column_of_the_matrix() -> None:
    """And of torch the oldest version that is allowed, and one between that and the newest."""
    (columns,) = re.findall(r"column: \[(.*?)\]", text_of(".github/workflows/ci.yml"), re.S)
    (all_columns,) = re.findall(r"^all=\((.*?)\)", text_of(".ci/matrix"), re.M | re.S)
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    (oldest,) = re.findall(r"torch>=(\S+)", " ".join(project["dependencies"]))
    named = columns.replace(",", " ").split()
    assert named == [f"torch=={oldest}.0", "torch==2.8.0", *all_columns.split()]


def test_the_version_is_in_one_place() -> None:
    """The build takes it from the package."""
    settings = tomllib.loads(text_of("pyproject.toml"))
    assert "version" in settings["project"]["dynamic"]
    assert settings["tool"]["hatch"]["version"]["path"] == "src/forebay/__init__.py"
    assert f'__version__ = "{forebay.__version__}"' in text_of("src/forebay/__init__.py")


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch):
    """Return what makes the links of the package's page; the build has its base class, not we."""
    name = "hatchling.metadata.plugin.interface"
    interface = types.ModuleType(name)
    interface.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, name, interface)
    return runpy.run_path(str(ROOT / "hatch_build.py"))


def test_links_of_the_packages_page_begin_with_the_repositorys_address(hook) -> None:
    """Those to files; what leads elsewhere already, or to a heading of the page, stays."""
    text = "![a](b.svg) [c\n](d/e.md#f) [g](#h) [i](https://j/k) `x[0](y z)`"
    assert hook["absolute"](text, "https://host/me", "v1") == (
        "![a](https://host/me/raw/v1/b.svg) [c\n](https://host/me/blob/v1/d/e.md#f) "
        "[g](#h) [i](https://j/k) `x[0](y z)`"
    )


def test_every_link_of_the_readme_is_made_absolute(hook) -> None:
    """Otherwise it would lead nowhere there."""
    text = hook["absolute"](text_of("README.md"), "https://host/me/forebay", "HEAD")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 20 and all(each.startswith(("https://", "#")) for each in links)


def test_there_is_one_place_for_the_repositorys_address() -> None:
    """The Makefile reads it there for the site, and the build for the package's page."""
    assert len(re.findall(r'^repository = "', text_of("pyproject.toml"), re.M)) == 1
    assert "repo_url: !ENV [FOREBAY_REPOSITORY" in text_of("mkdocs.yml")
    assert 's/^repository = "(.*)"$$/' in text_of("Makefile")


def test_what_is_for_agents_leads_to_files_that_exist(tmp_path) -> None:
    """llms.txt is no Markdown page of the site, so its links are looked at here: to files, in the
    repository; to pages of these files, on the site."""
    links = re.findall(r"\]\(([^)]+)\)", text_of("llms.txt"))
    assert links and all((ROOT / each).is_file() for each in links)
    build = runpy.run_path(str(ROOT / ".ci" / "site.py"))["on_post_build"]
    build({"config_file_path": str(ROOT / "mkdocs.yml"), "site_dir": str(tmp_path)})
    pages = re.findall(r"\]\(([^)]+)\)", (tmp_path / "llms.txt").read_text(encoding="utf-8"))
    wanted = [each.removesuffix(".md") + ".html" for each in links]
    assert pages == ["index.html" if each == "README.html" else each for each in wanted]
