"""Functions as people have them, none of which knows forebay; tools are replaced by small scripts.

Each takes what its original takes: a path, a path and a folder, a row, or the path of a folder.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

# ---- of one argument -----------------------------------------------------------------------------

size_of_file = os.path.getsize


def count_words(path):
    """Return what a notebook prints."""
    text = Path(path).read_text()
    return {"words": len(text.split()), "lines": text.count("\n")}


def split_words(path):
    """Return a list of strings."""
    return Path(path).read_text().split()


class Transcriber:
    """Load a model once, and return a string for each file."""

    def __init__(self):
        self.model = None

    def __call__(self, path):
        self.model = self.model or {"line": "LINE"}
        return {"text": " ".join(self.model.get(w, w) for w in Path(path).read_text().split())}


transcribe = Transcriber()


def convert_beside(path):
    """Write a file beside the source, as converters do, and return its path."""
    target = Path(path).with_suffix(".flac")
    target.write_text(Path(path).read_text().upper())
    return target


def lines_of(path):
    """Yield a row for each line."""
    for number, line in enumerate(Path(path).read_text().splitlines()):
        yield {"number": number, "line": line}


# ---- of a path and a folder ----------------------------------------------------------------------


def convert(in_path, out_dir):
    """Write one file, with pathlib."""
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / Path(in_path).with_suffix(".up").name).write_text(Path(in_path).read_text().upper())


def convert_joined(in_path, out_dir):
    """Write one file, with os.path."""
    os.makedirs(out_dir, exist_ok=True)
    with open(os.path.join(out_dir, os.path.basename(in_path)), "w") as file:
        file.write(Path(in_path).read_text()[::-1])


def _resized(in_path, out_dir, size, *, suffix=".small"):
    Path(out_dir, Path(in_path).stem + suffix).write_text(Path(in_path).read_text()[:size])


resize = functools.partial(_resized, size=4)
copy = shutil.copy

_FRAMES = """
import sys
for number, line in enumerate(open(sys.argv[1]), 1):
    open(sys.argv[2] % number, "w").write(line)
"""


def frames(source, out):
    """Call a tool like ffmpeg with a pattern of names."""
    os.makedirs(os.path.join(out, source.stem))
    target = os.path.join(out, source.stem, "%05d.jpg")
    subprocess.run([sys.executable, "-c", _FRAMES, source, target], check=True)


_PAGES = """
import sys
for number, line in enumerate(open(sys.argv[1]), 1):
    open(f"{sys.argv[2]}-{number}.ppm", "w").write(line)
"""


def pages(pdf, out_dir):
    """Call a tool like pdftoppm with a prefix."""
    subprocess.run([sys.executable, "-c", _PAGES, pdf, os.path.join(out_dir, pdf.stem)], check=True)
    return {"pages": len(list(Path(out_dir).glob("*.ppm")))}


_SEGMENTS = """
import os, sys
os.chdir(sys.argv[2])
lines = open(sys.argv[1]).read().splitlines()
for number, line in enumerate(lines):
    open(f"seg{number}.ts", "w").write(line)
open("index.m3u8", "w").write("".join(f"seg{k}.ts\\n" for k in range(len(lines))))
"""


def stream(source, out):
    """Call a tool that writes a playlist and its segments into a folder (HLS)."""
    folder = Path(out, source.stem)
    folder.mkdir()
    subprocess.run([sys.executable, "-c", _SEGMENTS, source.resolve(), folder], check=True)
    return {"destination": folder / "index.m3u8"}


def to_store(source, out):
    """Write a store of chunks, as zarr does, with hidden files."""
    root = out / f"{source.stem}.zarr"
    for number, line in enumerate(source.read_text().splitlines()):
        chunk = root / "c" / str(number) / "0"
        chunk.parent.mkdir(parents=True)
        chunk.write_text(line)
    (root / ".zgroup").write_text('{"zarr_format": 2}')
    (root / "c" / ".zarray").write_text("{}")
    return {"chunks": number + 1}


class _Saved:
    """A data set that is saved to a folder, which it makes."""

    def __init__(self, text):
        self.text = text

    def save_to_disk(self, path):
        os.makedirs(path)
        Path(path, "data-00000-of-00001.arrow").write_text(self.text)
        Path(path, "state.json").write_text(json.dumps({"n": len(self.text)}))
        Path(path, "dataset_info.json").write_text("{}")


def to_dataset(source, out):
    """Save a data set, or a model, in a folder of its own."""
    _Saved(source.read_text()).save_to_disk(os.path.join(out, source.stem))


def to_shapes(source, out):
    """Write a format of several files by the name of one of them."""
    path = os.path.join(out, source.stem + ".shp")
    for ending in (".shp", ".shx", ".dbf", ".prj"):
        Path(path).with_suffix(ending).write_text(source.stem + ending)


def separate(track, out):
    """Write the stems of a track, as separators do, below a folder named for the model."""
    paths = []
    for stem in ("vocals", "drums", "bass"):
        path = Path(out) / "model" / track.stem / f"{stem}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{stem} of {track.read_text()}")
        paths.append(path)
    return paths, [{"stem": path.stem} for path in paths]


def cut(source, out):
    """Yield each file with its metadata."""
    for number, line in enumerate(source.read_text().splitlines()):
        path = Path(out, f"{source.stem}-{number}.txt")
        path.write_text(line)
        yield path, {"number": number}


def to_array(source, out):
    """Save an array, by a library that adds an ending."""
    import numpy

    numpy.save(out / source.stem, numpy.frombuffer(source.read_bytes(), "uint8"))


def call_tool(source, out):
    """Call a tool on the command line with the option for its output."""
    code = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[3])"
    subprocess.run([sys.executable, "-c", code, source, "-o", out], check=True)


# ---- of rows and folders -------------------------------------------------------------------------


def describe(row):
    """Return metadata of a row of a manifest."""
    return {"length": len(Path(row["path"]).read_text()) + row["label"]}


def to_volume(series, out):
    """Make one file of a folder of them, as of a DICOM series."""
    slices = sorted(Path(series).glob("*.dcm"))
    Path(out, f"{series.name}.nii").write_text("".join(each.read_text() for each in slices))
    return {"slices": len(slices)}


def copy_series(series, out):
    """Copy a folder with all that is in it."""
    shutil.copytree(series, out / series.name)
