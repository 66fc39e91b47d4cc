"""The ledger of an output folder, local or in a bucket, read from outside."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.base.files import is_url, local_path
from forebay.base.output_names import PRIVATE
from forebay.errors import LedgerError
from forebay.ledger.database import NAME
from forebay.ledger.lock import Holder

if TYPE_CHECKING:
    from forebay.ledger.snapshot import Snapshot


@contextmanager
def newest_ledger(output: str | os.PathLike[str]) -> Iterator[tuple[Path, Holder | None]]:
    """Find the ledger of a place, to be read from outside with `forebay.ledger.database`.

    That of a URL is the local one, or else a copy of that in the bucket, whichever is newer.
    """
    text = local_path(output)
    if not is_url(text):
        yield Path(text) / PRIVATE, None
        return
    from forebay.base.file_stores import Store
    from forebay.ledger.snapshot import read_snapshot
    from forebay.outputs.bucket import private_folder_of
    from forebay.outputs.ledger_copy import LEDGER, read_run

    store = Store(text)
    there, private = read_run(store), private_folder_of(store) / PRIVATE
    local = private / NAME
    if there is not None and local.is_file() and local.stat().st_size:
        meta = read_snapshot(private).meta
        generation = int(meta.get("generation", 0))
        if meta.get("lineage") == there.lineage and generation >= there.generation:
            yield private, None
            return
    with tempfile.TemporaryDirectory() as scratch:
        if not store.download(LEDGER, Path(scratch, NAME)):
            raise LedgerError(
                f"{store.url} holds no ledger: it is not an output of forebay's\n"
                "  Give the URL that was given as `output`."
            )
        yield Path(scratch), None if there is None else there.live_holder


def snapshot_of(output: str | os.PathLike[str]) -> Snapshot:
    """Read the counts in the ledger of a place from outside."""
    from forebay.ledger.snapshot import read_snapshot

    with newest_ledger(output) as (folder, live):
        return read_snapshot(folder, live)
