"""predict: every sample once, in order, whatever the model returns and whoever loads."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from models import Both, Factory, Half, Noise, Numbers, sample_of, total
from torch.utils.data import IterableDataset, TensorDataset

import forebay

# Runs that start new interpreters have tests of their own.
pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def predicted(model, data, output, **options):
    """Predict quietly, and return the report and the table."""
    options = {"num_workers": 0, "batch_size": 8, "part_size": 30, "progress": False} | options
    report = forebay.predict(model, data, output, **options)
    return report, pq.read_table(output)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_every_sample_is_there_once_and_in_order(tmp_path, num_workers):
    """One row a sample, over the ends of batches and parts."""
    report, table = predicted(Half(), Numbers(100), tmp_path, num_workers=num_workers)
    assert table.column_names == ["index", "prediction"]
    assert table.schema.field("index").type == pa.int64()
    assert table["index"].to_pylist() == list(range(100))
    assert table["prediction"].to_pylist() == [2.0 * k for k in range(100)]
    assert (report.done, report.failed, report.resumed) == (100, 0, 0)
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == [
        f"part-{part:05d}.parquet" for part in range(4)
    ]
    assert pq.read_metadata(tmp_path / "part-00003.parquet").num_rows == 10


OUTPUTS = {
    "tensor": (lambda batch: batch * 2, {"prediction": [4]}),
    "array": (lambda batch: batch.numpy().sum(1), {"prediction": []}),
    "dict": (lambda batch: {"a": batch, "b": batch.sum(1)}, {"a": [4], "b": []}),
    "tuple": (lambda batch: (batch.reshape(-1, 2, 2), batch[:, 0].int()), {"0": [2, 2], "1": []}),
    "NamedTuple": (lambda batch: Both(batch.sum(1), batch), {"total": [], "rows": [4]}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "shapes"), OUTPUTS.values(), ids=OUTPUTS)
def test_what_a_model_may_return(tmp_path, model, shapes):
    """Each output is a column of its own, with its shape."""
    _, table = predicted(model, Numbers(20), tmp_path)
    assert table.column_names == ["index", *shapes]
    for name, shape in shapes.items():
        kind = table.schema.field(name).type
        assert (kind.shape if isinstance(kind, pa.FixedShapeTensorType) else []) == shape
    column = table["prediction"] if "prediction" in shapes else table[next(iter(shapes))]
    assert column.combine_chunks()[3].as_py() is not None


TYPES = {
    torch.float32: pa.float32(),
    torch.float16: pa.float16(),
    torch.bfloat16: pa.float32(),
    torch.int64: pa.int64(),
    torch.uint8: pa.uint8(),
    torch.bool: pa.bool_(),
}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_numbers_keep_their_type(tmp_path, dtype):
    """A number a sample is a plain column of the same type; bfloat16 becomes float32."""
    _, table = predicted(lambda batch: batch[:, 0].to(dtype), Numbers(5), tmp_path)
    assert table.schema.field("prediction").type == TYPES[dtype]
    assert table["prediction"].to_pylist() == torch.arange(5.0).to(dtype).tolist()


@pytest.mark.parametrize("group_bytes", [1, 1 << 24])
def test_a_dict_may_have_its_keys_in_any_order(tmp_path, monkeypatch, group_bytes):
    """Columns are those of the same name, in the order of the first batch."""
    monkeypatch.setattr("forebay.predicting.part_writer.GROUP_BYTES", group_bytes)

    def model(batch):
        named = {"a": batch[:, 0], "b": batch}
        return named if batch[0, 0] % 16 == 0 else dict(reversed(named.items()))

    _, table = predicted(model, Numbers(60), tmp_path)
    assert table.column_names == ["index", "a", "b"]
    assert table["a"].to_pylist() == [*range(60)]
    assert table["b"].to_pylist() == [[index] * 4 for index in range(60)]


def test_lazily_negated_numbers_are_numbers(tmp_path):
    """torch gives the imaginary part of a conjugate as a view that NumPy cannot read."""
    _, table = predicted(lambda batch: (batch[:, 0] * 1j).conj().imag, Numbers(5), tmp_path)
    assert table["prediction"].to_pylist() == [-1.0 * k for k in range(5)]


def test_a_prediction_may_view_its_batch(tmp_path):
    """What the model returns may lie in memory that the loader uses again."""
    _, table = predicted(
        lambda batch: batch[:, 0],
        TensorDataset(torch.arange(90.0)[:, None]),
        tmp_path,
        collate_fn=lambda rows: torch.stack([row[0] for row in rows]),
    )
    assert table["prediction"].to_pylist() == list(range(90))


def test_the_module_is_left_as_it_was(tmp_path):
    """A module in training is one again afterwards."""
    model = Half().train()
    predicted(model, Numbers(10), tmp_path)
    assert model.training and model.dropout.training


def test_a_loader_gives_its_settings_and_not_its_order(tmp_path):
    """Dataset, batch size and collate function are the loader's; samples come in order."""
    sizes = []

    def model(batch):
        sizes.append(len(batch["x"]))
        return batch["x"].sum(1)

    loader = forebay.DataLoader(
        Numbers(20),
        batch_size=6,
        shuffle=True,
        drop_last=True,
        collate_fn=lambda rows: {"x": torch.stack(rows)},
    )
    report, table = predicted(
        model, loader, tmp_path, batch_size=None, num_workers=None, part_size=10
    )
    assert table["index"].to_pylist() == list(range(20))
    assert sizes == [6, 4, 6, 4]
    assert report.done == 20


