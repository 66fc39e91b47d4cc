"""Ways in which a script is started: in each, its function does what it does in a loop."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from driving import PATIENCE_S, SOURCE, call, make_inputs

from documents import program

COUNT = 3
# What each script begins with; `{before}` may import what starts threads.
PRELUDE = """
{before}
import functools, os, sys, threading
from pathlib import Path
import forebay

lock = threading.Lock()

@functools.cache
def model():
    return {{"line": "LINE"}}

def work(path):
    with lock:
        first = Path(path).read_text().split()[0]
        return {{"word": model()[first], "name": os.path.basename(path)}}

def cached_only(path):
    return {{"word": model()["line"], "name": os.path.basename(path)}}

def main(function=work, out="out"):
    paths = sorted(map(str, Path({folder!r}).iterdir()))
    report = forebay.preprocess(
        function, paths, os.path.join({above!r}, out), num_workers=1, retries=0, progress=False
    )
    found = [{{"word": row["word"], "name": row["name"]}} for row in report.metadata.to_pylist()]
    assert found == [function(path) for path in paths], (found, report.failures)
    print("as in a loop", report.done)
"""
GUARDED = '\nif __name__ == "__main__":\n    main()\n    main(cached_only, "second")\n'
NUMPY = "import numpy; numpy.ones((300, 300)) @ numpy.ones((300, 300))"
THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
POOLED = """
def job(out):
    main(work, out)
    return 1

if __name__ == "__main__":
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
    {body}
"""
EXECUTOR = (
    "with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context({0!r})) as executor:\n"
    "        executor.submit(job, 'out').result()"
)
PROCESS = (
    "child = multiprocessing.get_context({0!r}).Process(target=job, args=('out',))\n"
    "    child.start(); child.join(); assert child.exitcode == 0"
)
MANAGER = """
from multiprocessing import Manager

def shared(path, names):
    names.append(path)
    return {"word": "x", "name": os.path.basename(path)}

if __name__ == "__main__":
    with Manager() as manager:
        main()
        main(functools.partial(shared, names=manager.list()), "second")
"""
# How the script ends, and what is before it; by name.
SCRIPTS = {
    "guarded": ("", GUARDED),
    "numpy": (NUMPY, GUARDED),
    "a thread": (THREAD, GUARDED),
    "torch": ("import torch", GUARDED),
    "no guard": ("", "\nmain()\nmain(cached_only, 'second')\n"),
    "no guard, a thread": (THREAD, "\nmain(cached_only)\n"),
    "in a thread": ("", "\nthread = threading.Thread(target=main)\n"
                    "thread.start()\nthread.join()\n"),
    "asyncio": ("", "\nimport asyncio\nasync def program():\n    main()\n"
                "asyncio.run(program())\n"),
    "a manager": ("", MANAGER),
    "a manager, a thread": (THREAD, MANAGER),
    "a local function": ("", "\ndef outer():\n    def inner(path):\n        return work(path)\n"
                         "    main(inner)\nouter()\n"),
    "a lambda": ("", "\nmain(lambda path: work(path))\n"),
    **{
        f"executor, {way}": (NUMPY, POOLED.format(body=EXECUTOR.format(way)))
        for way in ("fork", "spawn", "forkserver")
    },
    **{
        f"process, {way}": ("", POOLED.format(body=PROCESS.format(way)))
        for way in ("fork", "spawn", "forkserver")
    },
    "threads of an executor": (
        "",
        POOLED.format(body="with ThreadPoolExecutor(1) as executor:\n"
                      "        executor.submit(job, 'out').result()"),
    ),
}  # fmt: skip


def script_text(tmp_path, name="guarded"):
    before, after = SCRIPTS[name]
    folder = make_inputs(tmp_path / "in", COUNT)
    return PRELUDE.format(before=before, folder=str(folder), above=str(tmp_path)) + after


def run(arguments, tmp_path, **options):
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCE, **options.pop("env", {})},
        **options,
    )
    assert "as in a loop 3" in done.stdout, done.stderr
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_it_is(tmp_path, name):
    """With whatever it has imported or started, guarded or not, in a pool of its own or not."""
    script = tmp_path / "script.py"
    script.write_text(script_text(tmp_path, name))
    run([script], tmp_path)


def _module(tmp_path, text):
    (tmp_path / "script.py").write_text(text)
    return ["-m", "script"], {"env": {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}"}}


def _package(tmp_path, text):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text(text)
    return ["-m", "package"], {"env": {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}"}}


def _imported(tmp_path, text):
    (tmp_path / "script.py").write_text(text.replace('if __name__ == "__main__":', "if True:"))
    return ["-c", "import script"], {"env": {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}"}}


def _zipped(tmp_path, text):
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as file:
        file.writestr("__main__.py", text)
    return ["app.pyz"], {}


def _linked(tmp_path, text):
    (tmp_path / "real.py").write_text(text)
    (tmp_path / "link.py").symlink_to("real.py")
    return ["link.py"], {}


def _deleted(tmp_path, text):
    (tmp_path / "script.py").write_text("import os; os.unlink(__file__)\n" + text)
    return ["script.py"], {}


def _in_a_folder(tmp_path, text):
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "my script.py").write_text(text)
    return ["a b/my script.py"], {}


def _run_path(tmp_path, text):
    (tmp_path / "script.py").write_text(text)
    return ["-c", "import runpy; runpy.run_path('script.py', run_name='__main__')"], {}


def _cells(tmp_path, text):
    """As a notebook runs them: each compiled by itself, in the namespace of the main module."""
    (tmp_path / "script.py").write_text(text)
    program = (
        "import ast\n"
        "for node in ast.parse(open('script.py').read()).body:\n"
        "    exec(compile(ast.Module([node], []), '<cell>', 'exec'), globals())\n"
    )
    return ["-c", program], {}


def _shell(tmp_path, text):
    """As lines that are typed into Python's own shell."""
    lines = textwrap.dedent(text).replace("\n\n", "\n").strip().splitlines()
    typed = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        typed.append(line)
        if following[:1] == "@" or (line[:1] in " )" and following[:1] not in " )"):
            typed.append("")  # the end of a function, or what comes before one
    return ["-i", "-q"], {"input": "\n".join(typed) + "\n\nexit()\n"}


