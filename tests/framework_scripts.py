"""Runs the scripts of the how-to about training libraries, changed, by one process or several."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from documents import blocks

HOW_TO = Path(__file__).parents[1] / "docs" / "how-to" / "frameworks.md"
# What must be installed to run the script of each section; Ray Train needs the last with ray.
NEEDS = {
    "Lightning": ("lightning",),
    "Accelerate": ("accelerate",),
    "transformers": ("transformers", "accelerate"),
    "transformers, packed": ("transformers", "accelerate"),
    "torchtitan": ("torchtitan", "torchdata", "tyro"),
    "Ray Train": ("ray", "tensorboardX"),
}
LOSS = re.compile(r"^loss (\S+)$", re.MULTILINE)


def scripts() -> dict[str, str]:
    """Return the script of each section: the blocks before the first section, then its own."""
    text = HOW_TO.read_text(encoding="utf-8")
    headings = [
        (number, line.removeprefix("## "))
        for number, line in enumerate(text.splitlines())
        if line.startswith("## ")
    ]
    shared: list[str] = []
    found: dict[str, list[str]] = {}
    for block in blocks(text):
        if block.language == "python" and block.excuse is None:
            names = [name for number, name in headings if number < block.start]
            (found.setdefault(names[-1], ["", ""]) if names else shared).extend(block.lines)
    return {name: "\n".join([*shared, *lines]) + "\n" for name, lines in found.items()}


def train(folder: Path, name: str, *changes: tuple[str, str], ranks: int = 0) -> str:
    """Run a script in a folder, changed, by itself or by torchrun, and return what it printed."""
    code = scripts()[name]
    for old, new in changes:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return run(folder, code, NEEDS[name], ranks)


def run(folder: Path, code: str, needs: tuple[str, ...], ranks: int = 0) -> str:
    """Run a program in a folder, by itself or by torchrun, and return what it printed.

    Args:
        needs: What must be installed; otherwise the test is skipped.
    """
    missing = [each for each in needs if find_spec(each) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(code, encoding="utf-8")
    launcher = []
    if ranks:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    # Buffered, each rank writes its lines at its end, so that those of two ranks do not mix. A
    # cluster of Ray is the program's own, also while another one runs here.
    changed = {"PYTHONUNBUFFERED": "", "RAY_ADDRESS": "local", "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **changed},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def loss(printed: str) -> str:
    """Return the loss that all ranks printed."""
    found = set(LOSS.findall(printed))
    assert len(found) >= 1, printed
    return max(found)


def forget_after(step: int, checkpoints: Path) -> None:
    """Remove the checkpoints of later steps that a Trainer of transformers has made."""
    for folder in checkpoints.glob("checkpoint-*"):
        if int(folder.name.partition("-")[2]) > step:
            shutil.rmtree(folder)