def test_only_changed_rows_are_done_again(tmp_path):
    """A table whose rows change costs what has changed; of a row that leaves, nothing stays."""
    seen = []

    def load(row):
        return torch.tensor([float(row["x"])])

    def model(batch):
        seen.extend(batch[:, 0].tolist())
        return batch[:, 0]

    table = tmp_path / "rows.csv"

    def written(rows):
        table.write_text("\n".join(["x", *map(str, rows)]) + "\n")
        seen.clear()
        return predicted(model, table, tmp_path / "out", load=load, part_size=10, version="1")[1]

    written(range(30))
    assert len(seen) == 30
    found = written([*range(15), 99, *range(16, 30)])
    assert seen == [99]
    assert found["prediction"].to_pylist() == [*range(15), 99, *range(16, 30)]
    found = written([*range(15), 99, *range(16, 25)])
    assert seen == []
    assert found["index"].to_pylist() == list(range(25))
    found = written([*range(15)])
    assert found["prediction"].to_pylist() == list(range(15))


def test_parts_whose_files_cannot_be_seen_stay(tmp_path):
    """A disk that is not mounted changes nothing; what changed meanwhile is done again later."""
    folder, seen = tmp_path / "in", []
    folder.mkdir()
    for k in range(30):
        (folder / str(k)).write_text(str(k))
    rows = [{"path": str(folder / str(k)), "id": f"no file {k}"} for k in range(30)]

    def load(row):
        seen.append(int(Path(row["path"]).name))
        return torch.tensor([float(Path(row["path"]).read_text())])

    def again():
        seen.clear()
        return predicted(total, rows, tmp_path / "out", load=load, part_size=10, version="1")

    _, first = again()
    folder.rename(tmp_path / "away")
    report, table = again()
    assert (report.done, report.resumed, report.failed, seen) == (30, 30, 0, [])
    assert "note      the files of 30 samples cannot be seen now" in repr(report)
    assert table == first
    (tmp_path / "away").rename(folder)
    (folder / "3").rename(folder / "x")
    assert "the files of 1 sample cannot be seen now" in again()[0].notes[0]
    (folder / "x").rename(folder / "3")
    (folder / "12").write_text("100")
    report, table = again()
    assert (seen, report.notes) == ([12], ())
    assert table["prediction"][12].as_py() == 100.0


