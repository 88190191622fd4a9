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
PARTIAL = re.compile(r"\.(.+)\.[0-9a-f]{32}\.partial", re.DOTALL)  # of the file whose name, cut to `NAME`, is the group


@contextmanager
def atomic_write(path: Path) -> Generator[Path]:
    """Yield a temporary path to write to; if the block succeeds, it is flushed to disk and renamed to ``path``.

    Each call has its own temporary path, so any number of processes may write the file at once: the last one wins.
    Temporary files of killed processes are removed.
    """
    with _partial_of(path) as partial:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)


@contextmanager
def atomic_folder(path: Path) -> Generator[Path]:
    """Yield a temporary folder to fill; if the block succeeds, it takes the place of ``path`` in one step.

    A kill leaves either an earlier folder or the new one there: Linux and macOS exchange the two. Where the file system
    cannot, there is none for a moment. What an earlier kill has left next to it is removed.
    """
    path = path.resolve()  # what a link leads to is replaced, not the link
    with _partial_of(path, is_folder=True) as partial:
        yield partial
        for entry in partial.iterdir():
            with entry.open("rb+") as file:
                os.fsync(file.fileno())
        if not path.exists():
            partial.rename(path)
        elif not exchange(partial, path):
            earlier = partial.with_name(f".{path.name[:NAME]}.{uuid4().hex}.partial")
            path.rename(earlier)
            try:
                partial.rename(path)
            except OSError:
                earlier.rename(path)
                raise
            shutil.rmtree(earlier)


def exchange(path: Path, other: Path) -> bool:
    """Exchange two paths in one step; return False where the system or the file system cannot."""
    if sys.platform not in ("linux", "darwin"):
        return False
    library, (first, second) = ctypes.CDLL(None), (os.fsencode(path), os.fsencode(other))
    if hasattr(library, "renameat2"):
        return library.renameat2(-100, first, -100, second, 2) == 0  # AT_FDCWD, RENAME_EXCHANGE
    return hasattr(library, "renamex_np") and library.renamex_np(first, second, 2) == 0  # RENAME_SWAP


@contextmanager
def _partial_of(path: Path, *, is_folder: bool = False) -> Generator[Path]:
    """Yield a locked partial of a path; remove it in the end, and before it those whose writers have ended.

    The requested path is put into an OSError about a partial, or about a full disk, which names no file.
    """
    folder, name = path.parent, path.name[:NAME]
    try:
        for entry in folder.iterdir():
            if is_partial(entry, name):
                _remove_abandoned(entry)
        partial, lock = _begin(folder, name, is_folder=is_folder)
        try:
            yield partial
        finally:
            if partial.exists():  # incomplete, or the earlier folder
                shutil.rmtree(partial) if is_folder else partial.unlink()
            os.close(lock)
    except OSError as error:
        named = None if error.filename is None else Path(os.fsdecode(error.filename))
        if error.errno in FULL if named is None else is_partial(named, name):
            error.filename, error.filename2 = str(path), None
        raise


def is_partial(path: Path, name: str | None = None) -> bool:
    """Return whether a path has the name of a temporary file of `atomic_write`, perhaps that of one file."""
    match = PARTIAL.fullmatch(path.name)
    return match is not None and name in (None, match[1])


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, atomically."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def json_text(data: dict[str, Any]) -> str:
    """Return indented JSON."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _begin(folder: Path, name: str, *, is_folder: bool) -> tuple[Path, int]:
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


def _remove_abandoned(partial: Path) -> None:
    """Remove a partial whose writer has ended, which is known because its lock is free."""
    with suppress(OSError):  # Windows opens no folders
        opened = os.open(partial, os.O_RDONLY)
        try:
            if _lock(opened, wait=False):
                shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
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
