"""Train on JPEGs in one folder per class, with augmented batches prefetched into a large buffer.

    python examples/train_images.py                             # on a few images that it makes
    python examples/train_images.py --images path/to/train --batch-size 256 --buffer 30GB

Each image is randomly cropped, recoloured and flipped in each epoch, on the CPU.
"""

import argparse
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import nn
from torch.utils.data import Dataset

import forebay

CROP = 224
SHORT_SIDE = (256, 480)
COLOUR_CHANGE = 0.4
# The statistics of ImageNet, which models trained on it expect.
MEAN = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)


class ImageFolder(Dataset):
    """Maps a number to (image, label): a float tensor (3, 224, 224), and the class's number."""

    def __init__(self, folder):
        self.classes = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
        self.images = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted(Path(folder, name).iterdir())
            if path.suffix.lower() in (".jpg", ".jpeg")
        ]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        path, label = self.images[index]
        with Image.open(path) as image:
            return to_tensor(flipped(recoloured(random_crop(image)))), label


# These functions draw from `random` and need not handle seeds. The loader seeds it for each sample,
# so an image looks different in each epoch, and the same in each run with the same `seed=`.


def random_crop(image):
    """Return a square of 224 pixels, cut anywhere from the image at a random size."""
    short_side = random.randint(*SHORT_SIDE)
    # A JPEG can be decoded at a half, a quarter or an eighth of its size: the less there is to
    # decode, the faster. It stays at least as large as it is asked to be.
    image.draft("RGB", (short_side, short_side))
    width, height = image.size
    # To cut 224 pixels from the resized image is to cut more or fewer from this one and resize what
    # is left, which is less work.
    side = CROP * min(width, height) / short_side
    left = random.uniform(0, width - side)
    top = random.uniform(0, height - side)
    return image.convert("RGB").resize(
        (CROP, CROP), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side)
    )


def recoloured(image):
    """Return the image with other brightness, contrast and colour, changed in a random order."""
    changes = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    for change in random.sample(changes, k=len(changes)):
        image = change(image).enhance(random.uniform(1 - COLOUR_CHANGE, 1 + COLOUR_CHANGE))
    return image


def flipped(image):
    """Return the image or, with probability 1/2, its mirror image."""
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


def to_tensor(image):
    """Return an image's pixels as floats (channel, row, column) around zero."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return pixels.float().div_(255).sub_(MEAN).div_(STD)


def make_images(folder, count, classes=("amber", "fern", "slate")):
    """Write `count` JPEGs into a folder for each class: smooth noise in the class's colour."""
    noise = np.random.default_rng(0)
    for number in range(count):
        label = number % len(classes)
        # A few random pixels, stretched to the size of a photograph.
        pixels = noise.integers(0, 160, size=(6, 8, 3), dtype=np.uint8)
        pixels[..., label % 3] += 90
        size = tuple(int(side) for side in noise.integers(400, 640, size=2))
        path = Path(folder, classes[label], f"{number:05d}.jpg")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(path, quality=90)


def make_model(classes):
    """Return a model that is just large enough to learn something."""
    return nn.Sequential(
        nn.Conv2d(3, 16, kernel_size=7, stride=4),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, classes),
    )


def train(folder, epochs, batch_size, num_workers, buffer, seed):
    """Train for some epochs, print the progress, and return the mean loss of each."""
    torch.manual_seed(seed)  # the model's first weights; the loader has its own seed
    dataset = ImageFolder(folder)
    model = make_model(len(dataset.classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    # `with` ends the workers here. Without it they would end with the program: the buffer is one
    # stream across epochs, and the loader cannot know which epoch is the last.
    with forebay.DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        buffer=buffer,
        seed=seed,
    ) as loader:
        for epoch in range(epochs):
            total = 0.0
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(labels)
            losses.append(total / len(dataset))
            print(f"epoch {epoch}: mean loss {losses[-1]:.4f}")
            now = loader.statistics()
            print(
                f"  {now.ready_batches} batches ({now.ready_bytes / 1e6:.0f} MB) are ready; "
                f"waited {now.waited_s:.2f} s for batches so far"
            )
        print(loader.statistics())
    return losses


def command_line(description):
    """Return a parser of the arguments of `run`."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--images", help="a folder that holds a folder of JPEGs for each class")
    options.add_argument("--count", type=int, default=96, help="images to make if there are none")
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--batch-size", type=int, default=16)
    options.add_argument("--num-workers", type=int, default=2)
    options.add_argument("--buffer", default="1GB", help="how much memory ready batches may take")
    options.add_argument("--seed", type=int, default=0)
    return options


def run(train, images, count, **chosen):
    """Train on a folder of images; if it is None, on `count` images that are made."""
    with tempfile.TemporaryDirectory() as made:
        if images is None:
            make_images(made, count)
        train(images or made, **chosen)


if __name__ == "__main__":
    run(train, **vars(command_line(__doc__.splitlines()[0]).parse_args()))
