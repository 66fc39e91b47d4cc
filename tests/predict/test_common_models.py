"""Models as people have them: predicted as they are, killed and continued, read back."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from zoneinfo import ZoneInfo

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest
import torch
from common_models import COUNT, MODELS, numbers, predicted
from models import Numbers

import forebay
from forebay.errors import OutputError
from forebay.predicting.checkpoints import Checkpoint
from forebay.predicting.outputs import rows_of_outputs

BATCH = torch.stack([Numbers(COUNT)[index] for index in range(COUNT)])
# The columns of each, and what the table has for sample 55.
COLUMNS = {
    "detector": {
        "boxes": {"data": [55.0] * 12, "shape": [3, 4]},
        "labels": {"data": [0, 1, 2], "shape": [3]},
        "scores": {"data": [1.0] * 3, "shape": [3]},
    },
    "segmentation": {"out": [55.0] * 24, "aux": [55.0] * 4},
    "classification": {"prediction": [0.25] * 4},
    "transcripts": {"prediction": "so said 55"},
    "token_tags": {"tags": [{"0": f"w{at}", "1": "NOUN"} for at in range(3)]},
    "embeddings": {
        "pooled": [55.0] * 4,
        "hidden_states.0": [55.0] * 4,
        "hidden_states.1": [110.0] * 4,
    },
    "scikit_learn": {"label": "hamster", "proba": [55.0] * 4},
    "onnx_session": {"0": [55.0] * 4, "1": 55},
    "plain_function": {"prediction": 55.0},
    "pipeline": {"label": "L1", "top": [{"word": "x", "score": 27.5}], "warning": "long"},
    "records": {
        "box": {"corner": [55, 56], "score": 27.5},
        "caption": {"text": "55", "beams": ["a"], "score": 0.5},
        "jpeg": b"7",
        "crop": {"data": [55, 55], "shape": [1, 2]},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_used_as_it_is(name, tmp_path):
    """A row per sample; all parts have the same columns, so that others read one table."""
    report = predicted(name, tmp_path)
    assert (report.done, report.failed) == (COUNT, 0)
    paths = sorted(tmp_path.glob("part-*.parquet"))
    assert len({str(pq.read_schema(path)) for path in paths}) == 1
    table = pq.read_table(tmp_path)
    assert table["index"].to_pylist() == [*range(COUNT)]
    assert table.slice(55, 1).to_pylist() == [{"index": 55, **COLUMNS[name]}]


READERS = """
import pathlib, sys
import pandas, polars
for folder in pathlib.Path(sys.argv[1]).iterdir():
    assert len(pandas.read_parquet(folder)) == 60, folder
    assert len(polars.read_parquet(folder / "part-*.parquet")) == 60, folder
