"""Compute how loud the pieces of recordings are: any function of a batch can be a model.

    forebay preprocess examples/split_audio.py:split_audio examples/recordings.csv pieces/
    forebay predict examples/loudness.py:loudness pieces/ out/ --load examples/loudness.py:beginning

The output of `predict` has the columns of the pieces' table and `prediction`.
"""

import soundfile
import torch

SAMPLES = 8_000  # half a second; no piece is shorter


def beginning(row):
    """Return the first half second of a piece: a float tensor [8000]."""
    sound, _ = soundfile.read(row["destination"], frames=SAMPLES, dtype="float32")
    return torch.from_numpy(sound)


def loudness(sounds):
    """Return the loudness of each sound of a batch in decibels; 0 is the maximum."""
    return 10 * sounds.square().mean(dim=1).clamp(min=1e-10).log10()
