"""Changes of the images behind stored figures, noticed by a hash of their files, boxes and labels."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.files.regular import file_checksum

READERS = 8  # threads: a checksum releases Python's lock


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
    """Return a hash of labels, boxes and files, by their sizes and times or contents; None for images in memory.

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
    for index, (mark, label) in enumerate(zip(marks, dataset.label_names(dataset.labels), strict=True)):
        digest.update(f"{mark}\0{label}\0{dataset.box(index)}\0".encode())
    return digest.hexdigest()


def are_same_files(dataset: Dataset, files: str | None, contents: str | None) -> bool:
    """Return whether images have the recorded labels, sizes and times, or else contents, which takes longer.

    Args:
        files: recorded hash of the sizes and times; None, of images in memory, counts as the same.
    """
    if files is None or hash_files(dataset) in (None, files):
        return True
    return contents is not None and hash_files(dataset, contents=True) == contents


def _content(path: str) -> object:
    """Return the size and CRC-32 of a file, or what `stamp` returns for a missing file."""
    size, _ = mark = stamp(path)
    return mark if size < 0 else (size, file_checksum(Path(path)))
