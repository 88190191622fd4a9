"""Bytes out of tar files that stay as they are: nothing is ever extracted.

Reads are ``os.pread``: they share no position, so processes that were forked may use one open file.
"""

import os
from functools import lru_cache
from typing import NamedTuple

from dmlkit.files.regular import check_regular

MAX_BYTES = 640_000_000  # of an image: 80 megapixels, the largest that is decoded, with 8 bytes each
MOST_OPEN = 64  # tar files a process keeps open, of the 256 files that macOS allows; opening takes 1 ms on a network


class Stamp(NamedTuple):
    """What tells whether a file is still the same."""

    bytes: int
    modified: int
    """Nanoseconds."""


class Place(NamedTuple):
    """Where an image lies in its tar file."""

    offset: int
    size: int


class OpenFile:
    """A file that is open until nobody needs it."""

    def __init__(self, path: str) -> None:
        check_regular(path)
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def stamp_of(path: str) -> Stamp:
    """The stamp of a file.

    Raises:
        OSError: it is missing.
    """
    status = os.stat(path)  # noqa: PTH116 - Path costs twice the time, for each of thousands of files
    return Stamp(status.st_size, status.st_mtime_ns)


def read_place(path: str, place: Place, stamp: Stamp) -> bytes:
    """Some bytes of a tar file.

    Args:
        path: the tar file.
        place: the bytes.
        stamp: of the file when the place was looked up.

    Raises:
        OSError: the file is missing, or has changed since; or there are more bytes than an image has.
    """
    if place.size > MAX_BYTES:
        raise OSError(f"it has {place.size:,} bytes; expected at most {MAX_BYTES:,}")
    file = _opened(os.path.abspath(path), stamp)  # noqa: PTH100 - Path costs ten times the time, at every image
    status = os.fstat(file.descriptor)
    if (status.st_size, status.st_mtime_ns) != stamp:
        raise OSError(f"{path} has changed since its images were looked up; start again")
    content = os.pread(file.descriptor, place.size, place.offset)
    while len(content) < place.size:  # a network file system may give less at once
        more = os.pread(file.descriptor, place.size - len(content), place.offset + len(content))
        if not more:
            raise OSError(f"{path} ends before it")
        content += more
    return content


@lru_cache(maxsize=MOST_OPEN)
def _opened(path: str, stamp: Stamp) -> OpenFile:  # noqa: ARG001 - a file that was replaced is opened anew
    return OpenFile(path)
