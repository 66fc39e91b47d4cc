"""The rows of a large Parquet manifest that did not change are not compared again."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import forebay
from forebay.errors import InputError
from forebay.inputs import manifests
from forebay.ledger import ledger as ledgers
from forebay.ledger.snapshot import read_failures
from forebay.runs import run as runs_run
from forebay.runs.preprocess import retry

CALLED: list[str] = []


def work(row, out):
    """Write a file for a few rows; fail for some."""
    CALLED.append(row["name"])
    if row["name"].startswith("bad"):
        raise ValueError("a bad one")
    if row["name"].startswith("file"):
        out.file(f"{row['label']}.txt").write_text(row["name"])
    return {"length": len(row["name"])}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Manifests of four rows are large."""
    monkeypatch.setattr(manifests, "MANY_ROWS", 4)
    monkeypatch.setattr(runs_run, "AHEAD", 20)


@pytest.fixture
def manifest(tmp_path):
    return tmp_path / "m.parquet"


def write(target, names, labels=None, **columns):
    labels = [*range(len(names))] if labels is None else labels
    table = pyarrow.table({"name": names, "label": labels, **columns})
    pyarrow.parquet.write_table(table, target, row_group_size=3)


def run(inputs, output, function=work, **options):
    """Return the report, and the rows for which the function was called."""
    CALLED.clear()
    report = forebay.preprocess(function, inputs, output, num_workers=0, progress=False, **options)
    return report, [*CALLED]


NAMES = ["a", "file b", "c", "bad d", "e", "f", "file g", "h"]


def test_the_table_is_the_same_and_failures_are_named(tmp_path, manifest, monkeypatch):
    """Byte for byte, whether the manifest is large or not."""
    write(manifest, NAMES)
    report, called = run(manifest, tmp_path / "out")
    assert (report.done, report.failed) == (7, 1)
    assert set(called) == {*NAMES}
    assert [each.source for each in report.failures] == ['{"name":"bad d","label":3}']
    assert [*read_failures(tmp_path / "out" / ".forebay")] == [*report.failures]
    monkeypatch.setattr(manifests, "MANY_ROWS", 100)
    run(manifest, tmp_path / "small")
    tables = [tmp_path / name / "metadata.parquet" for name in ("out", "small")]
    assert tables[0].read_bytes() == tables[1].read_bytes()


def test_a_run_that_was_interrupted_reads_on_where_it_was(tmp_path, manifest, monkeypatch):
    """The rows that are done are not read again before the first input is worked on."""
    write(manifest, [str(each) for each in range(40)])

    def interrupted(row, out):
        if row["name"] == "20":
            raise KeyboardInterrupt
        return work(row, out)

    with pytest.raises(KeyboardInterrupt):
        run(manifest, tmp_path / "out", interrupted, version="1")
    starts = []
    real = manifests.Manifest.inputs

    def watched(self, first=1, **options):
        starts.append(first)  # once the first of its rows is wanted
        yield from real(self, first, **options)

    monkeypatch.setattr(ledgers, "READ_ON", 4)
    monkeypatch.setattr(manifests.Manifest, "inputs", watched)
    report, called = run(manifest, tmp_path / "out", version="1")
    assert (report.done, called) == (40, [str(each) for each in range(20, 40)])
    assert starts[0] > 20
    again, called = run(manifest, tmp_path / "out", version="1")
    assert (again.resumed, called) == (40, [])


CHANGES = {
    "sorted": [*reversed(NAMES)],
    "one fewer": [each for each in NAMES if each != "c"],
    "one more": [*NAMES, "i"],
    "one in the midst": [*NAMES[:3], "new", *NAMES[3:]],
    "one changed": [*NAMES[:4], "other", *NAMES[5:]],
}


@pytest.mark.slow
@pytest.mark.parametrize("names", CHANGES.values(), ids=CHANGES.keys())
def test_a_manifest_that_changed_is_compared_row_by_row(tmp_path, manifest, names, monkeypatch):
    """What was done for a row stays done wherever the row is now, as in a small manifest."""
    labels = {name: at for at, name in enumerate([*NAMES, "i", "new", "other"])}
    seen = []
    for limit, output in ((4, tmp_path / "out"), (100, tmp_path / "small")):
        monkeypatch.setattr(manifests, "MANY_ROWS", limit)
        write(manifest, NAMES)
        run(manifest, output)
        write(manifest, names, [labels[each] for each in names])
        report, called = run(manifest, output)
        seen.append((report.done, sorted(called), (output / "metadata.parquet").read_bytes()))
    assert seen[0] == seen[1]
    assert set(seen[0][1]) == {*names} - {*NAMES} | {"bad d"}


