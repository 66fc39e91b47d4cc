"""The same call in several processes: one works, the others wait for it and find it done."""

from __future__ import annotations

import signal
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
from driving import finish, make_inputs, start

SCRIPT = textwrap.dedent(
    """
    import logging
    import os
    import sys
    import time
    from pathlib import Path

    import forebay

    logging.basicConfig()
    verb, source, output, gate, *others = sys.argv[1:]


    def passed(name):
        with open(f"{gate}-calls", "a") as calls:
            calls.write(f"{name}\\n")
        while name == "2" and not os.path.exists(gate):
            time.sleep(0.005)


    def work(path, out):
        passed(str(int(path.stem)))
        if path.stem == "0001":
            raise ValueError("bad")
        out.file(path.name).write_text("x")


    class Items:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            passed(str(index))
            return index


    if verb == "preprocess":
        inputs = [each for each in sorted(Path(source).iterdir()) if each.name not in others]
        options = {"redo": "*"} if "restart" in others else {}
        report = forebay.preprocess(
            work, inputs, output, num_workers=0, retries=0, progress=False, **options
        )
        print(report.done, report.failed)
    else:
        print([*forebay.cache(Items(), output, num_workers=0, progress=False)])
    """
)


@pytest.fixture
def launch(tmp_path):
    """Start the script, as a launcher does for each rank."""
    script, inputs = tmp_path / "script.py", make_inputs(tmp_path / "in", 4)
    script.write_text(SCRIPT)

    def launch(verb, *others, output=None):
        arguments = (verb, inputs, output or tmp_path / "out", tmp_path / "gate", *others)
        return start(*arguments, program=(script,))

    return launch


def calls(tmp_path):
    return (tmp_path / "gate-calls").read_text().split()


def wait_line(process):
    """Return the line that says what a process waits for."""
    while "the same call is running" not in (line := process.stderr.readline()):
        assert line
    return line


def reach_gate(tmp_path, process):
    """Wait until a process waits at the gate."""
    path = Path(f"{tmp_path}/gate-calls")
    while process.poll() is None and not (path.exists() and "2" in path.read_text().split()):
        time.sleep(0.01)
    assert process.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "others", "printed"),
    [
        ("preprocess", [], "3 1\n"),
        ("preprocess", ["restart"], "3 1\n"),
        ("cache", [], "[0, 1, 2, 3]\n"),
    ],
)
def test_ranks_that_make_the_same_call_wait_for_the_one_that_works(
    tmp_path, launch, verb, others, printed
):
    """Each returns what is there; no input is processed twice, and a failed one is not retried."""
    first = launch(verb, *others)
    reach_gate(tmp_path, first)
    second = launch(verb, *others)
    said = wait_line(second)
    assert f"the same call is running: pid {first.pid} on " in said
    assert "; waiting for its end (" in said
    (tmp_path / "gate").touch()
    assert finish(first)[:2] == finish(second)[:2] == (0, printed)
    made = calls(tmp_path)
    assert sorted(made) == ["0", "1", "2", "3"] or (verb == "cache" and set(made) == {*"0123"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "printed"), [("preprocess", "3 1\n"), ("cache", "[0, 1, 2, 3]\n")]
)
def test_ranks_wait_for_the_one_that_works_in_a_bucket(tmp_path, launch, bucket, verb, printed):
    """As in a folder: no input is processed twice, whichever rank is first."""
    output = f"s3://{bucket.name}/out"
    first = launch(verb, output=output)
    reach_gate(tmp_path, first)
    second = launch(verb, output=output)
    assert f"the same call is running: pid {first.pid} on " in wait_line(second)
    (tmp_path / "gate").touch()
    assert finish(first)[:2] == finish(second)[:2] == (0, printed)
    assert set(calls(tmp_path)) == {*"0123"}
    assert verb == "cache" or len(calls(tmp_path)) == 4


TRAINING = textwrap.dedent(
    """
    import os
    import sys

    import torch.distributed as dist

    import forebay


    class Items:
        def __len__(self):
            return 40

        def __getitem__(self, index):
            with open(sys.argv[2], "a") as calls:
                calls.write(f"{index}\\n")
            return index


    where = f"file://{sys.argv[2]}-group"
    dist.init_process_group("gloo", where, world_size=2, rank=int(os.environ["RANK"]))
    samples = forebay.cache(Items(), sys.argv[1], num_workers=1, progress=False)
    loader = forebay.DataLoader(
        samples, batch_size=5, shuffle=True, seed=0, world_size="auto", num_workers=1
    )
    mine = [[index for batch in loader for index in batch.tolist()] for _ in range(2)]
    found = [None, None]
    dist.all_gather_object(found, mine)
    dist.barrier()
    dist.destroy_process_group()
    assert [sorted(one + two) for one, two in zip(*found)] == [[*range(40)]] * 2, found
    print(len(mine[0]))
    """
)


@pytest.mark.full  # waiting and groups are shown by tests of their own
@pytest.mark.slow
def test_ranks_of_a_process_group_cache_before_they_train(tmp_path, monkeypatch):
    """All of them call `cache`, as the script of one process does; each then has its samples."""
    script, made = tmp_path / "train.py", tmp_path / "made"
    script.write_text(TRAINING)
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        ranks.append(start(tmp_path / "cache", made, program=("-W", "ignore", script)))
    assert [finish(each)[:2] for each in ranks] == [(0, "20\n")] * 2
    counts = Counter(made.read_text().split())
    # Three samples are loaded once more, to decide on the size of the shards.
    assert set(counts) == {*map(str, range(40))} and sum(counts.values()) <= 43


@pytest.mark.slow
def test_a_process_that_waits_takes_over_when_the_other_one_dies(tmp_path, launch):
    """It continues behind what was committed; nobody has to start it."""
    first = launch("preprocess")
    reach_gate(tmp_path, first)
    second = launch("preprocess")
    wait_line(second)
    first.send_signal(signal.SIGKILL)
    (tmp_path / "gate").touch()
    assert finish(first)[0] == -signal.SIGKILL
    assert finish(second)[:2] == (0, "3 1\n")


@pytest.mark.slow
def test_a_process_that_waits_ends_with_ctrl_c(tmp_path, launch):
    """And leaves the other one alone."""
    first = launch("preprocess")
    reach_gate(tmp_path, first)
    second = launch("preprocess")
    wait_line(second)
    second.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in finish(second)[2]
    (tmp_path / "gate").touch()
    assert finish(first)[:2] == (0, "3 1\n")
