"""preprocess on a cluster of two nodes: every promise of the local backends, with their works."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pandas
import pytest
from clusters import start_driver
from driving import (
    WORKS,
    calls,
    finish,
    make_inputs,
    published,
    staged,
    start,
)
from functions_as_found import separate
from works import copy, draw, fail_odd, fail_once, split

import forebay
from forebay.errors import OptionError, SampleTimeoutError, WorkerDiedError
from kit.faults import meet_fault
from runs import run, table

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


class OwnError(Exception):
    """What only the user's code knows."""


class Words:
    """A Dataset as the work: each item makes a row, and none a file."""

    def __init__(self, words):
        self.words = words

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return {"word": self.words[index], "length": len(self.words[index])}


def raise_own(source, out):
    raise OwnError(f"not {source.name}")


def raise_value(source, out):
    raise ValueError(f"not {source.name}")


# ---- the same as on one machine -----------------------------------------------------------------


@pytest.mark.parametrize("work", [copy, split, draw, separate], ids=lambda work: work.__name__)
def test_files_and_table_are_those_of_a_local_run(work, tmp_path):
    """Byte for byte, with what was drawn at random."""
    inputs = make_inputs(tmp_path / "in", 40, lines=3)
    run(work, inputs, tmp_path / "local", backend="process", num_workers=2)
    report = run(work, inputs, tmp_path / "ray")
    assert (report.done, report.failed, report.resumed) == (40, 0, 0)
    assert published(tmp_path / "ray") == published(tmp_path / "local")
    assert table(tmp_path / "ray") == table(tmp_path / "local")
    assert not staged(tmp_path / "ray")


def test_a_dataset_is_worked_on_by_all_nodes(tmp_path):
    """Items are spread like inputs, and their table is that of a local run."""
    words = Words([f"word {number}" * (number % 5) for number in range(50)])
    run(words, None, tmp_path / "local", backend="process", num_workers=2)
    report = run(words, None, tmp_path / "ray")
    assert report.done == 50
    assert table(tmp_path / "ray") == table(tmp_path / "local")


def save_word(sample, out):
    out.file(f"{sample['word']}.txt").write_text(sample["word"] * 2)
    return {"twice": 2 * sample["length"]}


def test_samples_of_a_dataset_are_saved_as_in_a_local_run(tmp_path):
    """By every node, under the same names."""
    words = Words([f"word {number}" for number in range(50)])
    run(words, None, tmp_path / "local", save=save_word, backend="process", num_workers=2)
    report = run(words, None, tmp_path / "ray", save=save_word)
    assert report.done == 50
    assert published(tmp_path / "ray") == published(tmp_path / "local")
    assert table(tmp_path / "ray") == table(tmp_path / "local")


@pytest.mark.parametrize("kind", [list, pandas.DataFrame])
def test_a_table_in_memory_is_a_manifest(kind, tmp_path):
    """Its rows arrive as dicts, with the same results as in a local run."""
    rows = kind([{"n": n, "name": f"é{n}"} for n in range(30)])

    def save(row, out):
        out.file(f"{row['name']}.txt").write_text(str(row["n"]))
        return {"twice": 2 * row["n"]}

    run(save, rows, tmp_path / "local", backend="process", num_workers=2)
    report = run(save, rows, tmp_path / "ray")
    assert report.metadata.column("twice").to_pylist() == list(range(0, 60, 2))
    assert published(tmp_path / "ray") == published(tmp_path / "local")
    assert table(tmp_path / "ray") == table(tmp_path / "local")


def test_rows_of_a_manifest_arrive_as_they_are(tmp_path):
    """As dicts, and their columns are the first of the table."""
    manifest = tmp_path / "rows.jsonl"
    manifest.write_text("".join(json.dumps({"n": n, "name": f"é{n}"}) + "\n" for n in range(20)))
    report = run(lambda row, out: {"twice": 2 * row["n"]}, manifest, tmp_path / "out")
    rows = report.metadata.to_pylist()
    assert [(row["n"], row["name"], row["twice"]) for row in rows] == [
        (n, f"é{n}", 2 * n) for n in range(20)
    ]


