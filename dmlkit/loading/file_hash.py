"""Hash of the files of a dataset's images, by which stored features and figures notice that a file has changed."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.tar import shard_and_name
from dmlkit.files.regular import file_checksum
from dmlkit.loading.cache import stamp

READERS = 8  # threads: a checksum releases Python's lock


def hash_files(dataset: Dataset, *, contents: bool = False) -> str | None:
    """Return a hash of the sizes and times of the files of all images, or of their contents; None for images in memory.

    Sizes and times take 2 us per image, and contents as long as reading all files; they show that files which were
    copied without their times are the same. An image in a tar file counts by the size and time of the tar file.
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
        dataset: the images; those in memory are always the same.
        files: recorded hash of the sizes and times; None, as of an older version, counts as the same.
        contents: recorded hash of the contents, if there is one.
    """
    if files is None or hash_files(dataset) in (None, files):
        return True
    return contents is not None and hash_files(dataset, contents=True) == contents


def _content(path: str) -> object:
    """Return the size and CRC-32 of a file, or what `stamp` returns for a missing file and an image in a tar file."""
    size, _ = mark = stamp(path)
    return mark if size < 0 or shard_and_name(path) is not None else (size, file_checksum(Path(path)))
