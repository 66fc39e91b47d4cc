"""Split recordings into overlapping pieces of two seconds.

    forebay preprocess examples/split_audio.py:split_audio examples/recordings.csv pieces/

Only one piece is in memory at a time, so a recording may be larger than memory.
"""

from pathlib import Path

import soundfile

WINDOW_S = 2.0
OVERLAP_S = 0.5


def split_audio(source, out, window_s=WINDOW_S, overlap_s=OVERLAP_S):
    """Write the pieces of one recording, and yield the position of each.

    The last piece may be shorter. A last piece that would only repeat the overlap is not written.
    """
    # A manifest's row comes as a dict, anything else as a path.
    row = source if isinstance(source, dict) else {"path": source, "label": None}
    path = Path(row["path"])
    with soundfile.SoundFile(path) as recording:
        rate = recording.samplerate
        window, overlap = round(window_s * rate), round(overlap_s * rate)
        # 16-bit recordings are read as they are, so their pieces are exact copies.
        dtype = "int16" if recording.subtype == "PCM_16" else "float32"
        for k, piece in enumerate(recording.blocks(window, overlap, dtype=dtype)):
            destination = out / f"{path.stem}-{k:04d}.flac"
            soundfile.write(destination, piece, rate)
            yield {
                "destination": destination,
                "start_s": k * (window - overlap) / rate,
                "duration_s": len(piece) / rate,
                "label": row["label"],
            }
