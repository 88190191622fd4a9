"""Atomic writes of files and folders: a crash never leaves a partly written one."""

import ctypes
import json
import os
import re
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import Any
from uuid import uuid4

try:
    import fcntl
except ImportError:  # Windows: partial files of killed processes are not removed
    fcntl = None

NAME = 200  # characters of a file's name that its partial keeps: a file system allows 255
FULL = (ENOSPC, EDQUOT, EFBIG)  # the disk is full, or the limit of the quota or of the file's size is reached
PARTIAL = re.compile(r"\..+\.[0-9a-f]{32}\.partial", re.DOTALL)


@contextmanager
def atomic_write(path: Path) -> Generator[Path]:
    """Yield a temporary path to write to; if the block succeeds, it is flushed to disk and renamed to ``path``.

    Each call has its own temporary path, so any number of processes may write the file at once: the last one wins.
    Temporary files of killed processes are removed.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "file.txt"
        >>> with atomic_write(target) as partial:
        ...     _ = partial.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    folder, name = path.parent, path.name[:NAME]
    with _errors_named(path, name):
        _remove_abandoned(folder, name)
        partial, lock = _begin(folder, name)
        try:
            yield partial
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
            os.close(lock)


@contextmanager
def atomic_folder(path: Path) -> Generator[Path]:
    """Yield a temporary folder to fill; if the block succeeds, it takes the place of ``path`` in one step.

    A kill leaves either an earlier folder or the new one there: Linux and macOS exchange the two. Where the file system
    cannot, there is none for a moment. What an earlier kill has left next to it is removed.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "folder"
        >>> for text in ("old", "new"):
        ...     with atomic_folder(target) as partial:
        ...         _ = (partial / text).write_text(text)
        >>> [entry.name for entry in target.iterdir()], len(list(target.parent.iterdir()))
        (['new'], 1)
    """
    path = path.resolve()  # what a link leads to is replaced, not the link
    name = path.name[:NAME]
    with _errors_named(path, name):
        _remove_abandoned(path.parent, name)
        partial, lock = _begin(path.parent, name, is_folder=True)
        try:
            yield partial
            for entry in partial.iterdir():
                with entry.open("rb+") as file:
                    os.fsync(file.fileno())
            if not path.exists():
                partial.rename(path)
            elif not exchange(partial, path):
                earlier = partial.with_name(f".{name}.{uuid4().hex}.partial")
                path.rename(earlier)
                try:
                    partial.rename(path)
                except OSError:
                    earlier.rename(path)
                    raise
                shutil.rmtree(earlier)
        finally:
            if partial.exists():  # incomplete, or the earlier folder
                shutil.rmtree(partial)
            os.close(lock)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two paths in one step; return False where the system or the file system cannot."""
    if sys.platform not in ("linux", "darwin"):
        return False
    library, (first, second) = ctypes.CDLL(None), (os.fsencode(one), os.fsencode(other))
    if hasattr(library, "renameat2"):
        return library.renameat2(-100, first, -100, second, 2) == 0  # AT_FDCWD, RENAME_EXCHANGE
    return hasattr(library, "renamex_np") and library.renamex_np(first, second, 2) == 0  # RENAME_SWAP


@contextmanager
def _errors_named(path: Path, name: str) -> Generator[None]:
    """Put the requested path into an OSError about its partial file, or about a full disk, which names no file."""
    try:
        yield
    except OSError as error:
        named = None if error.filename is None else Path(os.fsdecode(error.filename))
        if error.errno in FULL if named is None else is_partial(named) and _target_name(named) == name:
            error.filename, error.filename2 = str(path), None
        raise


def is_partial(path: Path) -> bool:
    """Return whether a path has the name of a temporary file of `atomic_write`."""
    return PARTIAL.fullmatch(path.name) is not None


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, atomically."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def json_text(data: dict[str, Any]) -> str:
    """Return indented JSON."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _target_name(partial: Path) -> str:
    """Return the name, cut to `NAME` characters, of the file that a partial belongs to."""
    return partial.name[1:].rsplit(".", 2)[0]


def _begin(folder: Path, name: str, *, is_folder: bool = False) -> tuple[Path, int]:
    """Create a partial; return it with a descriptor that keeps its lock until it is closed or the process ends."""
    while True:
        partial = folder / f".{name}.{uuid4().hex}.partial"
        partial.mkdir() if is_folder else partial.touch(exist_ok=False)
        with suppress(FileNotFoundError):  # another process removed it as abandoned before it was locked
            lock = os.open(os.devnull if is_folder and fcntl is None else partial, os.O_RDONLY)
            _lock(lock, wait=True)
            if partial.exists():
                return partial, lock
            os.close(lock)


def _remove_abandoned(folder: Path, name: str) -> None:
    """Remove partials of a file whose writers have ended, which is known because their locks are free."""
    for entry in folder.iterdir():
        if is_partial(entry) and _target_name(entry) == name:
            with suppress(OSError):  # Windows opens no folders
                opened = os.open(entry, os.O_RDONLY)
                try:
                    if _lock(opened, wait=False):
                        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                finally:
                    os.close(opened)


def _lock(file: int, *, wait: bool) -> bool:
    """Lock a file and return whether that succeeded; on a file system without locks it never does."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