"""


@pytest.mark.slow
def test_other_programs_read_the_predictions(tmp_path):
    """pandas and polars, a folder as one table."""
    for name in MODELS:
        predicted(name, tmp_path / name)
    command = [sys.executable, "-c", READERS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_has_any_predictions(name):
    """They come back as they were, also the types that their columns have."""
    rows, failures = rows_of_outputs(MODELS[name](BATCH), [*range(COUNT)], {})
    assert not failures
    data = Checkpoint(0, COUNT, [rows.some(0, 30), rows.some(30, COUNT)], []).to_bytes()
    found = Checkpoint.from_bytes(data, 0, range(COUNT))
    assert [each.types for each in found.rows] == [rows.types] * 2
    for column, array in rows.columns.items():
        values = [each for piece in found.rows for each in piece.columns[column].to_pylist()]
        assert values == array.to_pylist()


def test_predictions_are_read_by_column(tmp_path):
    """Arrays of any shape are tensors, other values those of Python."""
    predicted("records", tmp_path)
    table = pq.read_table(tmp_path)
    dataset = forebay.from_table(table, columns=["box", "crop", "jpeg"])
    row = dataset[55]
    assert (row["box"], row["jpeg"]) == ({"corner": [55, 56], "score": 27.5}, b"7")
    assert torch.equal(row["crop"], torch.full((1, 2), 55, dtype=torch.uint8))
    first = forebay.from_table(tmp_path / "part-00000.parquet", columns=["crop"])
    assert [tuple(each["crop"].shape) for each in (first[0], first[5])] == [(0, 2), (2, 2)]
    parts = forebay.from_table(tmp_path, columns=["crop", "box"])  # the folder: all parts
    assert len(parts) == COUNT and parts[55]["box"] == row["box"]


def in_itself():
    """Return a list that contains itself."""
    found = [1]
    found.append(found)
    return found


UNFIT = {
    "an object": (
        lambda k: object() if k == 5 else "x",
        "is of type builtins.object, which has no",
    ),
    "no time zone": (
        lambda k: datetime(2024, 1, 1, tzinfo=None if k == 5 else UTC),
        "is of type datetime without a time zone, and of type datetime of the time zone UTC",
    ),
    "another type": (lambda k: "x" if k == 5 else k, "is of type str, and of type int in other"),
    "in a dict": (lambda k: {"a": {"b": len if k == 5 else 1}}, "'a.b' is of type"),
    "no dict": (
        lambda k: "x" if k == 5 else {"a": 1},
        "'prediction' is a str, and a dict in other",
    ),
    "a lone surrogate": (lambda k: "x\ud800" if k == 5 else "y", "it is not valid Unicode"),
    "a sparse tensor": (
        lambda k: torch.eye(2).to_sparse() if k == 5 else torch.eye(2),
        "is a sparse",
    ),
    "itself": (lambda k: in_itself() if k == 5 else [1], "or contains itself"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "words"), UNFIT.values(), ids=UNFIT)
def test_what_fits_no_column_fails_its_sample_alone(make, words, tmp_path):
    """It is named; the others of its batch are predicted."""
    report = forebay.predict(
        lambda batch: [make(k) for k in numbers(batch)],
        Numbers(20),
        tmp_path,
        num_workers=0,
        batch_size=8,
        progress=False,
    )
    assert report.done == 19
    (failure,) = report.failures
    assert failure.index == 5 and words in failure.message
    assert pq.read_table(tmp_path)["index"].to_pylist() == [*range(5), *range(6, 20)]


def test_a_batch_of_outputs_that_contains_itself_is_refused(tmp_path):
    """With the samples of the batch, and what to return instead."""

    def model(batch):
        outputs = {"x": batch}
        outputs["again"] = outputs
        return outputs

    with pytest.raises(OutputError, match=r"a dict that contains itself.* of samples 0 … 7\n"):
        forebay.predict(model, Numbers(8), tmp_path, num_workers=0, progress=False)


def test_times_of_several_zones_are_the_same_times(tmp_path):
    """A column of times has one zone, UTC: what is compared and sorted stays as it was."""
    zones = [UTC, ZoneInfo("Asia/Tokyo"), timezone(timedelta(hours=5))]
    times = [datetime(2024, 1, 1, k, tzinfo=zones[k % 3]) for k in range(9)]
    forebay.predict(
        lambda batch: [times[k] for k in numbers(batch)],
        Numbers(9),
        tmp_path,
        num_workers=0,
        batch_size=2,
        progress=False,
    )
    assert pq.read_table(tmp_path)["prediction"].to_pylist() == times


def test_a_data_frame_is_a_column_for_each_of_its_own(tmp_path):
    """As a pipeline of scikit-learn returns it, with `set_output(transform="pandas")`."""

    def model(batch):
        known = numbers(batch)
        return pandas.DataFrame({"a": known, "b": [str(k) for k in known]})

    forebay.predict(model, Numbers(5), tmp_path, num_workers=0, batch_size=2, progress=False)
    table = pq.read_table(tmp_path)
    assert (table["a"].to_pylist(), table["b"].to_pylist()) == ([*range(5)], [*"01234"])


@pytest.mark.parametrize("values", [["a", "b"], [1.5], [None] * 5, [{"a": 1}]])
def test_a_list_that_is_too_short_or_too_long_is_said_to_be(values, tmp_path):
    """It counts as rows, and not as columns, unless its elements are batches."""
    options = {"num_workers": 0, "batch_size": 4, "progress": False}
    with pytest.raises(OutputError, match=rf"returned {len(values)} rows? as .* for 4 samples"):
        forebay.predict(lambda batch: values, Numbers(4), tmp_path, **options)


def test_types_become_wider_as_those_of_a_table(tmp_path, monkeypatch):
    """Nulls are of any type, an integer among floats is one; a kill before that costs nothing."""
    made = [None, 1, 2.5, None]

    def model(batch):
        return [{"a": made[k // 15], "b": [np.float16(k)] if k < 30 else [k / 2]}
                for k in numbers(batch)]  # fmt: skip

    options = {"num_workers": 0, "batch_size": 8, "part_size": 15, "progress": False}
    data, version = Numbers(COUNT), "1"
    with monkeypatch.context() as patch:
        patch.setattr("forebay.predicting.predict._widen", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forebay.predict(model, data, tmp_path, version=version, **options)
    assert len({str(pq.read_schema(path)) for path in tmp_path.glob("part-*")}) > 1
    forebay.predict(lambda batch: 1 / 0, data, tmp_path, version=version, **options)
    table = pq.read_table(tmp_path)
    assert [str(table.schema.field(name).type) for name in "ab"] == [
        "double",
        "large_list<element: double>",
    ]
    assert table["a"].to_pylist() == [made[k // 15] for k in range(COUNT)]
    assert len({str(pq.read_schema(path)) for path in tmp_path.glob("part-*")}) == 1


def test_rows_of_a_file_are_written_again_when_a_type_becomes_wider(tmp_path, monkeypatch):
    """Within one part, whose first row groups are on the disk then."""
    monkeypatch.setattr("forebay.predicting.part_writer.GROUP_BYTES", 1)
    predicted("pipeline", tmp_path, part_size=COUNT)
    assert pq.read_metadata(tmp_path / "part-00000.parquet").num_row_groups == 8
    table = pq.read_table(tmp_path)
    assert table["warning"].to_pylist() == [None] * 51 + ["long"] * 9
    assert {path.name for path in tmp_path.iterdir()} == {".forebay", "part-00000.parquet"}


def test_decimals_are_a_column_of_decimals(tmp_path):
    """As in a table of `preprocess`: of any number of decimal places, NaN is missing."""
    prices = [Decimal("1.50"), Decimal("1E+3"), Decimal("-0"), Decimal("nan"), Decimal("0.125")]

    def model(batch):
        return {"price": [prices[int(each[0]) % 5] for each in batch]}

    forebay.predict(model, Numbers(10), tmp_path, num_workers=0, batch_size=3, progress=False)
    column = pq.read_table(tmp_path).column("price")
    assert str(column.type) == "decimal128(7, 3)"
    assert column.to_pylist() == [Decimal("1.5"), Decimal(1000), 0, None, Decimal("0.125")] * 2
