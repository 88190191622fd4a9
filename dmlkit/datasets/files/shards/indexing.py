"""Creation of the index of shards, and its update for shards that have changed."""

import logging
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from threading import Timer
from typing import Any

from dmlkit.datasets.files.shards.scan import scan_shard
from dmlkit.datasets.files.tar.index_file import arrow_table, read_index, write_index
from dmlkit.datasets.files.tar.reading import Stamp, stamp_of
from dmlkit.files.lock import sole_writer

Stamps = dict[str, Stamp]
MOST_NAMED = 5  # shards in a message
WARN_AFTER = 5.0  # seconds


def indexed(root: Path, shards: Sequence[str], file: Path) -> tuple[Stamps, Any]:
    """Return the stamps of shards and a pyarrow table of their images, see `index_file`.

    The index is read from its file, which is first written if it is missing or out of date. If several ranks start
    together, one reads the shards and the others wait.

    Args:
        root: folder of the dataset.
        shards: tar files, relative to the root.
        file: file of the index.

    Raises:
        UserError: a shard cannot be read, or the file is not an index by dmlkit or cannot be written.
    """
    stamps = {shard: stamp_of(str(root / shard)) for shard in shards}
    known, rows = _known(file)
    if known == stamps:
        return stamps, rows
    if not _is_writable(file.parent):
        logging.getLogger("dmlkit").warning(
            f"{file}: the folder is read-only, so the shards are indexed again at every start; set dataset.index to a "
            "file in a writable folder"
        )
        return stamps, _joined(_tables(root, stamps, known, rows))
    with sole_writer(file.parent, what="an indexing of shards", patience=inf):
        known, rows = _known(file)  # again: another process may have written it meanwhile
        if known != stamps:
            _warn_of_changes(file, stamps, known)
            with _warned_if_slow(f"{file}: indexing {len(stamps)} shards, once; this may take minutes"):
                write_index(file, stamps, _tables(root, stamps, known, rows))
            rows = read_index(file)[1]
    return stamps, rows


def _known(file: Path) -> tuple[Stamps, Any]:
    """Return the stamps and the rows of an index; both are empty if the file does not exist."""
    if not file.exists():
        return {}, arrow_table([])
    document, rows = read_index(file)
    return document.shards, rows


def _is_writable(folder: Path) -> bool:
    return os.access(next(above for above in (folder, *folder.absolute().parents) if above.exists()), os.W_OK)


def _tables(root: Path, stamps: Stamps, known: Stamps, rows: Any) -> Iterator[Any]:
    """Yield the rows of each shard, from the index if the shard has not changed."""
    from pyarrow import compute

    for shard, stamp in stamps.items():
        if known.get(shard) == stamp:
            yield rows.filter(compute.field("shard") == shard)
        else:
            yield scan_shard(root, shard)


def _joined(tables: Iterator[Any]) -> Any:
    import pyarrow as pa

    return pa.concat_tables(list(tables))


def _warn_of_changes(file: Path, stamps: Stamps, known: Stamps) -> None:
    changed = [shard for shard, stamp in known.items() if stamps.get(shard) != stamp]
    if changed:
        more = f" and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
        logging.getLogger("dmlkit").warning(
            f"{file}: shards changed or removed since it was written: {', '.join(changed[:MOST_NAMED])}{more}; "
            "the index is updated"
        )


@contextmanager
def _warned_if_slow(message: str) -> Generator[None]:
    timer = Timer(WARN_AFTER, logging.getLogger("dmlkit").warning, [message])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
