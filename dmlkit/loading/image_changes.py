"""Changes of the images behind stored features and figures: noticed by a hash of their files, and said in words."""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.files.regular import file_checksum

READERS = 8  # threads: a checksum releases Python's lock
OTHER_LIST = "another list of images"


def stamp(path: str) -> tuple[int, int]:
    """Return size in bytes and modification time in nanoseconds of a file, by which a change is noticed.

    For a missing file, both are -1.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - Path takes twice the time, for each of thousands of files
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def hash_files(dataset: Dataset, *, contents: bool = False) -> str | None:
    """Return a hash of the sizes and times of the files of all images, or of their contents; None for images in memory.

    Sizes and times take 2 us per image, and contents as long as reading all files; they show that files which were
    copied without their times are the same.
    """
    if dataset.in_memory:
        return None
    digest = hashlib.sha256()
    if contents:
        with ThreadPoolExecutor(READERS) as pool:
            marks = [str(mark) for mark in pool.map(_content, dataset.paths)]
    else:
        marks = (str(stamp(path)) for path in dataset.paths)
    for mark in marks:
        digest.update(f"{mark}\0".encode())
    return digest.hexdigest()


def are_same_files(dataset: Dataset, files: str | None, contents: str | None) -> bool:
    """Return whether images have the recorded sizes and times, or else the recorded contents, which takes longer.

    Args:
        files: recorded hash of the sizes and times; None, as of an older version, counts as the same.
    """
    if files is None or hash_files(dataset) in (None, files):
        return True
    return contents is not None and hash_files(dataset, contents=True) == contents


def _content(path: str) -> object:
    """Return the size and CRC-32 of a file, or what `stamp` returns for a missing file."""
    size, _ = mark = stamp(path)
    return mark if size < 0 else (size, file_checksum(Path(path)))


def describe_changes(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Return how many images were added, removed and changed, and the first of each.

    Example:
        >>> describe_changes({"a.jpg": 1, "b.jpg": 2}, {"a.jpg": 3, "c.jpg": 4, "d.jpg": 5})
        '2 images added, e.g. c.jpg; 1 image removed: b.jpg; 1 image changed: a.jpg'
    """
    kinds = {
        "added": [path for path in after if path not in before],
        "removed": [path for path in before if path not in after],
        "changed": [path for path, known in after.items() if path in before and before[path] != known],
    }
    parts = [
        f"1 image {kind}: {paths[0]}" if len(paths) == 1 else f"{len(paths)} images {kind}, e.g. {paths[0]}"
        for kind, paths in kinds.items()
        if paths
    ]
    return "; ".join(parts) or OTHER_LIST


def changes_since(items: Path, dataset: Dataset) -> str:
    """Return how a dataset differs from the images of stored embeddings, as far as their file names them."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table: Any = parquet.read_table(items)
        rows: dict[str, list[Any]] = {name: table[name].to_pylist() for name in table.column_names}
        stored = [rows[name] for name in ("label", "bytes", "modified") if name in rows]
        before = dict(zip(rows["path"], zip(*stored, strict=True), strict=True))
    except (OSError, KeyError, pa.ArrowException):
        return OTHER_LIST
    labeled = zip(dataset.paths, dataset.label_names(dataset.labels), strict=True)
    return describe_changes(
        before, {path: (label, *(stamp(path) if len(stored) > 1 else ())) for path, label in labeled}
    )
