"""Checks that a path that a user names is a regular file: reading a FIFO or a device might never end."""

import os
import stat
from pathlib import Path
from zlib import crc32

from dmlkit.errors import UserError

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def check_regular(path: str | Path) -> None:
    """Check that a path is a regular file, or a link to one, before it is opened.

    Raises:
        OSError: the path is something else, which the message names, or it is missing.

    Example:
        >>> check_regular("/dev/zero")
        Traceback (most recent call last):
        ...
        OSError: this is a device; expected a regular file
    """
    kind = stat.S_IFMT(os.stat(path).st_mode)  # noqa: PTH116 - Path costs twice the time, for each of a million images
    if kind != stat.S_IFREG:
        raise OSError(f"this is {KINDS.get(kind, 'no file')}; expected a regular file")


def read_start(path: Path, size: int) -> bytes:
    """Read the first ``size`` bytes of a regular file. The size in its status is not used: files in /proc report 0.

    Raises:
        OSError: see `check_regular`; or the file cannot be read.
    """
    check_regular(path)
    with path.open("rb") as file:
        return file.read(size)


def read_text(path: Path, option: str, missing: str) -> str:
    """Read a text file that an option names; ``missing`` says what was expected if there is none.

    Raises:
        UserError: it is missing, not regular or not UTF-8.
    """
    require_regular_file(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{option} {path}: {missing}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option} {path}: cannot read this file: {error}") from error


def require_regular_file(path: Path) -> None:
    """Check that a path, if it exists, is a regular file.

    Raises:
        UserError: the path is something else.
    """
    try:
        check_regular(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: {error}") from error


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file, read a megabyte at a time."""
    checksum = 0
    with path.open("rb") as file:
        while content := file.read(2**20):
            checksum = crc32(content, checksum)
    return checksum
