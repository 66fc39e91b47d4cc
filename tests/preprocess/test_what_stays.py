"""What a user has stays: inputs that are away or touched, runs that begin anew, what is pruned."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from driving import here, make_inputs, published

import forebay
from forebay.errors import InputError
from forebay.runs import job

NAMES = [f"in/{number:04d}.txt" for number in range(6)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A current folder with six inputs in "in"; no work takes so long that these are hashed."""
    monkeypatch.setattr(job, "HASHED_AFTER_S", math.inf)
    monkeypatch.chdir(tmp_path)
    make_inputs(Path("in"), 6)


def copied(source: Path, out):
    """Copy an input; one that contains "bad" fails after it was read."""
    if isinstance(source, dict):
        source = Path(source.get("destination") or source["path"])
    text = source.read_text()
    with Path("calls").open("a") as file:
        file.write(f"{source.name}\n")
    if "bad" in text:
        raise ValueError("bad")
    out.file(source.name).write_text(text)
    return {"n": len(text)}


class Files:
    """Samples that are named after files, which are read only when one is taken."""

    def __len__(self):
        return len(NAMES)

    def __getitem__(self, index):
        return Path(NAMES[index])

    def source_of(self, index):
        return NAMES[index]


def saved(sample, out):
    """Write a sample of `Files`."""
    return copied(sample, out)


def run(inputs=NAMES, output="out", **options):
    return forebay.preprocess(copied, inputs, output, num_workers=0, progress=False, **options)


def calls():
    """The names of the inputs that were read since the last call."""
    path = Path("calls")
    names = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return names


def manifest(**options):
    Path("m.csv").write_text("path\n" + "".join(f"{each}\n" for each in NAMES))
    return run("m.csv", **options)


WAYS = {
    "list": run,
    "manifest": manifest,
    "dicts": lambda **options: run([{"path": each} for each in NAMES], **options),
    "dataset": lambda **options: forebay.preprocess(
        Files(), output="out", save=saved, num_workers=0, progress=False, **options
    ),
    "bucket": lambda **options: run(output="memory://away/out", **options),
}


def test_objects_of_a_server_that_is_down_are_not_changed(memory, monkeypatch):
    """As for files: a store that answers with errors has the objects still."""
    urls, asked = [], []
    for number in range(30):
        urls.append(f"memory://bucket/{number}.txt")
        memory.pipe(urls[-1], b"text")
    run(urls)
    before = published(Path("out"))

    def down(*_, **__):
        asked.append(1)
        raise ConnectionError("down")

    with monkeypatch.context() as patched:
        patched.setattr(type(memory), "info", down)
        report = run(urls)
        assert (report.done, report.resumed, list(report.unseen)) == (30, 30, urls)
        assert len(asked) == 10, "a server that is down is not asked for each of its objects"
    memory.rm("memory://bucket", recursive=True)
    assert run(urls).resumed == 30
    assert published(Path("out")) == before


def test_an_input_that_was_never_processed_and_cannot_be_seen_fails():
    """There is nothing to keep."""
    run(NAMES[:3])
    report = run([*NAMES[:3], "in/gone.txt"])
    assert (report.done, report.failed, report.unseen) == (3, 1, ())
    assert "No such file" in report.failures[0].message


def test_a_step_repeated_without_the_outputs_of_the_step_before_keeps_its_own():
    """They may have been deleted to save space."""
    run(output="one")
    run("one", "two")
    for path in Path("one").glob("*.txt"):
        path.unlink()
    before = published(Path("two"))
    report = run("one", "two")
    assert (report.resumed, len(report.unseen)) == (6, 6)
    assert published(Path("two")) == before


@pytest.mark.parametrize("inputs", ["in", "in/*.txt"])
def test_a_folder_that_is_empty_or_missing_is_an_error_that_says_what_stays(inputs):
    """It may only be away, and its inputs cannot be listed."""
    run(inputs)
    before = published(Path("out"))
    os.rename("in", "away")
    for _ in range(2):
        with pytest.raises(InputError, match=r"(?s)in.*in 'out' stays as it is: 6 inputs done"):
            run(inputs)
        os.makedirs("in", exist_ok=True)
    with pytest.raises(InputError) as caught:
        run(inputs, "new")
    assert "stays" not in str(caught.value)
    assert published(Path("out")) == before


def touch(*names, ns=1_000_000_000):
    for name in names:
        os.utime(name, ns=(ns, ns))


def test_a_run_says_before_it_starts_how_much_changed_and_how(caplog):
    """Whether only the times did, as after a copy, an unzip or a clone."""
    run()
    touch(*NAMES)
    note = "6 of 6 inputs changed (only their times): each is done again"
    assert any(note in each for each in run().notes)
    assert note in caplog.text
    Path(NAMES[0]).write_text("more")
    assert any("1 of 6 inputs changed: each is" in each for each in run().notes)


