"""Twenty functions as people have them, run as they are, killed in the middle, and continued."""

from __future__ import annotations

from pathlib import Path

import functions_as_found as found
import pytest
from driving import here, published

import forebay

COUNT = 6

OF_FILES = (
    *("size_of_file", "count_words", "split_words", "transcribe", "convert_beside", "lines_of"),
    *("convert", "convert_joined", "resize", "copy", "frames", "pages", "stream", "to_store"),
    *("to_dataset", "to_shapes", "separate", "cut", "to_array", "call_tool"),
)
OF_ROWS = ("describe",)
OF_FOLDERS = ("to_volume", "copy_series")
ALL = (*OF_FILES, *OF_ROWS, *OF_FOLDERS)


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """Files, a manifest of them, and folders of files."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for number in range(COUNT):
        text = "".join(f"line {line} of {number}\n" for line in range(3))
        folder = Path("s", f"{number}")
        for path in (Path("in", f"{number}.txt"), folder / "a.dcm", folder / "b.dcm"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        rows.append(f'{{"path":"in/{number}.txt","label":{number}}}')
    Path("m.jsonl").write_text("\n".join(rows))


def inputs_of(name):
    return "m.jsonl" if name in OF_ROWS else "s/*/" if name in OF_FOLDERS else "in/*.txt"


def by_hand(name, folder):
    """Call the function in a loop, and return what it left in the folder."""
    folder.mkdir()
    work = getattr(found, name)
    if name not in OF_ROWS:
        sources = sorted(Path("s").iterdir() if name in OF_FOLDERS else Path("in").glob("*.txt"))
        takes_one = OF_FILES.index(name) < 6 if name in OF_FILES else False
        for source in sources:
            returned = work(source) if takes_one else work(source, folder)
            list(returned) if hasattr(returned, "__next__") else None
    return published(folder)


def run(name, output):
    return forebay.preprocess(
        getattr(found, name), inputs_of(name), output, num_workers=0, progress=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_function_runs_as_it_is(tmp_path, inputs, name):
    """Its files are those of a loop; its rows name files or folders that are there."""
    expected = by_hand(name, tmp_path / "by hand")
    report = run(name, "out")
    assert (report.done, report.failures) == (COUNT, ())
    assert published(tmp_path / "out") == expected
    assert here("verify", "out")[0] == 0
    rows = report.metadata.to_pylist()
    assert len(rows) >= COUNT
    for row in rows:
        if row["destination"] is not None:
            assert Path("out", row["destination"]).exists()
    # A dict of several files that are in no folder of their own names none of them.
    names_files = (bool(expected) and name != "pages") or name == "convert_beside"
    assert {row["destination"] is not None for row in rows} == {names_files}
    again = run(name, "out")
    assert (again.resumed, again.done) == (COUNT, COUNT)
