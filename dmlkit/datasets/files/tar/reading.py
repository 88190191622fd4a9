"""Reading of bytes from tar files, without extracting them.

Reads use ``os.pread``, which has no shared position, so that forked processes can use the same open file.
"""

import os
from functools import lru_cache
from typing import NamedTuple

from dmlkit.files.regular import check_regular

MAX_BYTES = 640_000_000  # size of an image: the limit of 80 megapixels with 8 bytes each
MOST_OPEN = 64  # tar files that a process keeps open; macOS allows 256 files, and opening takes 1 ms on a network


class Stamp(NamedTuple):
    """Size and modification time of a file, by which a change is noticed."""

    bytes: int
    modified: int
    """Modification time in nanoseconds."""


class Place(NamedTuple):
    """Place of an image in its tar file, in bytes."""

    offset: int
    size: int


class OpenFile:
    """File descriptor that is closed when the object is no longer referenced."""

    def __init__(self, path: str) -> None:
        check_regular(path)
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def stamp_of(path: str) -> Stamp:
    """Return the stamp of a file.

    Raises:
        OSError: the file is missing.
    """
    status = os.stat(path)  # noqa: PTH116 - Path takes twice the time, for each of thousands of files
    return Stamp(status.st_size, status.st_mtime_ns)


def read_place(path: str, place: Place, stamp: Stamp) -> bytes:
    """Read bytes of a tar file.

    Args:
        path: tar file.
        place: place of the bytes.
        stamp: stamp of the file when the place was looked up.

    Raises:
        OSError: the file is missing or has changed since, or the place is larger than an image may be.
    """
    if place.size > MAX_BYTES:
        raise OSError(f"the image has {place.size:,} bytes; expected at most {MAX_BYTES:,}")
    file = _opened(os.path.abspath(path), stamp)  # noqa: PTH100 - Path takes ten times as long, for every image
    status = os.fstat(file.descriptor)
    if (status.st_size, status.st_mtime_ns) != stamp:
        raise OSError(f"{path} has changed since its images were looked up; start the command again")
    content = os.pread(file.descriptor, place.size, place.offset)
    while len(content) < place.size:  # a network file system may return fewer bytes per call
        more = os.pread(file.descriptor, place.size - len(content), place.offset + len(content))
        if not more:
            raise OSError(f"{path} ends before the image does")
        content += more
    return content


@lru_cache(maxsize=MOST_OPEN)
def _opened(path: str, stamp: Stamp) -> OpenFile:  # noqa: ARG001 - part of the cache key: a replaced file is opened again
    return OpenFile(path)