def _tested(tmp_path, text):
    (tmp_path / "test_script.py").write_text(text + "\n\ndef test_it():\n    main()\n")
    return ["-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "test_script.py"], {}


WAYS = {
    "-c": lambda tmp_path, text: (["-c", text], {}),
    "stdin": lambda tmp_path, text: (["-"], {"input": text}),
    "-m": _module,
    "-m package": _package,
    "imported": _imported,
    "zipped": _zipped,
    "linked": _linked,
    "deleted": _deleted,
    "in a folder with a space": _in_a_folder,
    "runpy": _run_path,
    "cells": _cells,
    "shell": _shell,
    "pytest": _tested,
    "-O": lambda tmp_path, text: (["-O", "-c", text], {}),
    "locale C": lambda tmp_path, text: (["-c", text], {"env": {"LC_ALL": "C", "LANG": "C"}}),
    "no stdin": lambda tmp_path, text: (["-c", text], {"stdin": subprocess.DEVNULL}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_script_runs_however_it_is_started(tmp_path, way):
    """By its file, as a module, from a string, in a shell, by a test, out of an archive."""
    arguments, options = WAYS[way](tmp_path, script_text(tmp_path))
    run(arguments, tmp_path, **options)


@pytest.mark.slow
@pytest.mark.parametrize("before", [NUMPY, ""], ids=["numpy", "alone"])
def test_the_programs_of_a_how_to_run_as_a_script(tmp_path, before):
    """As somebody has them who copies them into a file, with what is imported there already."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "models-in-workers.md"
    text = page.read_text()
    (tmp_path / "script.py").write_text(f"{before}\n{program(text)}\nprint('as in a loop 3')\n")
    run(["script.py"], tmp_path)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "module"])
def test_the_command_line_runs_a_function_of_a_script(tmp_path, monkeypatch, kind):
    """By its file or its module; with a lock and a cached helper."""
    (tmp_path / "script.py").write_text(script_text(tmp_path))
    monkeypatch.chdir(tmp_path)
    name = "script.py:work" if kind == "file" else "script:work"
    code, out, err = call("preprocess", name, "in", "out", "--num-workers", 1)
    assert (code, err) == (0, "")
    assert out.startswith("3 done, 0 failed")
