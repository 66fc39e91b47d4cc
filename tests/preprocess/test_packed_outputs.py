"""out.pack: many small outputs in few tar files, for the ledger, the table and other readers."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
from driving import here, table
from packing import members, opened, pack_lines, pack_unless_bad, shards

import forebay
from forebay.base.output_names import shard_name
from forebay.errors import FailuresError, InputError, OptionError, OutputError
from forebay.ledger.ledger import Ledger
from forebay.ledger.names import recorded_members
from forebay.outputs.shards import _Reader, complete_shards
from forebay.runs.preprocess import retry

pytestmark = pytest.mark.usefixtures("readers_closed")


@pytest.fixture
def inputs(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"a{number}\nb{number}\n")
    return folder


LINES = {
    f"{number}/{at}.txt": f"{'ab'[at]}{number}".encode() for number in range(6) for at in (0, 1)
}


def run(work, inputs, output, **options):
    options = {"num_workers": 0, "progress": False, "on_error": "skip", **options}
    return forebay.preprocess(work, inputs, output, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"backend": "thread"}], ids=["processes", "threads"])
def test_members_are_byte_for_byte_what_was_packed(tmp_path, inputs, options):
    """In tar files, by the index, and in a table that does not depend on the workers."""
    output = tmp_path / "out"
    report = run(pack_lines, inputs, output, num_workers=2, **options)
    assert (report.done, report.failed) == (6, 0)
    assert members(output) == LINES
    assert opened(output, LINES) == LINES
    rows = report.metadata.to_pylist()
    assert [row["destination"] for row in rows] == [f"packed/{name}" for name in LINES]
    assert [row["number"] for row in rows] == [0, 1] * 6
    run(pack_lines, inputs, tmp_path / "one")
    assert table(tmp_path / "one") == table(output)
    assert not (output / ".forebay" / "packed").exists()


def test_a_copied_shard_is_on_the_disk_before_the_ledger_names_it(tmp_path, inputs):
    """Or a power cut would lose what was in it: the ledger is on the disk with each transaction."""
    output = tmp_path / "out"
    run(pack_lines, inputs, output)
    on_disk = {path.name for path in output.rglob("*.tar")}
    with Ledger.open(output / ".forebay") as ledger:
        with ledger.transaction() as db:
            db.execute("UPDATE inputs SET outputs = '[]' WHERE ordinal = 1")  # this leaves a gap

        def flush():
            nonlocal on_disk
            assert {shard_name(member.shard) for _, member in recorded_members(ledger)} <= on_disk
            on_disk = {path.name for path in output.rglob("*.tar")}

        complete_shards(ledger, str(output), flush)
    assert shards(output) == ["00001.tar"]


def test_an_output_is_read_while_a_run_replaces_its_shard(tmp_path, inputs, monkeypatch):
    """The run ends between the look into the index and that into the shard, which is gone then."""
    output, read = tmp_path / "out", _Reader.read
    run(pack_lines, inputs, output)

    def read_too_late(reader, member):
        monkeypatch.undo()
        (inputs / "0.txt").write_text("changed")
        run(pack_lines, inputs, output)
        return read(reader, member)

    monkeypatch.setattr(_Reader, "read", read_too_late)
    assert opened(output, ["1/0.txt"]) == {"1/0.txt": b"a1"}
    assert "00000.tar" not in shards(output)


def test_tar_itself_has_no_complaint(tmp_path, inputs):
    """It lists and extracts the members without a warning."""
    run(pack_lines, inputs, tmp_path / "out")
    (shard,) = (tmp_path / "out" / "packed").glob("*.tar")
    listed = subprocess.run(["tar", "tf", shard], capture_output=True, text=True, check=True)
    assert (listed.stdout.split(), listed.stderr) == (list(LINES), "")


NAMES = {
    "100 characters": "x" * 100,
    "101 characters": "x" * 101,
    "deep": "/".join("abcdefgh" * 9),
    "not ASCII": "Ärger/naïve ☃.txt",
    "long and not ASCII": "☃" * 300,
    "a line break": "a\nb",
    "with a space in front": " a",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_any_unicode_name_is_a_member(tmp_path, inputs, name):
    """Long ones and others have an extended header, which is read as any is."""

    def work(source, out):
        if source.name == "0.txt":
            assert out.pack(name, b"data") == f"packed/{name}"

    run(work, inputs, tmp_path / "out")
    assert members(tmp_path / "out") == {name: b"data"}
    assert opened(tmp_path / "out", [name]) == {name: b"data"}


DATA = {
    "nothing": b"",
    "a block": b"x" * 512,
    "a block and a byte": b"x" * 513,
    "a bytearray": bytearray(b"abc"),
    "an array": np.arange(6, dtype="<i2").reshape(2, 3),
    "columns of an array": np.arange(6, dtype="<i2").reshape(2, 3)[:, ::2],
    "more than is held in memory": b"0123456789" * 300_000,
}


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_any_buffer_is_data(tmp_path, inputs, data):
    """What is in it when `pack` is called."""
    expected = bytes(data) if isinstance(data, bytes | bytearray) else data.tobytes()

    def work(source, out):
        mine = bytearray(data) if isinstance(data, bytearray) else data
        out.pack(source.stem, mine)
        if isinstance(mine, bytearray):
            mine[:] = b"later"

    run(work, inputs, tmp_path / "out")
    assert members(tmp_path / "out") == {str(number): expected for number in range(6)}


def test_a_member_beyond_8_gib_has_its_size_in_an_extended_header():
    """Only the header is made: the data would be too large for a test."""
    from forebay.outputs.shard_writer import header, header_bytes

    for size in (8**11 - 1, 8**11, 8**12 + 5):
        head = header("large", size)
        assert len(head) == header_bytes("large", size)
        assert tarfile.TarFile(fileobj=io.BytesIO(head)).next().size == size


REFUSED = {
    "absolute": ("/a", b"", "would leave"),
    "above": ("../a", b"", "would leave"),
    "above, later": ("a/../../b", b"", "would leave"),
    "empty": ("", b"", "not the name of a file"),
    "a NUL": ("a\0b", b"", "NUL"),
    "not Unicode": ("a\udcff", b"", "UTF-8"),
    "a shard": ("00000.tar", b"", "reserved"),
    "the index": ("./index.sqlite", b"", "reserved"),
    "a string as data": ("a", "text", "takes bytes"),
    "a number as data": ("a", 5, "takes bytes"),
}


@pytest.mark.parametrize(("name", "data", "words"), REFUSED.values(), ids=REFUSED)
def test_what_no_member_can_be_is_an_error(tmp_path, inputs, name, data, words):
    """Its input fails, with a message that names it, and nothing of it is kept."""

    def work(source, out):
        out.pack("fine", b"fine")
        out.pack(name, data)

    report = run(work, [inputs / "0.txt"], tmp_path / "out", retries=0)
    (failure,) = report.failures
    assert words in failure.message
    assert members(tmp_path / "out") == {}


def test_misuse_within_an_input_is_an_error(tmp_path, inputs):
    """The same name twice, metadata given twice, a destination, a file in the folder of shards."""

    def work(source, out):
        match source.stem:
            case "0":
                out.pack("a", b"1")
                out.pack("./a", b"2")
            case "1":
                out.pack("b", b"", number=1)
                return {"number": 2}
            case "2":
                out.pack("c", b"", destination="d")
            case "3":
                out.file("packed/d")
            case "4":
                out.file("PACKED/00000.tar")
        return None

    report = run(work, inputs, tmp_path / "out", retries=0)
    words = ["before", "too", "leave it out", "reserved", "reserved"]
    messages = [failure.message for failure in report.failures]
    assert len(messages) == len(words)
    assert all(word in message for word, message in zip(words, messages, strict=True))


def test_rows_come_from_pack_or_from_the_function(tmp_path, inputs):
    """A destination is filled in for a single output, packed or not; files stand before members."""

    def work(source, out):
        match source.stem:
            case "0":
                out.pack("zero", b"", number=0)
                out.file("file").write_text("")
            case "1":
                out.pack("one", b"")
                return {"number": 1}
            case "2":
                return [{"destination": out.pack(name, b""), "number": 2} for name in ("x", "y")]
            case "3":
                out.pack("three", b"")
        return None

    report = run(work, inputs, tmp_path / "out")
    rows = [(row["destination"], row["number"]) for row in report.metadata.to_pylist()]
    assert rows[:2] == [("file", None), ("packed/zero", 0)]
    assert rows[2:5] == [("packed/one", 1), ("packed/x", 2), ("packed/y", 2)]
    assert rows[5:] == [("packed/three", None), (None, None), (None, None)]


def test_an_input_that_fails_leaves_nothing_in_the_shard(tmp_path, inputs):
    """Neither a small one nor one that was written already; a retry packs again."""
    (inputs / "1.txt").write_text("bad")
    (inputs / "3.txt").write_text("bad and large")
    report = run(pack_unless_bad, inputs, tmp_path / "out", retries=2)
    assert (report.done, report.failed) == (4, 2)
    assert sorted(members(tmp_path / "out")) == ["0.txt", "2.txt", "4.txt", "5.txt"]
    (shard,) = (tmp_path / "out" / "packed").glob("*.tar")
    assert shard.stat().st_size == 4 * 1024 + 1024
    (inputs / "1.txt").write_text("good")
    report = retry(pack_unless_bad, tmp_path / "out", num_workers=0, progress=False)
    assert (report.done, report.failed) == (5, 1)
    assert members(tmp_path / "out")["1.txt"] == b"good"


def test_two_inputs_that_claim_one_name_both_fail(tmp_path, inputs):
    """Nothing of either is in a shard, before or after the other inputs are done."""

    def work(source, out):
        out.pack(f"own {source.stem}", source.read_bytes())
        out.pack("same" if source.stem in "25" else source.stem, b"")

    output = tmp_path / "out"
    report = run(work, inputs, output)
    assert (report.done, report.failed) == (4, 2)
    assert "claimed by two inputs" in report.failures[0].message
    expected = {name for number in "0134" for name in (f"own {number}", number)}
    assert set(members(output)) == expected
    assert opened(output, expected) == members(output)


@pytest.mark.parametrize("changed", ["0", "2", "5"], ids=["first", "between", "last"])
def test_a_changed_input_replaces_its_members(tmp_path, inputs, changed):
    """Its shard is written again without the old ones; the others have another place there."""
    output = tmp_path / "out"
    run(pack_lines, inputs, output)
    assert shards(output) == ["00000.tar"]
    (inputs / f"{changed}.txt").write_text("new\n")
    report = run(pack_lines, inputs, output)
    expected = {name: data for name, data in LINES.items() if not name.startswith(changed)}
    expected[f"{changed}/0.txt"] = b"new"
    assert members(output) == expected
    assert opened(output, expected) == expected
    assert shards(output) == ["00001.tar", "00002.tar"]
    assert report.resumed == 5
    with pytest.raises(InputError, match="there is no output"):
        forebay.open_output(output / "packed" / changed / "1.txt")


def test_an_input_that_is_gone_keeps_its_members(tmp_path, inputs):
    """As it keeps its files; when it comes back, it is done."""
    output = tmp_path / "out"
    run(pack_lines, inputs, output)
    (inputs / "2.txt").rename(tmp_path / "2.txt")
    run(pack_lines, inputs, output)
    assert members(output) == LINES
    (tmp_path / "2.txt").rename(inputs / "2.txt")
    assert run(pack_lines, inputs, output).resumed == 6
    assert (members(output), shards(output)) == (LINES, ["00000.tar"])


def test_starting_over_removes_the_shards(tmp_path, inputs):
    """With resume=False, whether the function packs again or not; other files stay."""
    output = tmp_path / "out"
    run(pack_lines, inputs, output)
    (output / "packed" / "mine").write_text("mine")
    run(pack_lines, inputs, output, resume=False)
    assert members(output) == LINES
    run(lambda _, __: None, inputs, output, resume=False)
    assert os.listdir(output / "packed") == ["mine"]


def test_a_second_run_with_nothing_to_do_changes_nothing(tmp_path, inputs):
    """Neither the shards nor the index are written again."""
    output = tmp_path / "out"
    run(pack_lines, inputs, output)
    before = {path: path.stat().st_mtime_ns for path in (output / "packed").iterdir()}
    assert run(pack_lines, inputs, output).resumed == 6
    assert {path: path.stat().st_mtime_ns for path in (output / "packed").iterdir()} == before


def test_shards_are_closed_at_a_size(tmp_path, inputs):
    """The members of one input are never divided."""
    output = tmp_path / "out"
    run(pack_lines, inputs, output, shard_bytes=3000)
    assert shards(output) == ["00000.tar", "00001.tar", "00002.tar"]
    assert members(output) == LINES
    for bad in (0, -1, 1.5, True, "1"):
        with pytest.raises(OptionError, match="shard_bytes"):
            run(pack_lines, inputs, output, shard_bytes=bad)


def test_the_command_line_names_the_size_of_shards(tmp_path, inputs):
    """As `shard_bytes` does."""
    work, output = f"{Path(__file__).with_name('packing.py')}:pack_lines", tmp_path / "out"
    settings = ("--num-workers", 1, "--shard-bytes", 3000, "--quiet")
    code, _, err = here("preprocess", work, inputs, output, *settings)
    assert code == 0, err
    assert len(shards(output)) == 3
    assert members(output) == LINES


def test_what_lies_in_the_way_stays(tmp_path, inputs):
    """A shard gets another number; an index, or a link, is an error that loses nothing."""
    output = tmp_path / "out"
    (output / "packed").mkdir(parents=True)
    (output / "packed" / "00004.tar").write_text("mine")
    run(pack_lines, inputs, output)
    assert (output / "packed" / "00004.tar").read_text() == "mine"
    assert shards(output) == ["00004.tar", "00005.tar"]
    (output / "packed" / "00004.tar").unlink()
    assert members(output) == LINES
    for name in ("index", "link"):
        other = tmp_path / name
        other.mkdir()
        if name == "index":
            (other / "packed").mkdir()
            (other / "packed" / "index.sqlite").write_text("mine")
        else:
            (other / "packed").symlink_to(tmp_path)
        with pytest.raises(OutputError, match=r"no run recorded|is a link"):
            run(pack_lines, inputs, other)
        if name == "index":
            assert (other / "packed" / "index.sqlite").read_text() == "mine"
            (other / "packed" / "index.sqlite").unlink()
        else:
            (other / "packed").unlink()
        assert run(pack_lines, inputs, other).resumed == 6
        assert members(other) == LINES


def test_a_url_as_output_is_refused_with_the_first_input(memory, machine, inputs):
    """out.pack needs a local folder, and says so."""
    with pytest.raises(FailuresError, match="the output is a URL"):
        run(pack_lines, [inputs / "0.txt"], "memory://out", retries=0, max_failures=0)


def test_pack_after_the_end_of_the_input_is_an_error(tmp_path, inputs):
    """Its member would be another input's."""
    outs, errors = [], []

    def work(source, out):
        for other in outs:
            with pytest.raises(OutputError, match="after its input had ended") as error:
                other.pack("late", b"")
            errors.append(error)
        outs.append(out)
        out.pack(source.stem, b"")

    run(work, inputs, tmp_path / "out")
    assert len(errors) == 15
    assert len(members(tmp_path / "out")) == 6


