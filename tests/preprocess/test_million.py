"""Very many inputs: the driver's memory stays flat, and a finished run resumes at once.

`FOREBAY_TEST_INPUTS=1000000` makes it the whole million in `make test-all`; by default it is fewer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from driving import PATIENCE_S

MANY = int(os.environ.get("FOREBAY_TEST_INPUTS", "200000"))
# Few inputs, many, and how much more memory the driver may need for many. The bound for any number
# is SQLite's cache and its sorter, 64 MiB each, which few inputs do not fill; 25,000 fill a tenth.
CASES = [
    (5_000, 25_000, 48 << 20),
    pytest.param(50_000, MANY, 128 << 20, marks=pytest.mark.thorough),
]

DRIVER = """
import json, resource, sys, time
import forebay

def number(row, out):
    if len(sys.argv) > 3:
        raise AssertionError("called although everything is done")
    return {"square": row["n"] ** 2}

def peak():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

if __name__ == "__main__":
    began = time.monotonic()
    report = forebay.preprocess(
        number, sys.argv[1], sys.argv[2], num_workers=2, metadata="jsonl", progress=False
    )
    facts = {"done": report.done, "resumed": report.resumed, "peak": peak(),
             "seconds": time.monotonic() - began}
    print(json.dumps(facts))
"""


def drive(tmp_path, count, *calls_are_wrong):
    """Run, or resume, the job of so many inputs; return what its driver says of itself."""
    script, manifest = tmp_path / "drive.py", tmp_path / f"{count}.jsonl"
    script.write_text(DRIVER)
    if not manifest.exists():
        with manifest.open("w") as file:
            file.writelines(f'{{"n":{number}}}\n' for number in range(count))
    done = subprocess.run(
        [sys.executable, script, manifest, tmp_path / f"out{count}", *calls_are_wrong],
        capture_output=True,
        text=True,
        timeout=max(PATIENCE_S, count / 500),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("few", "many", "growth"), CASES)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_stays_flat_and_a_finished_run_resumes_at_once(tmp_path, few, many, growth):
    """Four times the inputs (or twenty): hardly more memory; and resuming calls nothing."""
    small, large = drive(tmp_path, few), drive(tmp_path, many)
    assert (small["done"], large["done"]) == (few, many)
    assert large["peak"] - small["peak"] < growth, (small, large)

    again = drive(tmp_path, many, "calls are wrong")
    assert (again["done"], again["resumed"]) == (many, many)
    assert again["peak"] - small["peak"] < growth, (small, again)
    print(f"\n{few:,}: {small}\n{many:,}: {large}\nagain: {again}")
