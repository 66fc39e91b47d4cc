"""The training examples do what they say, run as a person runs them: `python examples/NAME.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from documents import ENVIRONMENT, HANG_S
from forebay.jobs.user_code.reference import load_work

EXAMPLES = Path(__file__).parents[1] / "examples"
LOSS = re.compile(r"^epoch (\d+): mean loss (\d+\.\d+)", re.MULTILINE)
RIGHT = re.compile(r"^epoch \d+: .* (\d+\.\d) % of (\d+) right$", re.MULTILINE)


def run(name, *arguments, cwd):
    """Run an example, warnings as errors, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, f"{name}:\n{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    assert list(cwd.iterdir()) == [], "something is left behind"
    return done.stdout


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
def test_the_images_are_learnt_the_same_way_by_any_number_of_workers(tmp_path):
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
    assert "waited_s=" in one.splitlines()[-1], "the last line shows all statistics"


@pytest.mark.slow
def test_a_folder_of_ones_own_images_is_trained_on(tmp_path):
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


def test_a_folder_is_a_class_and_each_look_at_an_image_is_another(tmp_path):
    """Labels follow the folders' names; augmentation is drawn again each time."""
    part("make_images", "train_images.py")(tmp_path, 4, classes=("cat", "dog"))
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    dataset = part("ImageFolder", "train_images.py")(tmp_path)
    assert dataset.classes == ["cat", "dog"]
    assert [label for _, label in dataset.images] == [0, 0, 1, 1]
    image, label = dataset[2]
    again, _ = dataset[2]
    assert label == 1
    assert not torch.equal(image, again)


@pytest.mark.parametrize("size", [(640, 400), (300, 2000), (90, 60)], ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_any_jpeg_becomes_a_square_of_floats(tmp_path, size, mode):
    """Wide, tall and small images, in colour, grey or for print, come out alike."""
    (tmp_path / "any").mkdir()
    Image.new(mode, size, 128 if mode == "L" else (128,) * len(mode)).save(
        tmp_path / "any" / "flat.JPEG"
    )
    image, _ = part("ImageFolder", "train_images.py")(tmp_path)[0]
    assert image.shape == (3, 224, 224)
    assert image.dtype == torch.float32
    assert image.is_contiguous()
    assert image.std(dim=(1, 2)).max() < 0.05, "one colour stays one colour"


# ---- IDs ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ids_are_trained_and_validated_side_by_side(tmp_path):
    """Each epoch ends with a look at all validation samples; in the end most are right."""
    printed = run("train_ids.py", "--count", "256", "--epochs", "3", cwd=tmp_path)
    all_losses, results = losses(printed), RIGHT.findall(printed)
    assert len(all_losses) == 3
    assert all_losses[-1] < 0.85 * all_losses[0]
    assert [seen for _, seen in results] == ["64"] * 3
    assert float(results[-1][0]) > 70


def test_each_id_is_in_one_part_with_a_label_and_a_file(tmp_path):
    """The partition holds every ID once, and a sample is its file's tensor and its label."""
    partition, labels = part("make_data", "train_ids.py")(tmp_path, 20)
    every = partition["train"] + partition["validation"]
    assert len(partition["train"]) == 15
    assert sorted(every) == sorted(set(every)) == sorted(labels)
    assert sorted(path.stem for path in tmp_path.glob("*.pt")) == sorted(every)
    samples = part("Samples", "train_ids.py")(tmp_path, partition["validation"], labels)
    tensor, label = samples[1]
    wanted = partition["validation"][1]
    assert torch.equal(tensor, torch.load(tmp_path / f"{wanted}.pt", weights_only=True))
    assert label == labels[wanted]


# ---- what a batch looks like --------------------------------------------------------------------


@pytest.mark.slow
def test_named_tuples_come_back_as_named_tuples(tmp_path):
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
def test_words_are_padded_to_the_longest_of_their_batch(tmp_path):
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


def test_padding_is_no_letter():
    """A shorter word's row is filled with zeros, and its length says where."""
    words = part("Words", "padded_words.py")(["abc", "z"])
    batch = part("padded", "padded_words.py")([words[0], words[1]])
    assert batch.values.tolist() == [[1, 2, 3], [26, 0, 0]]
    assert batch.lengths.tolist() == [3, 1]
    assert part("spelled", "padded_words.py")(batch) == ["abc", "z"]
