"""Keep the index of shards: made once, and anew for those that have changed."""

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
TELL_AFTER = 5.0  # seconds


def indexed(root: Path, shards: Sequence[str], file: Path) -> tuple[Stamps, Any]:
    """The stamps of shards, and where their images lie: a pyarrow table, see `index_file`.

    The index is read from its file, which is written first where it is missing or of other shards. Of ranks that start
    together one goes through the shards, and the others wait.

    Args:
        root: the folder of the dataset.
        shards: the tar files, relative to it.
        file: the index.

    Raises:
        UserError: a shard cannot be read; or the file is none of dmlkit's, or cannot be written.
    """
    stamps = {shard: stamp_of(str(root / shard)) for shard in shards}
    known, rows = _known(file)
    if known == stamps:
        return stamps, rows
    if not _is_writable(file.parent):
        logging.getLogger("dmlkit").warning(
            f"{file}: its folder is read-only, so the shards are gone through at every start; name a file elsewhere by "
            "dataset.index"
        )
        return stamps, _joined(_tables(root, stamps, known, rows))
    with sole_writer(file.parent, what="an indexing of shards", patience=inf):
        known, rows = _known(file)  # again: another process may have written it meanwhile
        if known != stamps:
            _tell_changes(file, stamps, known)
            with _told_if_slow(f"{file}: {len(stamps)} shards are gone through, once; this may take minutes"):
                write_index(file, stamps, _tables(root, stamps, known, rows))
            rows = read_index(file)[1]
    return stamps, rows


def _known(file: Path) -> tuple[Stamps, Any]:
    """What an index is of, and its rows; nothing where there is none."""
    if not file.exists():
        return {}, arrow_table([])
    document, rows = read_index(file)
    return document.shards, rows


def _is_writable(folder: Path) -> bool:
    return os.access(next(above for above in (folder, *folder.absolute().parents) if above.exists()), os.W_OK)


def _tables(root: Path, stamps: Stamps, known: Stamps, rows: Any) -> Iterator[Any]:
    """The rows of each shard: those that are known, if it is as it was."""
    from pyarrow import compute

    for shard, stamp in stamps.items():
        if known.get(shard) == stamp:
            yield rows.filter(compute.field("shard") == shard)
        else:
            yield scan_shard(root, shard)


def _joined(tables: Iterator[Any]) -> Any:
    import pyarrow as pa

    return pa.concat_tables(list(tables))


def _tell_changes(file: Path, stamps: Stamps, known: Stamps) -> None:
    changed = [shard for shard, stamp in known.items() if stamps.get(shard) != stamp]
    if changed:
        more = f" and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
        logging.getLogger("dmlkit").warning(
            f"{file}: changed or gone since it was written: {', '.join(changed[:MOST_NAMED])}{more}; it is written anew"
        )


@contextmanager
def _told_if_slow(message: str) -> Generator[None]:
    timer = Timer(TELL_AFTER, logging.getLogger("dmlkit").warning, [message])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
