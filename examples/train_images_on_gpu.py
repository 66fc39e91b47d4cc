"""Train on JPEGs that the GPU decodes; without a GPU, or a decoder for it, workers decode them.

    python examples/train_images_on_gpu.py                      # on a few images that it makes
    python examples/train_images_on_gpu.py --images path/to/train --batch-size 256 --buffer 30GB

The decoder is that of torchcodec 0.16 or torchvision 0.20, or newer. With it, workers only read
files, and whole batches are decoded and cropped on the GPU. Otherwise workers decode and crop each
image with Pillow. Flips and colours are changed on the device in both cases, and each image looks
different in each epoch.
"""

from functools import partial

import numpy as np
import torch
from PIL import Image
from torch import nn
from train_images import (
    COLOUR_CHANGE,
    CROP,
    MEAN,
    SHORT_SIDE,
    STD,
    ImageFolder,
    command_line,
    make_model,
    random_crop,
    run,
)

import forebay


class EncodedFolder(ImageFolder):
    """Maps a number to (JPEG, label): the bytes of the file, and the class's number."""

    def __getitem__(self, index):
        path, label = self.images[index]
        return path.read_bytes(), label


class CroppedFolder(ImageFolder):
    """Maps a number to (image, label): a random crop, uint8 (3, 224, 224), and its class."""

    def __getitem__(self, index):
        path, label = self.images[index]
        with Image.open(path) as image:
            pixels = np.array(random_crop(image))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), label


def decoder_for(device):
    """Return a function that decodes a list of JPEGs in one call on a GPU; None if there is none.

    It takes uint8 tensors of encoded bytes, which must be in host memory, and returns uint8 tensors
    (3, height, width) on the device.
    """
    if torch.device(device).type != "cuda":
        return None
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError):  # not installed, too old, or for another torch
        try:
            from torchvision.io import decode_jpeg
        except (ImportError, OSError, RuntimeError):
            return None
    return partial(decode_jpeg, mode="RGB", device=device)


class Augment:
    """Makes the model's input of a batch, on the device: a `device_transform`.

    Args:
        device: Where the batches are.
        decode: Decodes a list of JPEGs; None if the images are decoded and cropped already.
    """

    def __init__(self, device, decode=None):
        self.decode = decode
        self.mean, self.std = MEAN.to(device), STD.to(device)

    def __call__(self, batch, generator):
        """Return (images, labels): floats (batch, 3, 224, 224) around zero, and int64 (batch,).

        Random numbers come from `generator`, which the loader seeds for each batch.
        """
        images, labels = batch
        if self.decode is not None:
            images = cropped(self.decode(list(images)), generator)
        images = recoloured(flipped(images, generator), generator)
        return images.sub_(self.mean).div_(self.std), labels


def cropped(images, generator):
    """Return squares of 224 pixels, cut anywhere from each image at a random size."""
    # All random numbers at once, because reading them waits for the device.
    draws = torch.rand(len(images), 3, generator=generator, device=images[0].device).tolist()
    squares = []
    for image, (size, x, y) in zip(images, draws, strict=True):
        height, width = image.shape[1:]
        short_side = SHORT_SIDE[0] + size * (SHORT_SIDE[1] - SHORT_SIDE[0])
        side = max(1, int(CROP * min(height, width) / short_side))
        left, top = int(x * (width - side + 1)), int(y * (height - side + 1))
        square = image[None, :, top : top + side, left : left + side].float()
        squares.append(
            nn.functional.interpolate(square, size=(CROP, CROP), mode="bilinear", antialias=True)
        )
    return torch.cat(squares)


def flipped(images, generator):
    """Return the images, each mirrored with probability 1/2."""
    chances = torch.rand(len(images), 1, 1, 1, generator=generator, device=images.device)
    return torch.where(chances < 0.5, images.flip(3), images)


def recoloured(images, generator):
    """Return images of 0 to 255 as floats of 0 to 1, with other brightness and contrast."""
    changes = torch.empty(2, len(images), 1, 1, 1, device=images.device)
    changes.uniform_(1 - COLOUR_CHANGE, 1 + COLOUR_CHANGE, generator=generator)
    brightness, contrast = changes
    images = images.float().div(255).mul_(brightness)
    grey = images.mean(dim=(1, 2, 3), keepdim=True)
    return torch.lerp(grey, images, contrast).clamp_(0, 1)


def train(folder, epochs, batch_size, num_workers, buffer, seed, device):
    """Train for some epochs, print the progress, and return the mean loss of each."""
    torch.manual_seed(seed)  # the model's first weights; the loader has its own seed
    decode = decoder_for(device)
    if decode is None:
        dataset, collate = CroppedFolder(folder), None
        print(f"on {device}; decoded by workers, with Pillow")
    else:
        dataset, collate = EncodedFolder(folder), forebay.collate.packed()
        print(f"on {device}; decoded there, with {decode.func.__module__}")
    model = make_model(len(dataset.classes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with forebay.DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        collate_fn=collate,
        buffer=buffer,
        seed=seed,
        device=device,
        device_transform=Augment(device, decode),
    ) as loader:
        for epoch in range(epochs):
            # On the device: to read each loss would be to wait for each step.
            total = torch.zeros((), device=device)
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach() * len(labels)
            losses.append(total.item() / len(dataset))
            print(f"epoch {epoch}: mean loss {losses[-1]:.4f}")
        print(loader.statistics())
    return losses


if __name__ == "__main__":
    options = command_line(__doc__.splitlines()[0])
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run(train, **vars(options.parse_args()))
