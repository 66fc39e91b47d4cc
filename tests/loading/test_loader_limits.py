"""Forks and kills of the trainer, little memory, few descriptors, many epochs."""

from __future__ import annotations

import os
import re
import signal

import pytest

from kit.faults import Gate

# A machine of one core is warned of two workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker")

WAYS = {
    "torch's": "num_workers=2",
    "persistent": "num_workers=2, persistent_workers=True",
    "seed": "num_workers=2, seed=0",
    "buffer": "num_workers=2, buffer='2MB'",
    "thread, buffer": "num_workers=2, backend='thread', buffer='2MB'",
}
TWO = {name: WAYS[name] for name in ("torch's", "buffer")}

every_way = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
both_ways = pytest.mark.parametrize("options", TWO.values(), ids=TWO)

# ---- forks of the trainer -----------------------------------------------------------------------


@pytest.mark.slow
@every_way
def test_a_fork_of_the_trainer_has_epochs_of_its_own(script, options):
    """It cannot read the parent's; the parent goes on, while the fork lives and when it has ended.

    The workers stay those that they were: neither process ends the other's.
    """
    ending = script(f"""
        loader = forebay.DataLoader(Numbers(200, 10_000), batch_size=2, {options})
        batches = iter(loader)
        numbers = [next(batches)[:, 0].tolist() for _ in range(3)]
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(reading, 1)
            try:
                next(batches)
            except RuntimeError as error:
                assert "that this one was forked from" in str(error)
                print("refused", flush=True)
            own = [batch[:, 0].tolist() for batch in loader]
            print(own == [[n, n + 1.0] for n in range(0, 200, 2)], flush=True)
            sys.exit(5)
        numbers.append(next(batches)[:, 0].tolist())
        os.write(writing, b"x")
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        numbers += [batch[:, 0].tolist() for batch in batches]
        print(numbers == [[n, n + 1.0] for n in range(0, 200, 2)], loader.statistics().restarts)
    """).end()
    assert ending == (0, "refused\nTrue\n5\nTrue 0\n", "")


# ---- kill -9 ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("where", ["", ", directory=sys.argv[2]"], ids=["memory", "directory"])
def test_a_killed_trainer_of_a_stream_leaves_nothing(trainers, script, where, tmp_path):
    """No process, no name in /dev/shm, no file: workers wait in the midst of a batch."""
    gate, folder = Gate(tmp_path), tmp_path / "buffer"
    folder.mkdir()
    running = script(
        f"""
        class Stream(IterableDataset):
            def __iter__(self):
                for number in range(100):
                    if number == 20:
                        Gate(Path(sys.argv[1])).wait()
                    yield torch.full((10_000,), float(number))
        loader = forebay.DataLoader(
            Stream(), batch_size=2, num_workers=1, buffer=forebay.Buffer(max_bytes="100MB"{where})
        )
        batches = iter(loader)
        kept = next(batches)
        threading.Event().wait()
        """,
        tmp_path,
        folder,
    )
    gate.wait_reached()
    pids = {*map(str, trainers.left())}
    running.kill()
    assert running.end().code == -signal.SIGKILL
    assert os.listdir(folder) == []
    # Other programs have files there, too.
    assert not [name for name in os.listdir("/dev/shm") if pids & {*re.findall(r"\d+", name)}]


# ---- little memory, few descriptors -------------------------------------------------------------

SMALL_SHM = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def mount(source, target, kind, flags, options):
    if libc.mount(source, target, kind, flags, options):
        print("not permitted")
        sys.exit()
if libc.unshare(0x20000):  # CLONE_NEWNS
    print("not permitted")
    sys.exit()
mount(None, b"/", None, (1 << 18) | (1 << 14), None)  # MS_PRIVATE | MS_REC
mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={sys.argv[1]}".encode())
assert os.statvfs("/dev/shm").f_blocks * 4096 <= 64 << 20
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", ["64m", "4k"])
def test_the_size_of_dev_shm_does_not_matter(script, size):
    """38 MB a batch, and half a gigabyte of them ready, where torch's workers die of SIGBUS."""
    ending = script(
        SMALL_SHM
        + """
class Images(Numbers):
    image = torch.ones(3, 224, 224)
    def __getitem__(self, index):
        return self.image
for options in ({}, {"buffer": "500MB"}):
    with forebay.DataLoader(Images(64 * 16), 64, num_workers=2, **options) as loader:
        batches = iter(loader)
        kept = next(batches)
        assert all(batch[63, 2, 223, 223] == 1 for batch in batches), "wrong"
        assert loader.statistics().restarts == 0, "restarted"
    del batches
print(kept.nbytes, os.statvfs("/dev/shm").f_bfree == os.statvfs("/dev/shm").f_blocks)
""",
        size,
    ).end()
    if ending.out == "not permitted\n":
        pytest.skip("nothing can be mounted here")
    assert ending == (0, f"{64 * 3 * 224 * 224 * 4} True\n", "")


