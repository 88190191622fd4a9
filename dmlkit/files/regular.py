"""Telling files from folders and pipes."""

from pathlib import Path

from dmlkit.errors import UserError


def refuse_what_is_no_file(path: Path) -> None:
    """Make sure that a path that is there is a file: not a folder, nor a pipe, for which one would wait without end.

    Raises:
        UserError: it is something else.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is {'a folder' if path.is_dir() else 'no regular file'}; expected a file")