def test_a_dataset_reads_packed_outputs_by_the_table(tmp_path, inputs):
    """from_table gives a path that `open_output` opens, as it opens one of a file."""

    def work(source, out):
        if source.stem == "0":
            out.file("0").write_bytes(b"in a file")
            return
        out.pack(source.stem, source.read_bytes())

    def load(row):
        with forebay.open_output(row["destination"]) as file:
            return file.read()

    run(work, inputs, tmp_path / "out")
    dataset = forebay.from_table(tmp_path / "out", load)
    assert list(dataset) == [
        b"in a file",
        *((inputs / f"{k}.txt").read_bytes() for k in range(1, 6)),
    ]


def test_loaders_and_workers_read_packed_outputs(tmp_path, inputs):
    """Each worker process has readers of its own, whatever the trainer had open."""

    def load(row):
        with forebay.open_output(row["destination"]) as file:
            return file.read().decode()

    run(pack_lines, inputs, tmp_path / "out")
    dataset = forebay.from_table(tmp_path / "out", load)
    expected = [data.decode() for data in LINES.values()]
    assert list(dataset) == expected
    loader = forebay.DataLoader(dataset, batch_size=4, num_workers=2)
    assert [text for batch in loader for text in batch] == expected


def test_the_next_step_notices_that_a_member_changed(tmp_path, inputs):
    """By its content: one that only moved is the same."""
    first, second = tmp_path / "first", tmp_path / "second"

    def copy(row, out):
        with forebay.open_output(row["destination"]) as file:
            out.pack(f"{Path(row['source']).stem}.copy", file.read())

    run(pack_unless_bad, inputs, first)
    run(copy, first, second)
    assert members(second)["2.copy"] == b"a2\nb2\n"
    (inputs / "2.txt").write_text("c2\nd2\n")  # a row with the same metadata
    run(pack_unless_bad, inputs, first)
    report = run(copy, first, second)
    assert report.resumed == 5
    assert members(second)["2.copy"] == b"c2\nd2\n"