@pytest.mark.slow
def test_256_descriptors_are_enough(script):
    """Three hundred batches of many tensors each of four loaders, all kept, all at work at once."""
    ending = script(f"""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        class Many(Numbers):
            def __getitem__(self, index):
                return [torch.full((2000,), float(index)) for _ in range(4)]
        loaders = [
            forebay.DataLoader(Many(600), batch_size=2, **options)
            for options in ({", ".join(f"dict({way})" for way in (*TWO.values(), *TWO.values()))})
        ]
        kept = list(zip(*loaders))
        print(len(kept), {{part[1, 5].item() - 2 * n for n, all in enumerate(kept)
                           for batch in all for part in batch}})
    """).end()
    assert ending == (0, "300 {1.0}\n", "")


@pytest.mark.slow
@both_ways
def test_too_few_descriptors_are_said_before_anything_starts(script, options):
    """Which argument needs how many; nothing is left open, and fewer workers still come up."""
    ending = script(f"""
        import resource, warnings
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        before = os.listdir("/dev/fd")
        warnings.simplefilter("ignore")  # so many workers are more than suggested
        many = "{options}".replace("num_workers=2", "num_workers=30")
        try:
            iter(eval(f"forebay.DataLoader(Numbers(9), {{many}})"))
        except forebay.OptionError as error:
            print(str(error).splitlines()[0])
        gc.collect()
        print(os.listdir("/dev/fd") == before)
        print(len(list(forebay.DataLoader(Numbers(9), {options}))))
    """).end()
    first = "num_workers=30 needs about 108 open files; 100 are allowed"
    assert ending == (0, f"{first}\nTrue\n9\n", "")


@pytest.mark.slow
@both_ways
def test_descriptors_that_run_out_are_an_error_and_no_hang(script, options):
    """Where the trainer's own files leave none, however many are left when it happens."""
    ending = script(f"""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        taken = []
        while True:
            try:
                taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        for _ in range(40):
            try:
                with forebay.DataLoader(Numbers(9), {options}) as loader:
                    count = len(list(loader))
                break
            except (OSError, forebay.WorkerDiedError):
                gc.collect()
                os.close(taken.pop())
        print(count)
    """).end()
    assert ending[:2] == (0, "9\n")


@pytest.mark.slow
@both_ways
def test_too_little_address_space_is_said(script, options):
    """By an error that names the limit; a little more is enough."""
    ending = script(f"""
        import resource
        def limit(more):
            size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
            resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.RLIM_INFINITY))
        limit(40 << 20)
        try:
            iter(forebay.DataLoader(Numbers(9), {options}))
        except forebay.OptionError as error:
            print(str(error).splitlines()[0], "ulimit -v" in str(error))
        limit(400 << 20)
        print(len(list(forebay.DataLoader(Numbers(9), {options}))))
    """).end()
    assert ending.code == 0, ending.err
    first, second = ending.out.splitlines()
    assert first.startswith("shared memory for batches could not be mapped")
    assert first.endswith("True")
    assert second == "9"


# ---- many epochs --------------------------------------------------------------------------------


# With few batches in the buffer: as it fills, it maps more.
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [WAYS["torch's"], "num_workers=2, buffer=forebay.Buffer(max_batches=2)"]
)
@pytest.mark.parametrize("epochs", [11, pytest.param(33, marks=pytest.mark.thorough)])
def test_many_epochs_leave_no_more_than_three(script, options, epochs):
    """Descriptors, threads, children and mappings of files stay as many as they were."""
    ending = script(f"""
        def counts():
            gc.collect()
            maps = Path("/proc/self/maps").read_text().splitlines()
            tasks = os.listdir("/proc/self/task")
            children = [Path(f"/proc/self/task/{{t}}/children").read_text().split() for t in tasks]
            return (len(os.listdir("/dev/fd")), len(tasks), sum(map(len, children)),
                    sum("/" in line for line in maps))
        import forebay.observe.diagnosis  # forebay top shows one once in a while: that imports it
        loader = forebay.DataLoader(Numbers(20, 10_000), batch_size=2, {options})
        for epoch in range({epochs}):
            assert len(list(loader)) == 10
            if epoch == 2:
                before = counts()
        print(before == counts() or (before, counts()))
    """).end()
    assert ending == (0, "True\n", "")
