"""The training examples do what they say, run as a person runs them: `python examples/NAME.py`."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import forebay
from forebay.runs.source_code import load_work

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).parents[1] / "examples"
LOSS = re.compile(r"^epoch (\d+): mean loss (\d+\.\d+)", re.MULTILINE)
RIGHT = re.compile(r"^epoch \d+: .* (\d+\.\d) % of (\d+) right$", re.MULTILINE)


@pytest.fixture
def run(trainers):
    """Runs an example, warnings as errors, and returns what it printed."""

    def run(name, *arguments, cwd):
        code, out, err = trainers.run(EXAMPLES / name, *arguments, cwd=cwd)
        assert (code, err) == (0, ""), f"{name}:\n{out}\n{err}"
        assert list(cwd.iterdir()) == [], "something is left behind"
        return out

    return run


def losses(printed):
    """Return the mean loss of each epoch; the epochs must be 0, 1, 2, …."""
    found = LOSS.findall(printed)
    assert [int(epoch) for epoch, _ in found] == list(range(len(found)))
    return [float(loss) for _, loss in found]


def part(name, file):
    """Return a function or class of an example."""
    return load_work(f"{EXAMPLES / file}:{name}")


# ---- images -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_images_are_learnt_the_same_way_by_any_number_of_workers(run, tmp_path):
    """The loss falls, statistics are told each epoch, and workers and buffer change no loss."""
    few = ("--count", "24", "--batch-size", "8", "--epochs", "2")
    one = run("train_images.py", *few, "--num-workers", "1", "--buffer", "40MB", cwd=tmp_path)
    two = run("train_images.py", *few, "--num-workers", "2", cwd=tmp_path)
    first, last = losses(one)
    assert last < 0.85 * first, "it learns"
    assert losses(two) == [first, last]
    told = re.findall(r"(\d+) batches \((\d+) MB\) are ready; waited (\d+\.\d+) s", one)
    assert len(told) == 2
    assert all(int(megabytes) <= 40 for _, megabytes, _ in told)
    assert re.search(r"^waits .* in total; 50% within", one, re.M), "the summary of the statistics"


@pytest.mark.slow
def test_a_folder_of_ones_own_images_is_trained_on(run, tmp_path):
    """`--images` names a folder, and nothing is written to it."""
    folder, here = tmp_path / "photographs", tmp_path / "here"
    here.mkdir()
    part("make_images", "train_images.py")(folder, 6, classes=("cat", "dog"))
    before = sorted(folder.rglob("*"))
    printed = run(
        "train_images.py", "--images", folder, "--epochs", "1", "--batch-size", "4", cwd=here
    )
    assert len(losses(printed)) == 1
    assert sorted(folder.rglob("*")) == before


# ---- images, decoded on a GPU -------------------------------------------------------------------


def decoded(files):
    """Decode JPEGs as a GPU's decoder would, whose arguments and results are the same."""
    assert type(files) is list
    assert all(file.is_cpu and file.dtype is torch.uint8 and file.dim() == 1 for file in files)
    images = [Image.open(io.BytesIO(file.numpy().tobytes())).convert("RGB") for file in files]
    return [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]


@pytest.mark.slow
def test_images_are_decoded_by_workers_where_no_decoder_is(run, tmp_path):
    """It says so, and the loss falls."""
    few = ("--count", "24", "--batch-size", "8", "--epochs", "2", "--device", "cpu")
    printed = run("train_images_on_gpu.py", *few, cwd=tmp_path)
    assert printed.startswith("on cpu; decoded by workers, with Pillow\n")
    first, last = losses(printed)
    assert last < first, "it learns"