@pytest.mark.parametrize("way", ["list", "manifest", "dataset"])
def test_a_touched_input_with_the_same_content_stays_done(way, monkeypatch):
    """Its hash was recorded when it was done; other content of the same size is done again."""
    monkeypatch.setattr(job, "HASHED_AFTER_S", 0.0)
    monkeypatch.setattr("forebay.inputs.contents._TIMES", 0)
    WAYS[way]()
    calls()
    text = Path(NAMES[1]).read_text()
    Path(NAMES[1]).write_text(text.upper())
    touch(*NAMES)
    report = WAYS[way]()
    assert (calls(), report.resumed) == (["0001.txt"], 5)
    assert Path("out", "0001.txt").read_text() == text.upper()
    assert len(report.notes) == 2
    assert "5 of 6" in report.notes[0]
    assert "1 of 6" in report.notes[1]
    touch(*NAMES, ns=2_000_000_000)
    assert WAYS[way]().resumed == 6
    assert calls() == []


def test_a_changed_input_that_fails_leaves_the_table_and_keeps_its_output_until_pruned():
    """The output is that of the earlier content, so no row has it."""
    run()
    Path(NAMES[0]).write_text("bad")
    report = run()
    assert (report.done, report.failed, report.metadata.num_rows) == (5, 1, 5)
    assert len(published(Path("out"))) == 6
    code, said, _ = here("verify", "out")
    assert (code, said.splitlines()[0]) == (
        3,
        "orphan   0000.txt: its input changed, and fails now",
    )
    assert here("prune", "out")[:2] == (
        0,
        "removed  0000.txt: its input changed, and fails now\nremoved 1 output (12 B)\n",
    )
    assert not Path("out", "0000.txt").exists()
    Path(NAMES[0]).write_text("good")
    assert (run().done, Path("out", "0000.txt").read_text()) == (6, "good")
    assert here("verify", "out")[0] == 0


@pytest.mark.parametrize("output", ["out", "memory://pruned/out"])
def test_outputs_of_inputs_that_are_no_longer_listed_are_counted_and_pruned(output, memory):
    """A glob over the folder would train on withdrawn data; the files of others stay."""
    run(output=output)
    run(NAMES[:4], output)
    code, said, _ = here("verify", output)
    assert code == 3
    assert said.splitlines() == [
        "orphan   0004.txt: its input is no longer listed",
        "orphan   0005.txt: its input is no longer listed",
        "4 outputs checked: 0 missing, 0 altered, 2 orphans",
        "2 orphans may be of another call, whose inputs the last one did not list: list the "
        "inputs of both in one call, or give each call a folder of its own",
    ]
    lines = [f"{{}}  000{each}.txt: its input is no longer listed" for each in (4, 5)]
    lines.append("{} 2 outputs (24 B)")
    wanted = [each.format("would remove") for each in lines]
    assert here("prune", output, "--dry-run")[1].splitlines() == wanted
    assert here("verify", output)[0] == 3
    assert here("prune", output)[1].splitlines() == [each.format("removed") for each in lines]
    assert here("verify", output)[0] == 0
    report = run(output=output)
    assert (report.done, report.resumed) == (6, 4)


def test_a_run_that_starts_over_removes_nothing_before_its_successor_is_there():
    """With the inputs away, all stays; what it does not replace goes at the end."""
    run(max_failures=99)
    before = published(Path("out"))
    os.rename("in", "away")
    report = run(redo="*", max_failures=99)
    assert (report.done, report.failed, len(report.unseen)) == (6, 0, 6)
    assert {*published(Path("out"))} == {*before}
    assert here("prune", "out")[:2] == (0, "removed 0 outputs (0 B)\n")
    assert {*published(Path("out"))} == {*before}
    os.rename("away", "in")
    assert run(NAMES[:4], redo="*", limit=2).done == 2
    assert {*published(Path("out"))} == {*before}
    report = run(NAMES[:4], metadata="csv")
    assert (report.done, report.resumed) == (4, 2)
    assert sorted(published(Path("out"))) == [f"{number:04d}.txt" for number in range(4)]
    assert not Path("out", "metadata.parquet").exists()


@pytest.mark.parametrize("redo", [None, "*"])
def test_what_names_no_file_is_never_said_to_be_away(redo):
    """Rows of numbers have nothing that could be seen, also after a run that started over."""

    def numbered(row, out):
        out.file(f"{row['x']}.txt").write_text("x")

    def again(**options):
        rows = [{"x": 1}, {"x": 2}]
        return forebay.preprocess(numbered, rows, "out", num_workers=0, progress=False, **options)

    again()
    again(redo=redo)
    report = again()
    assert (report.resumed, report.unseen, report.notes) == (2, (), ())


def test_outputs_that_are_lost_in_a_bucket_are_made_again(memory):
    """One listing of the bucket finds them."""
    run(output="memory://lost/out")
    memory.rm("/lost/out/0002.txt")
    calls()
    assert run(output="memory://lost/out").resumed == 5
    assert (calls(), memory.exists("/lost/out/0002.txt")) == (["0002.txt"], True)