def test_a_second_call_does_nothing_again(tmp_path):
    """All is done already, and known to be."""
    inputs = make_inputs(tmp_path / "in", 10)
    run(copy, inputs, tmp_path / "out")
    before = table(tmp_path / "out")
    report = run(copy, inputs, tmp_path / "out")
    assert (report.done, report.resumed) == (10, 10)
    assert len(calls(tmp_path)) == 10
    assert table(tmp_path / "out") == before


# ---- workers ------------------------------------------------------------------------------------


def test_num_workers_bounds_how_many_there_are(tmp_path):
    """One, where there is room for two; and without a number as many as there is room for."""
    here, go = tmp_path / "here", tmp_path / "go"
    here.mkdir()

    def meet(source, out):
        (here / f"{os.getpid()}").touch()
        if not go.exists():
            # Neither worker continues before both are here.
            until_two(here, go)
        return {"worker": os.getpid()}

    def until_two(here, go):
        import time

        while len(list(here.iterdir())) < 2 and not go.exists():
            time.sleep(0.005)

    inputs = make_inputs(tmp_path / "in", 8)
    both = run(meet, inputs, tmp_path / "both").metadata.column("worker").to_pylist()
    assert len(set(both)) == 2
    go.touch()
    one = run(meet, inputs, tmp_path / "one", num_workers=1).metadata.column("worker")
    assert len(set(one.to_pylist())) == 1
    most = forebay.Ray(max_workers=1)
    one = run(meet, inputs, tmp_path / "most", backend=most).metadata.column("worker")
    assert len(set(one.to_pylist())) == 1


def test_a_trial_is_made_in_this_process(tmp_path):
    """With `limit` the real traceback is here, and no cluster is asked."""
    inputs = make_inputs(tmp_path / "in", 5)
    report = run(lambda source, out: {"pid": os.getpid()}, inputs, tmp_path / "out", limit=2)
    assert set(report.metadata.column("pid").to_pylist()) == {os.getpid()}
    assert report.done == 2


def test_no_workers_are_refused(tmp_path):
    """Nothing is started for that."""
    inputs = make_inputs(tmp_path / "in", 1)
    with pytest.raises(OptionError, match=r"^num_workers=0 works in this process"):
        run(copy, inputs, tmp_path / "out", num_workers=0)


def test_workers_that_take_a_part_of_a_cpu_share_it(tmp_path):
    """Four halves on two nodes of one CPU each."""
    inputs = make_inputs(tmp_path / "in", 40)
    report = run(copy, inputs, tmp_path / "out", backend=forebay.Ray(num_cpus=0.5))
    assert report.done == 40


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("work", "kind"), [(raise_value, ValueError), (raise_own, OwnError)])
def test_the_functions_own_exception_is_raised(work, kind, tmp_path):
    """As it was, with the frames of the worker and the input's name in its notes."""
    inputs = make_inputs(tmp_path / "in", 4)
    with pytest.raises(kind, match=r"^not 000\d\.txt\n") as caught:
        run(work, inputs, tmp_path / "out", max_failures=0)
    notes = "\n".join(caught.value.__notes__)
    assert f"in {work.__name__}" in notes
    assert re.search(r"the input was .*000\d\.txt, number \d, attempt 1", notes)


def test_failures_are_those_of_a_local_run(tmp_path):
    """The same inputs, errors and numbers of tries, in the same order."""
    inputs = make_inputs(tmp_path / "in", 12)
    reports = [
        run(fail_odd, inputs, tmp_path / backend, backend=backend) for backend in ("process", "ray")
    ]
    local, remote = (
        [(each.source, each.error, each.message, each.attempts) for each in report.failures]
        for report in reports
    )
    assert remote == local
    assert len(remote) == 6


def test_an_input_that_fails_once_is_tried_again(tmp_path):
    """By forebay, and exactly once more."""
    inputs = make_inputs(tmp_path / "in", 6)
    report = run(fail_once, inputs, tmp_path / "out")
    assert (report.done, report.failed) == (6, 0)
    assert sorted(calls(tmp_path)) == sorted(2 * [path.name for path in inputs.iterdir()])


DEATHS = {
    "os._exit": "exited with code 3",
    "SIGSEGV": "killed by signal: Segmentation fault (SIGSEGV",
    "SIGKILL": "killed by signal: Killed (SIGKILL",
}