@pytest.mark.slow
def test_packed_files_are_decoded_in_the_device_transform(tmp_path):
    """The path for a GPU, with a decoder of the CPU in its place; a seed gives the same batches."""
    part("make_images", "train_images.py")(tmp_path, 6)
    dataset = part("EncodedFolder", "train_images_on_gpu.py")(tmp_path)
    options = {"collate_fn": forebay.collate.packed(), "seed": 0, "shuffle": True, "device": "cpu"}
    options["device_transform"] = part("Augment", "train_images_on_gpu.py")("cpu", decoded)
    epochs = []
    for more in ({"num_workers": 0}, {"num_workers": 2, "buffer": "100MB"}):
        with forebay.DataLoader(dataset, batch_size=3, **options, **more) as loader:
            epochs += [list(loader), list(loader)]
    for one, other in zip(epochs[0] + epochs[1], epochs[2] + epochs[3], strict=True):
        assert all(map(torch.equal, one, other))
    labels = [sorted(torch.cat([labels for _, labels in epoch]).tolist()) for epoch in epochs]
    assert labels == [[0, 0, 1, 1, 2, 2]] * 4
    assert not any(torch.equal(one, other) for one, _ in epochs[0] for other, _ in epochs[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_decodes_what_pillow_decodes(tmp_path):
    """Almost: decoders round differently. Skipped without torchcodec or torchvision."""
    decode = part("decoder_for", "train_images_on_gpu.py")("cuda")
    if decode is None:
        pytest.skip("needs torchcodec 0.16 or torchvision 0.20")
    part("make_images", "train_images.py")(tmp_path, 6)
    dataset = part("EncodedFolder", "train_images_on_gpu.py")(tmp_path)
    files, _ = forebay.collate.packed()([dataset[at] for at in range(6)])
    for image, expected in zip(decode(list(files)), decoded(list(files)), strict=True):
        assert image.is_cuda
        assert image.shape == expected.shape
        assert (image.cpu().float() - expected.float()).abs().mean() < 2


# ---- IDs ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ids_are_trained_and_validated_side_by_side(run, tmp_path):
    """Each epoch ends with a look at all validation samples; in the end most are right."""
    printed = run("train_ids.py", "--count", "256", "--epochs", "3", cwd=tmp_path)
    all_losses, results = losses(printed), RIGHT.findall(printed)
    assert len(all_losses) == 3
    assert all_losses[-1] < 0.85 * all_losses[0]
    assert [seen for _, seen in results] == ["64"] * 3
    assert float(results[-1][0]) > 70


# ---- what a batch looks like --------------------------------------------------------------------


@pytest.mark.slow
def test_named_tuples_come_back_as_named_tuples(run, tmp_path):
    """The batch is a Sample with a Box in it: tensors stacked, texts kept as torch keeps them."""
    assert run("named_tuples.py", cwd=tmp_path) == (
        "batch             Sample\n"
        "batch.image       (4, 3, 8, 8) torch.float32\n"
        "batch.box         Box\n"
        "batch.box.corners [[0, 0, 3, 3], [1, 0, 4, 3], [2, 1, 5, 4], [3, 1, 6, 4]]\n"
        "batch.box.label   ('box-0', 'box-1', 'box-2', 'box-3')\n"
        "batch.source      ('image-0.jpg', 'image-1.jpg', 'image-2.jpg', 'image-3.jpg')\n"
        "batch.weight      (4,) torch.float64\n"
    )


@pytest.mark.slow
def test_words_are_padded_to_the_longest_of_their_batch(run, tmp_path):
    """Every word of the text comes back once, and no batch is wider than it must be."""
    words = []
    for line in run("padded_words.py", cwd=tmp_path).splitlines():
        rows, columns, lengths, spelled = re.fullmatch(
            r"\((\d+), (\d+)\) \[([\d, ]+)\] (.*)", line
        ).groups()
        in_batch = spelled.split()
        assert [int(length) for length in lengths.split(", ")] == [len(word) for word in in_batch]
        assert (int(rows), int(columns)) == (len(in_batch), max(map(len, in_batch)))
        words += in_batch
    text = part("TEXT", "padded_words.py").split()
    assert sorted(words) == sorted(text)
    assert words != text, "they are shuffled"
