"""Output folders as an attacker might have made them, and what a user may do with one."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

from click.testing import CliRunner

import forebay
from forebay.cli import cli
from forebay.runs.preprocess import retry


def copy(source: Path, out: Any) -> dict[str, int]:
    """Copy an input to a folder of the output folder; fail for one that says so."""
    text = source.read_text()
    if text == "bad":
        raise ValueError("a bad one")
    out.file(f"sub/{source.name}").write_text(text)
    return {"size": len(text)}


def run(inputs: Any, output: Path, **options: Any) -> Any:
    """Make the call that made the folder, in this process."""
    return forebay.preprocess(copy, inputs, output, num_workers=0, progress=False, **options)


def verify(output: Path) -> int:
    """Run `forebay verify` in this process and return its exit code."""
    result = CliRunner().invoke(cli, ["verify", str(output)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value


# What a user may do with a folder from someone else.
CALLS = {
    "verify": lambda _, output: verify(output),
    "the same call": run,
    "redo=*": lambda inputs, output: run(inputs, output, redo="*"),
    "retry": lambda _, output: retry(copy, output, num_workers=0, progress=False),
}


def doctor(output: Path, sql: str, *parameters: Any) -> None:
    """Change the ledger of an output folder."""
    db = sqlite3.connect(output / ".forebay" / "ledger.sqlite", isolation_level=None)
    try:
        db.execute(sql, parameters)
    finally:
        db.close()


def contents(folder: Path) -> dict[str, Any]:
    """Return everything below a folder: names, with contents, targets of links, or kinds."""

    def of(path: Path) -> Any:
        if path.is_symlink():
            return os.readlink(path)
        return path.read_bytes() if path.is_file() else path.is_dir()

    return {str(path.relative_to(folder)): of(path) for path in sorted(folder.rglob("*"))}
