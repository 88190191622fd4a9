"""Writing files so that a crash never leaves half a one."""

import json
import os
import re
from collections.abc import Generator
from contextlib import contextmanager, suppress
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

try:
    import fcntl
except ImportError:  # Windows: what a killed process left stays
    fcntl = None

NAME = 200  # characters of a file's name that its partial keeps: a file system takes 255
FULL = (ENOSPC, EDQUOT, EFBIG)  # a disk, a quota, or what a file may have
PARTIAL = re.compile(r"\..+\.[0-9a-f]{32}\.partial", re.DOTALL)


@contextmanager
def atomic_write(path: Path, *, scratch: Path | None = None) -> Generator[Path]:
    """A path to write to; when the block ends well it is flushed to disk and renamed to ``path``.

    The path is this attempt's alone, so any number of processes may write the file at once: the last one wins. What
    attempts that were killed left is removed.

    Args:
        path: the file.
        scratch: a folder on the same file system to write in; by default the file's own.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "file.txt"
        >>> with atomic_write(target) as partial:
        ...     _ = partial.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    folder, name = scratch or path.parent, path.name[:NAME]
    with _faults_named(path, name):
        _remove_abandoned(folder, name)
        partial, held = _begin(folder, name)
        try:
            with held:
                yield partial
                with partial.open("rb+") as file:
                    os.fsync(file.fileno())
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def _faults_named(path: Path, name: str) -> Generator[None]:
    """Name the file that was asked for in an OSError of its partial, and of a full disk, which names no file."""
    try:
        yield
    except OSError as error:
        named = None if error.filename is None else Path(os.fsdecode(error.filename))
        if error.errno in FULL if named is None else is_partial(named) and _whose(named) == name:
            error.filename, error.filename2 = str(path), None
        raise


def is_partial(path: Path) -> bool:
    """Whether `atomic_write` writes under such a name."""
    return PARTIAL.fullmatch(path.name) is not None


def write_json(path: Path, data: dict[str, Any], *, scratch: Path | None = None) -> None:
    """Write JSON for people and programs, all or nothing; ``scratch`` as in `atomic_write`."""
    with atomic_write(path, scratch=scratch) as partial:
        partial.write_text(json_text(data), encoding="utf-8")


def json_text(data: dict[str, Any]) -> str:
    """JSON for people and programs."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _whose(partial: Path) -> str:
    """The name, cut to `NAME` characters, of the file that a partial is of."""
    return partial.name[1:].rsplit(".", 2)[0]


def _begin(folder: Path, name: str) -> tuple[Path, IO[bytes]]:
    """A new partial, and a file that holds its lock until it is closed or the process ends."""
    while True:
        partial = folder / f".{name}.{uuid4().hex}.partial"
        held = partial.open("xb")
        _lock(held, wait=True)
        if partial.exists():
            return partial, held
        held.close()  # another process took it for abandoned before it was locked


def _remove_abandoned(folder: Path, name: str) -> None:
    """Remove partials of a file whose writers have ended: nobody holds their locks."""
    for entry in folder.iterdir():
        if is_partial(entry) and _whose(entry) == name:
            with suppress(OSError), entry.open("rb") as file:
                if _lock(file, wait=False):
                    entry.unlink()


def _lock(file: IO[bytes], *, wait: bool) -> bool:
    """Whether the lock was got; where the file system has none, never."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