def test_verify_finds_lost_members(tmp_path, inputs):
    """Those of a shard that is missing, or was cut, are processed again."""
    from click.testing import CliRunner

    from forebay.cli import cli

    def verify():
        result = CliRunner().invoke(cli, ["verify", str(output)], standalone_mode=False)
        assert result.exception is None
        return result.return_value, result.output

    output = tmp_path / "out"
    run(pack_lines, inputs, output, shard_bytes=3000)
    code, said = verify()
    assert (code, said) == (0, "12 outputs checked: 0 missing, 0 altered, 0 orphans\n")
    (output / "packed" / "00000.tar").unlink()
    os.truncate(output / "packed" / "00001.tar", 1200)
    (output / "packed" / "mine.tar").write_text("")
    code, said = verify()
    assert "12 outputs checked: 7 missing, 0 altered, 1 orphan\n4 inputs will be redone" in said
    (output / "packed" / "mine.tar").unlink()
    run(pack_lines, inputs, output)
    assert members(output) == LINES
    assert verify()[0] == 0


def test_a_missing_shard_is_an_error_that_says_what_to_do(tmp_path, inputs):
    """When shards are completed, and when an output is opened."""
    output = tmp_path / "out"
    run(pack_lines, inputs, output)
    (output / "packed" / "00000.tar").unlink()
    with pytest.raises(InputError, match="forebay verify"):
        forebay.open_output(output / "packed" / "0" / "0.txt")
    (inputs / "new.txt").write_text("new")
    with pytest.raises(OutputError, match="forebay verify"):
        run(pack_lines, inputs, output)


