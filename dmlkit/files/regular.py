"""Reading what a user names: regular files alone, since a FIFO is waited on for ever and a device never ends."""

import os
import stat
from pathlib import Path

from dmlkit.errors import UserError

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def check_regular(path: str | Path) -> None:
    """Make sure that a path is a regular file, or leads to one, before something opens it.

    Raises:
        OSError: it is something else, which the message names; or it is missing.

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
    """The first ``size`` bytes of a regular file. Its size is not asked for: files of /proc say 0 and go on.

    Raises:
        OSError: see `check_regular`; or it cannot be read.
    """
    check_regular(path)
    with path.open("rb") as file:
        return file.read(size)


def refuse_what_is_no_file(path: Path) -> None:
    """Make sure that a path that is there is a regular file.

    Raises:
        UserError: it is something else.
    """
    try:
        check_regular(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: {error}") from error