@pytest.mark.slow
def test_a_factory_is_called_once_in_every_worker(tmp_path, monkeypatch):
    """Each worker makes its own model and does whole parts; the parts are the same."""
    made = tmp_path / "made"
    made.mkdir()
    monkeypatch.setenv("FACTORY_FOLDER", str(made))
    data = Noise(100)
    report, table = predicted(Factory, data, tmp_path / "out", num_workers=2, part_size=10)
    assert 1 <= len(list(made.iterdir())) <= 2
    assert str(os.getpid()) not in [path.name for path in made.iterdir()]
    assert table["index"].to_pylist() == list(range(100))
    assert report.done == 100
    _, here = predicted(total, data, tmp_path / "here", part_size=10)
    assert here["prediction"].equals(table["prediction"])


def test_a_factory_in_this_process(tmp_path):
    """With no workers it is called here; a partial is one too."""
    _, table = predicted(functools.partial(Half, 0.25), Numbers(50), tmp_path)
    assert table["prediction"].to_pylist() == [float(k) for k in range(50)]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "threads"), [(0, 2), (1, 1)])
def test_a_factorys_worker_has_one_thread_and_this_process_keeps_its_own(
    tmp_path, workers, threads
):
    """A prediction in this process does not slow down what it does afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _, table = predicted(CountThreads, Numbers(3), tmp_path, num_workers=workers)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert table["prediction"].to_pylist() == [threads] * 3


class CountThreads(torch.nn.Module):
    def forward(self, batch):
        return torch.full((len(batch),), torch.get_num_threads())


def test_what_is_random_is_the_same_for_all_workers_and_after_a_resume(tmp_path):
    """Random datasets give one result, however many parts were done before."""
    _, whole = predicted(total, Noise(100), tmp_path / "whole")
    predicted(total, Noise(100), tmp_path / "torn")
    for part in (1, 3):
        (tmp_path / "torn" / f"part-{part:05d}.parquet").unlink()
    report, again = predicted(total, Noise(100), tmp_path / "torn")
    assert report.resumed == 60
    assert again.equals(whole)


def test_what_is_random_in_a_changed_row_does_not_depend_on_its_neighbours(tmp_path):
    """Rows that are made again between others that stay are as in a run that makes all."""

    def load(row):
        return torch.rand(())

    def made(names, output):
        rows = [{"x": name} for name in names]
        return predicted(lambda batch: batch, rows, output, load=load, version="1")[1]

    made("abcdefgh", tmp_path / "out")
    assert made("abXdefYh", tmp_path / "out").equals(made("abXdefYh", tmp_path / "whole"))


def test_a_changed_model_is_noticed(tmp_path):
    """Other weights, other code or another dataset are an error that shows the difference."""
    predicted(Half(), Numbers(20), tmp_path)
    predicted(Half(), Numbers(20), tmp_path)
    with pytest.raises(forebay.ChangedError, match="model"):
        predicted(Half(0.25), Numbers(20), tmp_path)
    with pytest.raises(forebay.ChangedError, match=r"parameter count: 20 -> 21"):
        predicted(Half(), Numbers(21), tmp_path)
    _, table = predicted(Half(0.25), Numbers(20), tmp_path, redo="*")
    assert table["prediction"].to_pylist() == [float(k) for k in range(20)]


class Endless(IterableDataset):
    """Has no indices."""

    def __iter__(self):
        return iter(())


ERRORS = {
    "iterable": (total, Endless(), {}, "iterable dataset"),
    "no dataset": (total, 5, {}, "map-style"),
    "no model": (5, Numbers(), {}, "nn.Module"),
    "empty": (total, Numbers(0), {}, "0 samples"),
    "load without table": (
        total,
        Numbers(),
        {"load": sample_of},
        "for files and the rows of a table",
    ),
    "no such table": (total, "nowhere.parquet", {"load": sample_of}, "does not exist"),
    "batch size": (total, Numbers(), {"batch_size": 0}, "batch_size=0"),
    "part size": (total, Numbers(), {"part_size": 0}, "part_size=0"),
    "threads": (Half, Numbers(), {"backend": "thread"}, "with a factory"),
    "timeout": (total, Numbers(), {"timeout": 5}, "num_workers=0 has none"),
    "endless": (total, Numbers(), {"timeout": math.inf, "num_workers": 1}, "^timeout=inf is not"),
    "no time": (total, Numbers(), {"timeout": math.nan, "num_workers": 1}, "^timeout=nan is not"),
    "less": (total, Numbers(), {"timeout": -1, "num_workers": 1}, "^timeout=-1 is not"),
    "ray": (total, Numbers(), {"backend": "ray", "num_workers": None}, "num_workers="),
    "absent GPU": (Half(), Numbers(), {"device": "cuda:99"}, r"torch finds \d+ CUDA devices here"),
    "absent GPU of workers": (Half, Numbers(), {"device": "cuda:99"}, "CUDA devices here"),
    "auto": (Half, Numbers(), {"num_workers": "auto"}, "every worker holds a model"),
    "no device": (Half(), Numbers(), {"device": "gpu"}, "device='gpu' is not valid"),
}


@pytest.mark.parametrize(("model", "data", "options", "words"), ERRORS.values(), ids=ERRORS)
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path, model, data, options, words):
    """The message says what is wrong; nothing is made."""
    with pytest.raises((forebay.OptionError, forebay.InputError), match=words):
        predicted(model, data, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_more_parts_than_names_in_order_are_refused(tmp_path):
    """Others read the folder by name: part-100000 would come before part-99999."""
    with pytest.raises(forebay.OptionError, match=r"100,001 files.*\n.*Use part_size=2 or more"):
        predicted(total, Numbers(100_001), tmp_path, part_size=1)


def test_a_table_needs_a_function(tmp_path):
    """Its rows are no samples."""
    (tmp_path / "rows.csv").write_text("x\n1\n")
    with pytest.raises(forebay.OptionError, match=r"is a table, and .*\n.*Pass load="):
        predicted(total, tmp_path / "rows.csv", tmp_path / "out")


def test_a_folder_without_files_is_named(tmp_path):
    """And so is a name that was mistyped; `load` would not help."""
    with pytest.raises(forebay.InputError, match="no files in this folder"):
        predicted(total, tmp_path, tmp_path / "out")
    with pytest.raises(forebay.InputError, match="typo: no such file or folder"):
        predicted(total, tmp_path / "typo", tmp_path / "out")


MISFITS = {
    "fewer rows": (lambda batch: batch[:3], "returned 3 rows.* for 8 samples"),
    "no rows": (lambda batch: batch.sum(), "returned 0 rows"),
    "a short list": (lambda batch: {"a": ["x"]}, "returned 1 row as 'a' for 8 samples"),
    "a string": (lambda batch: "x", "returned a str as 'prediction'"),
    "a set": (lambda batch: {"a": {1, 2}}, "returned a set as 'a'"),
    "complex": (lambda batch: batch.to(torch.complex64)[:, 0], "view_as_real"),
    "index": (lambda batch: {"index": batch}, "called 'index'"),
    "a long double": (lambda batch: batch.numpy().astype(np.longdouble), "of up to 64 bits"),
    "two keys of one name": (lambda batch: {1: batch, "1": batch + 1}, "would be called '1'"),
    "empty rows": (lambda batch: batch[:, :0], r"of shape \(8, 0\): its rows are empty"),
    "COO": (lambda batch: batch.to_sparse(), "'prediction' as a sparse tensor"),
    "CSR": (lambda batch: {"a": batch.to_sparse_csr()}, "'a' as a sparse tensor"),
    "meta": (lambda batch: batch.to("meta"), "'prediction' as a meta tensor"),
    "nested": (
        lambda batch: torch.nested.nested_tensor([*batch], layout=torch.jagged),
        "'prediction' as a nested tensor",
    ),
    "a masked array": (
        lambda batch: np.ma.masked_equal(batch.numpy(), 3),
        "'prediction' as a masked array",
    ),
    "a column with a lone surrogate": (
        lambda batch: {"x\ud800": batch},
        r"returned 'x\\ud800' in the name of a column, which Parquet cannot store",
    ),
    "an empty dict": (lambda batch: {}, "an empty dict"),
    "an empty tuple": (lambda batch: (), "an empty tuple"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "words"), MISFITS.values(), ids=MISFITS)
def test_outputs_that_are_no_rows_are_an_error(tmp_path, model, words):
    """The message names what was returned; no part is kept."""
    with pytest.raises(forebay.OutputError, match=words):
        predicted(model, Numbers(20), tmp_path)
    assert not list(tmp_path.glob("part-*"))


def test_shapes_that_differ_are_a_column_of_arrays_with_their_shapes(tmp_path):
    """In all parts, also in those that were written before another shape came."""

    def model(batch):
        return batch[:, : 2 if (batch == 40).any() else 4]

    _, table = predicted(model, Numbers(100), tmp_path)
    schemas = {str(pq.read_schema(path)) for path in tmp_path.glob("part-*")}
    assert len(schemas) == 1 and "shape: list" in schemas.pop()
    found = table["prediction"].to_pylist()
    assert found[20] == {"data": [20.0] * 4, "shape": [4]}
    assert found[41] == {"data": [41.0] * 2, "shape": [2]}


def half_of(path):
    """Make a model with the weight that a file says."""
    return Half(float(path.read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_factorys_checkpoint_that_changed_is_noticed(tmp_path, num_workers):
    """Also where every part is done; what was accepted is remembered."""
    weights, out = tmp_path / "weights", tmp_path / "out"
    make = functools.partial(half_of, weights)
    options = {"part_size": 10, "num_workers": num_workers}
    weights.write_text("0.5")
    predicted(make, Numbers(20), out, **options)
    report, _ = predicted(make, Numbers(20), out, **options)
    assert (report.done, report.resumed) == (20, 20)
    weights.write_text("0.25")
    for _ in range(2):
        with pytest.raises(forebay.ChangedError, match="the weights of its model differ"):
            predicted(make, Numbers(20), out, **options)
        (out / "part-00001.parquet").unlink(missing_ok=True)
    predicted(make, Numbers(20), out, accept_changes=True, **options)
    _, table = predicted(make, Numbers(20), out, **options)
    expected = [2.0 * k if k < 10 else float(k) for k in range(20)]
    assert table["prediction"].to_pylist() == expected


def test_weights_that_a_factory_draws_at_random_are_the_same_each_time(tmp_path):
    """In whichever worker, for whichever part: otherwise no run could be continued."""
    make = functools.partial(torch.nn.Linear, 4, 1)
    _, table = predicted(make, Numbers(20), tmp_path, part_size=10)
    (tmp_path / "part-00001.parquet").unlink()
    _, again = predicted(make, Numbers(20), tmp_path, part_size=10)
    assert again.equals(table)


def files_named(paths):
    """Load what each says."""
    return torch.full((4,), float(Path(paths).read_text()))


def test_files_need_a_function(tmp_path):
    """Their paths are no samples; and a folder of forebay's stands for its table."""
    (tmp_path / "a.txt").write_text("1")
    with pytest.raises(forebay.OptionError, match=r"names files, and .*\n.*Pass load="):
        predicted(total, tmp_path, tmp_path / "out")
    with pytest.raises(forebay.OptionError, match="lies in the input folder"):
        predicted(total, tmp_path, tmp_path / "out", load=files_named)
    with pytest.raises(forebay.InputError, match="no such file or folder"):
        predicted(total, tmp_path / "nowhere", tmp_path / "out", load=files_named)
