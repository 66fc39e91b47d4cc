"""Inputs and outputs that are URLs: in this process's memory, and in a bucket on loopback.

What a bucket's client keeps open it keeps for its process, so the runs against the bucket are
processes of their own, with process workers.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from driving import (
    PATIENCE_S,
    WORKS,
    await_no_processes,
    calls,
    finish,
    here,
    make_inputs,
    published,
    start,
    undisturbed_run,
)
from works import copy, fail_once, split

import forebay
from forebay.base.file_stores import Store
from forebay.cli import cli
from forebay.errors import BusyError, InputError, LedgerError, OptionError, OutputError
from forebay.ledger.ledger import Ledger
from forebay.ledger.lock import Holder
from forebay.outputs.ledger_copy import LEDGER, RUN, LedgerCopy, read_run

OUT = "memory://bucket/out"

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture
def inputs(tmp_path):
    return make_inputs(tmp_path / "in", 6, lines=2)


def run(work, inputs, output=OUT, **options):
    return forebay.preprocess(work, inputs, output, progress=False, **{"num_workers": 0, **options})


def objects(memory, folder="/bucket/out/"):
    """Return the objects of an output by name, the tables and forebay's own left out."""
    found = {name.removeprefix(folder): memory.cat(name) for name in memory.find(folder)}
    own = (".forebay/", "metadata.")
    return {name: body for name, body in found.items() if not name.startswith(own)}


def put_inputs(memory, count):
    for number in range(count):
        memory.pipe_file(f"/bucket/in/{number}.txt", f"text {number}".encode())