def test_a_copy_of_the_table_and_the_shards_is_enough(tmp_path, inputs):
    """The ledger is not needed to read them."""
    run(pack_lines, inputs, tmp_path / "out")
    (tmp_path / "copy").mkdir()
    shutil.copytree(tmp_path / "out" / "packed", tmp_path / "copy" / "packed")
    assert opened(tmp_path / "copy", LINES) == LINES


def test_a_full_disk_in_the_midst_of_packing_stops_the_run(tmp_path, inputs, monkeypatch):
    """No input is blamed; the next run continues, and nothing of the interrupted one is left."""
    pwrite, full = os.pwrite, [True]

    def fill(descriptor, data, at):
        if at == 4096 and full:  # the third input
            full.clear()
            pwrite(descriptor, bytes(data)[:100], at)
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", fill)
    output = tmp_path / "out"
    with pytest.raises(OutputError, match="can no longer be written"):
        run(pack_lines, inputs, output)
    report = run(pack_lines, inputs, output)
    assert (report.done, report.failed, report.resumed) == (6, 0, 2)
    assert members(output) == LINES


@pytest.mark.slow
def test_an_abandoned_thread_writes_to_no_published_shard(tmp_path, inputs):
    """It still has its shard open; the members of its earlier inputs are copied out of it."""
    go, gone = threading.Event(), threading.Event()

    def work(source, out):
        out.pack(source.stem, source.read_bytes())
        if source.stem == "2":
            go.wait()
            out.pack("late", b"late")
            gone.set()

    report = run(
        work, inputs, tmp_path / "out", backend="thread", num_workers=1, timeout=3.0, retries=0
    )
    assert (report.done, report.failed) == (5, 1)
    expected = {k: (inputs / f"{k}.txt").read_bytes() for k in "01345"}
    try:
        assert members(tmp_path / "out") == expected
    finally:
        go.set()
    assert gone.wait(60)
    await_threads()
    assert members(tmp_path / "out") == expected
    assert opened(tmp_path / "out", expected) == expected


def await_threads():
    """Wait for all workers to end."""
    for thread in threading.enumerate():
        if thread.name.startswith("forebay-worker"):
            thread.join(60)
            assert not thread.is_alive()