@pytest.mark.parametrize("first", ["manifest", "table"])
def test_the_same_rows_are_the_same_inputs_however_they_are_read(tmp_path, manifest, first):
    """In a file or in a table in memory: nothing is done twice."""
    write(manifest, NAMES)
    ways = [manifest, pyarrow.parquet.read_table(manifest)]
    if first == "table":
        ways.reverse()
    for at, inputs in enumerate([*ways, *ways]):
        report, called = run(inputs, tmp_path / "out")
        assert report.done == 7
        assert at == 0 or {*called} == {"bad d"}
    assert report.failures[0].source == '{"name":"bad d","label":3}'


def test_rows_that_name_files_are_compared_with_them(tmp_path, manifest):
    """A file that changed is another input, although the manifest is the same."""
    paths = [tmp_path / f"{each}.txt" for each in range(6)]
    for path in paths:
        path.write_text("x")
    write(manifest, [path.name for path in paths], path=[str(path) for path in paths])
    assert run(manifest, tmp_path / "out")[0].done == 6
    assert run(manifest, tmp_path / "out")[1] == []
    paths[4].write_text("longer")
    assert run(manifest, tmp_path / "out")[1] == ["4.txt"]


def test_a_conflict_names_the_rows(tmp_path, manifest):
    """Two rows that write one file both fail, and each message shows the other's row."""
    write(manifest, ["file a", "b", "c", "d", "file e"], [7, 1, 2, 3, 7])
    report, _ = run(manifest, tmp_path / "out")
    assert report.failed == 2
    first, second = report.failures
    assert first.source == '{"name":"file a","label":7}'
    assert 'this one and {"name":"file e","label":7}\n' in first.message
    assert 'this one and {"name":"file a","label":7}\n' in second.message


def test_a_row_that_is_listed_twice_is_shown(tmp_path, manifest):
    """And at which positions it is."""
    write(manifest, ["a", "b", "c", "b"], [1, 2, 3, 2])
    with pytest.raises(InputError, match=r'row {"name":"b","label":2} is listed twice: .* 2 and 4'):
        run(manifest, tmp_path / "out")
    write(manifest, ["a", "b", "c", "d"], [1, 2, 3, 2])
    run(manifest, tmp_path / "out")
    write(manifest, ["a", "c", "b", "b"], [1, 3, 2, 2])
    with pytest.raises(InputError, match=r'row {"name":"b","label":2} is listed twice: .* 3 and 4'):
        run(manifest, tmp_path / "out")


def test_retry_needs_no_manifest(tmp_path, manifest):
    """The ledger has the rows that failed."""
    write(manifest, NAMES)
    table = run(manifest, tmp_path / "out")[0].metadata_path
    before = Path(table).read_bytes()
    manifest.unlink()
    CALLED.clear()
    assert retry(work, tmp_path / "out", num_workers=0, progress=False).done == 7
    assert (CALLED[0], Path(table).read_bytes()) == ("bad d", before)


def test_a_manifest_that_is_replaced_during_the_run_is_compared_by_the_next(tmp_path, manifest):
    """The run ends with the rows that it listed."""
    write(manifest, NAMES)

    def changing(row, out):
        if row["name"] == "e":
            other = manifest.with_name("other.parquet")
            write(other, [*reversed(NAMES), "i"], [*reversed(range(8)), 8])
            other.replace(manifest)
        return work(row, out)

    assert run(manifest, tmp_path / "out", changing, version="1")[0].done == 7
    report, called = run(manifest, tmp_path / "out", version="1")
    assert (report.done, {*called}) == (8, {"bad d", "i"})
    sources = report.metadata["name"].to_pylist()
    assert sources == [each for each in [*reversed(NAMES), "i"] if each != "bad d"]


def test_a_manifest_copied_to_another_place_is_the_same(tmp_path, manifest):
    """Its rows are, so nothing is done again."""
    write(manifest, NAMES)
    run(manifest, tmp_path / "out")
    other = tmp_path / "other.parquet"
    other.write_bytes(manifest.read_bytes())
    os.utime(other, (1, 1))
    assert {*run(other, tmp_path / "out")[1]} == {"bad d"}