def command(*words):
    """Run a command in this process; return its exit code and what it printed."""
    result = CliRunner().invoke(cli, [str(word) for word in words], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


def tell(source: Path, out):
    out.file(source.name).write_bytes(source.read_bytes().upper())
    return {"path": str(source), "suffix": source.suffix, "text": source.read_text()}


# ---- outputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 3, "backend": "thread"}])
def test_a_bucket_gets_the_files_and_the_table_of_a_folder(memory, inputs, tmp_path, options):
    """The same names, the same bytes, the same table; the report reads it from its URL."""
    run(split, inputs, tmp_path / "local")
    report = run(split, inputs, **options)
    assert objects(memory) == published(tmp_path / "local")
    table = (tmp_path / "local" / "metadata.parquet").read_bytes()
    assert memory.cat("/bucket/out/metadata.parquet") == table
    assert report.metadata_path == f"{OUT}/metadata.parquet"
    assert report.metadata.num_rows == 12


def test_nothing_stays_on_the_local_disk_but_the_ledger(memory, inputs, tmp_path):
    """Scratch files, of outputs and of inputs, go when they are done with."""
    put_inputs(memory, 3)
    run(tell, ["memory://bucket/in/0.txt", "memory://bucket/in/1.txt"])
    names = {path.name for path in (tmp_path / "here").rglob("*") if path.is_file()}
    assert names <= {"ledger.sqlite", "ledger.sqlite-journal", "lock", "lock.1"}


def test_a_changed_input_is_redone_and_its_old_objects_go(memory, inputs):
    """What it made before is removed, whatever it is called."""
    run(split, inputs)
    (inputs / "0003.txt").write_text("a single line")
    run(split, inputs)
    assert objects(memory)["0003/0.txt"] == b"a single line"
    assert "0003/1.txt" not in objects(memory)


def test_a_restart_removes_what_was_there(memory, inputs):
    """With redo="*" the earlier objects go, and nothing of another's."""
    run(split, inputs)
    report = run(copy, inputs, redo="*")
    assert (report.done, report.resumed) == (6, 0)
    assert sorted(objects(memory)) == sorted(path.name for path in inputs.iterdir())


def test_an_input_that_fails_at_its_very_end_has_uploaded_nothing(memory, inputs):
    """Metadata that is not JSON-serializable is found before the files go up."""

    def bad(source, out):
        out.file(source.name).write_text("x")
        return {"bad": object()}

    assert run(bad, inputs).failed == 6
    assert objects(memory) == {}


def test_others_files_are_not_overwritten(memory, inputs):
    """A folder of a bucket that holds files, but no ledger, is refused."""
    memory.pipe_file("/bucket/out/thesis.tex", b"years of work")
    with pytest.raises(OutputError, match=r"holds files, such as 'thesis.tex', but no ledger"):
        run(copy, inputs)
    assert objects(memory) == {"thesis.tex": b"years of work"}


def test_a_url_of_this_machine_is_a_folder(inputs, tmp_path):
    """file:// has renames and a disk to flush, so it is treated as what it is."""
    report = run(copy, inputs, f"file://{tmp_path}/out")
    assert report.metadata_path == tmp_path / "out" / "metadata.parquet"
    assert len(published(tmp_path / "out")) == 6
    assert (tmp_path / "out" / ".forebay" / "ledger.sqlite").exists()


@pytest.mark.parametrize(("source", "output"), [("local", OUT), ("memory://bucket/in", "local")])
def test_process_workers_cannot_reach_this_process_memory(memory, inputs, tmp_path, source, output):
    """They would each have a memory of their own; the error names the ways on."""
    put_inputs(memory, 2)
    source = inputs if source == "local" else source
    output = tmp_path / "out" if output == "local" else output
    with pytest.raises(OptionError, match="num_workers=0, or backend='thread'"):
        run(copy, source, output, num_workers=2)


def test_an_unknown_kind_of_url_says_so(inputs):
    """A file system that fsspec does not have stops the run before it starts."""
    with pytest.raises(OutputError, match="nowhere://x cannot be reached"):
        run(copy, inputs, "nowhere://x")


def test_an_output_url_within_the_inputs_is_refused(memory):
    """Its objects would be the next run's inputs."""
    put_inputs(memory, 2)
    with pytest.raises(OptionError, match="lies in the input folder"):
        run(copy, "memory://bucket/", "memory://bucket/out")


# ---- uploads that fail --------------------------------------------------------------------------


def test_a_file_that_the_store_refuses_is_its_inputs_failure(memory, inputs, monkeypatch):
    """The store takes others, so the run goes on, and the one input is named."""
    upload = Store.upload

    def refuse(store, files):
        if any(name == "0002.txt" for _, name in files):
            raise OutputError("KeyTooLong")
        upload(store, files)

    monkeypatch.setattr(Store, "upload", refuse)
    report = run(copy, inputs)
    assert [(failure.source, failure.kind) for failure in report.failures] == [
        (str(inputs / "0002.txt"), "output")
    ]
    assert sorted(objects(memory)) == [f"000{number}.txt" for number in (0, 1, 3, 4, 5)]


def test_a_store_that_takes_no_files_stops_the_run(memory, inputs, monkeypatch):
    """No input is blamed; once the store is back, the same call continues."""
    put_file, pipe_file = memory.put_file, memory.pipe_file

    def gone(*_, **__):
        raise PermissionError("credentials expired")

    def lose_store(source, out):
        if source.name == "0003.txt":
            monkeypatch.setattr(type(memory), "put_file", gone)
            monkeypatch.setattr(type(memory), "pipe_file", gone)
        return copy(source, out)

    with pytest.raises(OutputError, match="credentials expired"):
        run(lose_store, inputs)
    monkeypatch.setattr(type(memory), "put_file", lambda _, *words, **__: put_file(*words))
    monkeypatch.setattr(type(memory), "pipe_file", lambda _, *words, **__: pipe_file(*words))
    report = run(copy, inputs, accept_changes=True)
    assert (report.done, report.failed, report.resumed) == (6, 0, 3)


def test_an_input_that_may_not_be_read_is_tried_once(memory, tmp_path, monkeypatch):
    """Another try needs other credentials."""
    put_inputs(memory, 2)
    get_file, tried = memory.get_file, []

    def denied(_, remote, *rest, **options):
        tried.append(remote)
        if remote.endswith("1.txt"):
            raise PermissionError(13, "Access Denied", remote)
        return get_file(remote, *rest, **options)

    monkeypatch.setattr(type(memory), "get_file", denied)
    report = run(tell, "memory://bucket/in/", tmp_path / "out", retries=3)
    assert [failure.error for failure in report.failures] == ["PermissionError"]
    assert len(tried) == 2


# ---- inputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2, "backend": "thread"}])
def test_a_remote_input_is_a_local_path_for_as_long_as_it_is_worked_on(memory, tmp_path, options):
    """It keeps its name; the table names its URL, never the scratch folder."""
    put_inputs(memory, 3)
    report = run(tell, "memory://bucket/in/", tmp_path / "out", **options)
    assert report.metadata.to_pylist() == [
        {
            "source": f"memory:///bucket/in/{number}.txt",
            "destination": f"{number}.txt",
            "path": f"memory:///bucket/in/{number}.txt",
            "suffix": ".txt",
            "text": f"text {number}",
        }
        for number in range(3)
    ]
    assert published(tmp_path / "out")["1.txt"] == b"TEXT 1"
    assert not list((tmp_path / "out" / ".forebay").rglob("*.txt"))


def test_local_and_remote_inputs_go_together(memory, inputs, tmp_path):
    """A list may hold both, and URLs of this machine, which are not copied."""
    put_inputs(memory, 1)
    sources = [
        str(inputs / "0001.txt"),
        "memory://bucket/in/0.txt",
        f"file://{inputs}/0002.txt",
    ]
    report = run(tell, sources, tmp_path / "out")
    assert report.metadata["path"].to_pylist() == sources
    assert sorted(published(tmp_path / "out")) == ["0.txt", "0001.txt", "0002.txt"]


def test_a_missing_remote_input_fails_alone(memory, tmp_path):
    """It is a failure of kind "input", tried once; so is a folder."""
    put_inputs(memory, 2)
    names = ["0.txt", "none.txt", "", "1.txt"]
    sources = [f"memory://bucket/in/{name}" for name in names]
    report = run(tell, sources, tmp_path / "out")
    found = [(failure.source, failure.kind, failure.attempts) for failure in report.failures]
    assert found == [(sources[1], "input", 1), (sources[2], "input", 1)]
    assert report.done == 2


def test_a_changed_remote_input_is_redone(memory, tmp_path):
    """The store tells when an object is another one."""
    put_inputs(memory, 2)
    run(tell, "memory://bucket/in/", tmp_path / "out")
    memory.pipe_file("/bucket/in/1.txt", b"new")
    report = run(tell, "memory://bucket/in/", tmp_path / "out")
    assert (report.done, report.resumed) == (2, 1)
    assert published(tmp_path / "out")["1.txt"] == b"NEW"


def test_a_report_of_a_lost_table_says_so(memory, inputs):
    """The table is read afresh, so it can be gone."""
    report = run(copy, inputs)
    memory.rm_file("/bucket/out/metadata.parquet")
    with pytest.raises(InputError, match=r"metadata\.parquet does not exist"):
        _ = report.metadata


# ---- machines -----------------------------------------------------------------------------------


def test_another_machine_continues(memory, inputs, machine):
    """The ledger comes from the bucket: what is done stays done, wherever it was done."""
    run(copy, inputs, limit=2)
    machine("there")
    report = run(copy, inputs)
    assert (report.done, report.resumed) == (6, 2)
    machine("here")  # its ledger is older now, and knows two inputs
    report = run(copy, inputs)
    assert (report.done, report.resumed) == (6, 6)
    assert len(calls(inputs.parent)) == 6


def test_a_later_run_counts_for_more_than_many_commits(memory, inputs, machine, tmp_path):
    """Of two ledgers that grew from one copy, that of the run that began later is the truth."""
    run(copy, inputs, limit=1)
    (state,) = (tmp_path / "here" / "forebay").iterdir()
    with Ledger.open(state / ".forebay") as ledger:  # commits that never reached the bucket
        ledger.set_meta("generation", str(int(ledger.get_meta("generation")) + 500))
        ledger.set_meta("heard", "here alone")
    machine("there")
    run(copy, inputs)
    machine("here")
    assert run(copy, inputs).resumed == 6
    with Ledger.open(state / ".forebay") as ledger:
        assert ledger.get_meta("heard") is None


def other_run(**changes):
    """Return run.json as another machine would have left it."""
    record = {
        "holder": {"host": "elsewhere", "pid": 4711, "started": "2026-01-01T00:00:00+00:00"},
        "state": "running",
        "heartbeat": time.time(),
        "generation": 9_000_000,
        "lineage": "another",
    }
    return json.dumps({**record, **changes}).encode()


def test_a_run_on_another_machine_is_left_alone(memory, inputs):
    """The error names it; nothing was touched."""
    run(copy, inputs, limit=1)
    memory.pipe_file(f"/bucket/out/{RUN}", other_run())
    with pytest.raises(BusyError, match="pid 4711 on elsewhere"):
        run(copy, inputs)
    assert json.loads(memory.cat(f"/bucket/out/{RUN}"))["holder"]["host"] == "elsewhere"
    assert len(calls(inputs.parent)) == 1


@pytest.mark.parametrize("changes", [{"heartbeat": time.time() - 121}, {"state": "ended"}])
def test_a_run_that_ended_or_fell_silent_is_no_obstacle(memory, inputs, changes):
    """After two minutes without a heartbeat its machine counts as gone."""
    run(copy, inputs, limit=1)
    memory.pipe_file(f"/bucket/out/{RUN}", other_run(**changes))
    assert run(copy, inputs).done == 6


@pytest.mark.parametrize(
    "change", [{"process_start": "1"}, {"pid": 0x7FFFFFFF}, {"pid": 1 << 80}], ids=str
)
def test_a_dead_run_on_this_machine_is_continued_at_once(memory, inputs, change):
    """Its heartbeat is fresh, but its process has ended, or its process ID belongs to another."""
    run(copy, inputs, limit=1)
    this = replace(Holder.this_process("", inputs), pid=os.getppid())
    record = {**asdict(this), **change}
    memory.pipe_file(f"/bucket/out/{RUN}", other_run(holder=record))
    assert run(copy, inputs).done == 6


def test_a_live_run_on_this_machine_is_left_alone_however_long_it_is_silent(memory, inputs):
    """Its process is there, so its heartbeat does not matter: it may be stopped."""
    run(copy, inputs, limit=1)
    parent = os.getppid()
    start = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    holder = replace(Holder.this_process("", inputs), pid=parent, process_start=start)
    memory.pipe_file(f"/bucket/out/{RUN}", other_run(holder=asdict(holder), heartbeat=0.0))
    with pytest.raises(BusyError, match=f"pid {parent} on "):
        run(copy, inputs)


@pytest.mark.parametrize("change", [{"holder": []}, {"holder": {"pid": "x"}}, {"heartbeat": "x"}])
def test_a_damaged_record_of_a_run_counts_for_nothing(memory, inputs, change):
    """The ledger in the bucket is what matters."""
    run(copy, inputs, limit=1)
    memory.pipe_file(f"/bucket/out/{RUN}", other_run(**change))
    assert run(copy, inputs).done == 6


def test_a_run_that_another_machine_took_over_stops(memory, inputs):
    """It does not write its ledger over the other's, and says who has it."""

    def be_taken_over(source, out):
        memory.pipe_file(f"/bucket/out/{RUN}", other_run())

    with pytest.raises(BusyError, match="pid 4711 on elsewhere"):
        run(be_taken_over, inputs)
    assert json.loads(memory.cat(f"/bucket/out/{RUN}"))["holder"]["host"] == "elsewhere"


def test_a_copy_goes_up_while_the_run_goes_on(memory, tmp_path, monkeypatch):
    """Every commit may send one, at most every 30 seconds; the copy is a whole ledger."""
    store, sent = Store(OUT), threading.Event()
    upload = Store.upload

    def upload_and_tell(store, files):
        upload(store, files)
        sent.set()

    with Ledger.open(tmp_path / "work") as ledger:
        copies = LedgerCopy(store, tmp_path)
        copies.join(ledger, "test")
        first = read_run(store).generation
        monkeypatch.setattr(Store, "upload", upload_and_tell)
        ledger.set_meta("said", "too soon")
        copies.update(ledger)
        monkeypatch.setattr(copies, "_due", 0.0)
        ledger.set_meta("said", "in time")
        copies.update(ledger)
        assert sent.wait(PATIENCE_S)
        store.download(LEDGER, tmp_path / "copied.sqlite")
        copies.leave(ledger)
    assert read_run(store).state == "ended"
    assert read_run(store).generation == first + 2
    with Ledger.open(tmp_path / "other") as other:
        other.load(tmp_path / "copied.sqlite")
        assert other.get_meta("said") == "in time"


def test_the_last_copy_is_sent_though_ctrl_c_left_the_lock_locked(memory, tmp_path):
    """The thread that sends copies ends, and the run says that it has ended."""
    store = Store(OUT)
    with Ledger.open(tmp_path / "work") as ledger:
        copies = LedgerCopy(store, tmp_path)
        copies.join(ledger, "test")
        copies._sending.acquire()  # as Ctrl-C between this and what follows leaves it
        copies._wake.set()
        while copies._wake.is_set():
            time.sleep(0.001)
        copies.leave(ledger)
    assert read_run(store).state == "ended"


def test_a_torn_copy_changes_nothing(tmp_path):
    """A ledger that is not whole is refused, and the one at work stays as it was."""
    with Ledger.open(tmp_path / "work") as ledger:
        ledger.set_meta("said", "this")
        ledger.backup(tmp_path / "copy.sqlite")
        whole = (tmp_path / "copy.sqlite").read_bytes()
        for torn in (b"", whole[: len(whole) // 2], b"not a ledger" * 400):
            (tmp_path / "torn.sqlite").write_bytes(torn)
            with pytest.raises(LedgerError):
                ledger.load(tmp_path / "torn.sqlite")
            assert ledger.get_meta("said") == "this"
        ledger.set_meta("said", "that")
        ledger.load(tmp_path / "copy.sqlite")
        assert ledger.get_meta("said") == "this"


# ---- the other commands -------------------------------------------------------------------------


def test_the_other_commands_take_the_url(memory, inputs, machine):
    """From this machine and from another that only looks on."""
    report = run(fail_once, inputs, retries=0)
    assert report.failed == 6
    for place in ("here", "looking on"):
        machine(place)
        assert "0 of 6 inputs done, 6 failed" in command("status", OUT)[1]
        assert "fails at first" in command("failures", OUT)[1]
    machine("here")
    assert command("retry", OUT, f"{WORKS}:fail_once", "--num-workers", 0, "--quiet")[0] == 0
    assert "6 of 6 inputs done" in command("status", OUT)[1]
    assert command("verify", OUT)[0] == 0


def test_verify_finds_missing_altered_and_unknown_files(memory, inputs):
    """And the next run redoes what was lost."""
    run(copy, inputs)
    memory.rm_file("/bucket/out/0001.txt")
    memory.pipe_file("/bucket/out/0002.txt", b"torn")
    memory.pipe_file("/bucket/out/stranger", b"")
    code, said = command("verify", OUT, "--altered", "redo")
    assert code == 3
    assert "missing  0001.txt" in said
    assert "altered  0002.txt" in said
    assert "orphan   stranger" in said
    assert run(copy, inputs).resumed == 4
    assert len(objects(memory)["0002.txt"]) > 4


@pytest.mark.parametrize("words", [["status"], ["failures"], ["verify"], ["retry"]])
def test_a_url_without_a_ledger_is_left_alone(memory, words):
    """The message says what to give instead."""
    with pytest.raises(LedgerError, match="holds no ledger"):
        command(*words, OUT)
    assert memory.store == {}


# ---- a bucket, with process workers -------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run into a folder: its inputs, its outputs and its table."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return undisturbed_run(folder, 30, arguments, published)[:3]


def arguments(inputs, output, work="split"):
    return ["preprocess", f"{WORKS}:{work}", inputs, output, "--num-workers", 2, "--quiet"]


@contextmanager
def started(inputs, url):
    """Start a run that waits at input 20, and for some inputs that it has recorded as done."""
    with inputs.with_name("calls").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = start(*arguments(inputs, url, "split_unless_held"), WORK_PAUSE_S="0.02")
        deadline = time.monotonic() + PATIENCE_S
        while known_done(url) == 0:
            assert process.poll() is None
            assert time.monotonic() < deadline
        yield process


def known_done(url):
    """Return how many inputs are done, as far as the ledger of this machine knows."""
    code, said, _ = here("status", url)
    return 0 if code else int(said.split()[0])


def assert_finished(bucket, undisturbed):
    """Everything is there once and whole, the table too, and nothing else is."""
    _, outputs, table = undisturbed
    assert bucket.outputs() == outputs
    assert bucket.read("out/metadata.parquet") == table
    own = {name for name in bucket.names() if name.startswith("out/.forebay/")}
    assert own == {f"out/{LEDGER}", f"out/{RUN}"}
    code, out, err = here("verify", f"s3://{bucket.name}/out")
    assert code == 0, out + err
    await_no_processes()


@pytest.mark.slow
def test_process_workers_fill_a_bucket(bucket, undisturbed):
    """The same objects and the same table as in a folder; verified as sound."""
    inputs, _, _ = undisturbed
    code, _, err = here(*arguments(inputs, f"s3://{bucket.name}/out/"))
    assert code == 0, err
    assert_finished(bucket, undisturbed)


@pytest.mark.slow
def test_process_workers_read_from_a_bucket(bucket, undisturbed, tmp_path):
    """A folder of a bucket as inputs; a folder here as output."""
    inputs, outputs, _ = undisturbed
    for path in inputs.iterdir():
        bucket.client.upload_file(str(path), bucket.name, f"in/{path.name}")
    code, _, err = here(*arguments(f"s3://{bucket.name}/in", tmp_path / "out"))
    assert code == 0, err
    assert published(tmp_path / "out") == outputs


@pytest.mark.slow
@pytest.mark.parametrize("place", [pytest.param("here", marks=pytest.mark.thorough), "there"])
def test_a_killed_run_is_continued_on_any_machine(bucket, undisturbed, machine, place):
    """SIGKILL in the middle, then the same call, with the local ledger or without it."""
    inputs, _, _ = undisturbed
    url = f"s3://{bucket.name}/out"
    with started(inputs, url) as process:
        process.kill()
        finish(process)
    await_no_processes()
    assert 0 < len(bucket.outputs()) <= 40
    machine(place)
    code, _, err = here(*arguments(inputs, url, "split_unless_held"))
    assert code == 0, err
    assert_finished(bucket, undisturbed)


@pytest.mark.slow
def test_a_missing_bucket_stops_the_run_before_it_starts(bucket, undisturbed):
    """It is not made, and nothing is worked on."""
    inputs, _, _ = undisturbed
    code, _, err = here(*arguments(inputs, "s3://no-such-bucket/out"))
    assert code == 1
    assert "s3://no-such-bucket/out cannot be written" in err
    found = [each["Name"] for each in bucket.client.list_buckets()["Buckets"]]
    assert "no-such-bucket" not in found


@pytest.mark.slow
def test_a_bucket_that_goes_away_stops_the_run_and_blames_no_input(bucket, undisturbed):
    """Its inputs stay to be done: the local ledger has no failure."""
    inputs, _, _ = undisturbed
    with started(inputs, f"s3://{bucket.name}/out") as process:
        while bucket.name in [each["Name"] for each in bucket.client.list_buckets()["Buckets"]]:
            try:
                bucket.remove()
            except bucket.client.exceptions.ClientError:
                continue  # a worker was quicker: it is not empty
    code, _, err = finish(process)
    assert code == 1
    assert "can no longer be written" in err
    assert "no input counts as failed" in err
    states = Path(os.environ["XDG_STATE_HOME"], "forebay")
    (ledger,) = states.rglob("ledger.sqlite")
    with Ledger.open(ledger.parent) as opened:
        assert opened.counts().failed == 0
        assert opened.counts().done > 0
