"""Shards as others write them: tars, Parquet files of large and of small rows, JSON lines."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bucket.stores import SHARD_BYTES, Samples

# Samples of a row group of images; small rows of a row group and of a file.
GROUP_ROWS = 100
SMALL_GROUP_ROWS, SMALL_FILE_ROWS = 1000, 20_000
# Small rows, and JSON objects: so many for each image, each with about so many characters.
TEXTS_PER_SAMPLE, TEXT_BYTES = 20, 5000
# Of the shards that are indexed when they are opened: how many there are, and samples of each.
HUNDRED, EACH = 100, 20


def write_tars(samples: Samples, folder: Path) -> None:
    """Write tars as WebDataset has them."""
    each = max(SHARD_BYTES * len(samples) // samples.nbytes, 1)
    for first in range(0, len(samples), each):
        _write_tar(
            samples,
            range(first, min(first + each, len(samples))),
            folder / f"{first // each:05}.tar",
        )


def write_hundred_tars(samples: Samples, folder: Path) -> None:
    """Write small tars."""
    for number in range(HUNDRED):
        indices = range(EACH * number, EACH * (number + 1))
        _write_tar(samples, indices, folder / f"{number:05}.tar")


def _write_tar(samples: Samples, indices: range, path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for number in indices:
            parts = ("jpg", samples[number]["image"]), ("cls", str(number).encode())
            for name, data in parts:
                info = tarfile.TarInfo(f"{number:08}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def write_parquets(samples: Samples, folder: Path) -> None:
    """Write Parquet files of six columns, of which two are read: an image and its label."""
    each = 10 * GROUP_ROWS
    for first in range(0, len(samples), each):
        indices = range(first, min(first + each, len(samples)))
        _write_images(samples, indices, folder / f"{first:08}.parquet")


def write_hundred_parquets(samples: Samples, folder: Path) -> None:
    """Write small Parquet files."""
    for number in range(HUNDRED):
        indices = range(EACH * number, EACH * (number + 1))
        _write_images(samples, indices, folder / f"{number:05}.parquet")


def _write_images(samples: Samples, indices: range, path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    some = [samples[at] for at in indices]
    columns: dict[str, Any] = {"image": [each["image"] for each in some]}
    columns["label"] = [each["label"] for each in some]
    for name in ("a", "b", "c", "d"):  # not read: a fifth of an image each
        columns[name] = [each["image"][-len(each["image"]) // 5 :] for each in some]
    options = {"compression": "none", "use_dictionary": False}
    parquet.write_table(pa.table(columns), path, row_group_size=GROUP_ROWS, **options)


def write_rows(samples: Samples, folder: Path) -> None:
    """Write Parquet files of small rows of six columns, of which a number and a text are read."""
    import pyarrow as pa
    from pyarrow import parquet

    count, text = len(samples) * TEXTS_PER_SAMPLE, _texts(samples)
    for first in range(0, count, SMALL_FILE_ROWS):
        numbers = range(first, min(first + SMALL_FILE_ROWS, count))
        columns: dict[str, Any] = {"number": numbers, "text": [*map(text, numbers)]}
        for name in ("a", "b", "c", "d"):  # not read: a tenth of a text each
            columns[name] = [text(at)[: TEXT_BYTES // 10] for at in numbers]
        options = {"compression": "none", "use_dictionary": False}
        path = folder / f"{first:08}.parquet"
        parquet.write_table(pa.table(columns), path, row_group_size=SMALL_GROUP_ROWS, **options)


def write_lines(samples: Samples, folder: Path) -> None:
    """Write files of JSON lines."""
    count, text = len(samples) * TEXTS_PER_SAMPLE, _texts(samples)
    each = SHARD_BYTES // TEXT_BYTES
    for first in range(0, count, each):
        numbers = range(first, min(first + each, count))
        lines = (json.dumps({"number": at, "text": text(at)}) + "\n" for at in numbers)
        (folder / f"{first:08}.jsonl").write_text("".join(lines))


def _texts(samples: Samples) -> Callable[[int], str]:
    """Return what makes a text of letters, which is compressed badly, and is quick to decode."""
    pool = samples[0]["image"].hex() * 8

    def text(number: int) -> str:
        start = number * 7919 % (len(pool) - 2 * TEXT_BYTES)
        return pool[start : start + TEXT_BYTES + number % 101 - 50]

    return text


FORMS: dict[str, Callable[[Samples, Path], None]] = {
    "tars": write_tars,
    "parquets": write_parquets,
    "rows": write_rows,
    "lines": write_lines,
    "hundred-tars": write_hundred_tars,
    "hundred-parquets": write_hundred_parquets,
}
COLUMNS = {"parquets": ["image", "label"], "rows": ["number", "text"]}
COLUMNS["hundred-parquets"] = COLUMNS["parquets"]


def samples_of(form: str, count: int) -> int:
    """Return how many samples there are in a form, of so many images."""
    if form in ("rows", "lines"):
        return count * TEXTS_PER_SAMPLE
    return HUNDRED * EACH if form.startswith("hundred") else count


def main(form: str, count: str, folder: str) -> None:
    """Write samples in a form."""
    Path(folder).mkdir(parents=True)
    FORMS[form](Samples(int(count)), Path(folder))
    print(form)


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