def test_each_death_of_a_worker_is_laid_to_its_input(tmp_path):
    """To no other, and those are done; the report says how and where it died."""
    inputs = make_inputs(tmp_path / "in", 20)
    for number, fault in enumerate(DEATHS):
        (inputs / f"{5 + number:04d}.txt").write_text(fault)
    report = run(meet_fault, inputs, tmp_path / "out", retries=0)
    assert (report.done, report.failed) == (17, 3)
    for failure, words in zip(report.failures, DEATHS.values(), strict=True):
        assert words in failure.message
        assert "(on node " in failure.message
        assert failure.attempts == 1
    assert [Path(each.source).stem for each in report.failures] == ["0005", "0006", "0007"]
    assert all(body.startswith(b"whole") for body in published(tmp_path / "out").values())
    assert not staged(tmp_path / "out")


def test_a_death_raises_where_the_first_failure_ends_the_run(tmp_path):
    """With the name of the input."""
    inputs = make_inputs(tmp_path / "in", 3)
    (inputs / "0001.txt").write_text("SIGKILL")
    with pytest.raises(WorkerDiedError, match=r"0001\.txt: .*SIGKILL"):
        run(meet_fault, inputs, tmp_path / "out", max_failures=0)


def test_a_hang_is_killed_and_its_stack_recorded(tmp_path):
    """The others are done."""
    inputs = make_inputs(tmp_path / "in", 10)
    (inputs / "0003.txt").write_text("hang, deaf")
    report = run(meet_fault, inputs, tmp_path / "out", timeout=3.0, retries=0)
    assert report.done == 9
    (failure,) = report.failures
    assert Path(failure.source).name == "0003.txt"
    assert "in hang" in failure.traceback
    with pytest.raises(SampleTimeoutError, match=r"0003\.txt"):
        run(meet_fault, inputs, tmp_path / "out", timeout=3.0, max_failures=0)


# ---- the command line ---------------------------------------------------------------------------


def test_the_command_runs_on_a_cluster(cluster, tmp_path):
    """With its address; and the failures are retried there."""
    inputs = make_inputs(tmp_path / "in", 10)
    where = ["--backend", "ray", "--address", cluster.address, "--num-cpus", 0.5]
    words = ["preprocess", f"{WORKS}:fail_once", inputs, tmp_path / "out", "--retries", 0]
    code, _out, err = finish(start(*words, "--max-failures", 10, *where, "--num-workers", 2))
    assert code in (1, 3), err
    if code == 1:  # the first ones failed all alike
        assert "stopped early" in err
    code, _, err = finish(start("retry", tmp_path / "out", f"{WORKS}:fail_once", *where))
    assert code == 0, err


@pytest.mark.parametrize("option", [("--address", "auto"), ("--num-cpus", "2")])
def test_options_of_a_cluster_need_the_backend(option, tmp_path):
    """Wrong usage, exit code 2."""
    code, _, err = finish(start("preprocess", f"{WORKS}:copy", tmp_path, tmp_path / "o", *option))
    assert code == 2
    assert f"{option[0]} is for --backend ray, which was not given" in err


def test_a_cluster_that_is_not_there_is_wrong_usage(tmp_path):
    """Exit code 2, and how to start one."""
    inputs = make_inputs(tmp_path / "in", 1)
    words = ["preprocess", f"{WORKS}:copy", inputs, tmp_path / "out", "--backend", "ray"]
    code, _, err = finish(start(*words, "--address", "127.0.0.1:1"))
    assert code == 2, err
    assert "forebay: no Ray cluster answers at '127.0.0.1:1'" in err
    assert "ray start --head" in err


SIGNALLED = """
import os, signal
from pathlib import Path
import forebay

calls, here, driver = [], Path(__file__).parent, os.getpid()
signal.signal(signal.SIGTERM, lambda *_: calls.append(os.getpid()))

def work(source):
    if source.stem.endswith("3"):
        os.kill(driver, signal.SIGTERM)
    return {}

options = {"backend": "ray", "progress": False}
report = forebay.preprocess(work, here / "in" / "*.txt", here / "out", **options)
print(report.done, report.failed, calls == [driver])
"""


@pytest.mark.full
def test_the_users_handler_stays_when_a_cluster_is_joined(cluster, tmp_path):
    """Ray's own one would end the program; the user's is called once, and the run goes on."""
    make_inputs(tmp_path / "in", 10)
    code, out, err = finish(start_driver(cluster, SIGNALLED, tmp_path))
    assert (code, out) == (0, "10 0 True\n"), err
