"""One writer a folder: a lock that ends with the process that holds it, however that ends."""

import logging
from collections.abc import Generator
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path

from filelock import FileLock, Timeout

from dmlkit.errors import UserError

LOCK = ".lock"
PATIENCE = 8  # seconds: loader processes see after at most 5 that kill -9 took the one that held the lock


@contextmanager
def sole_writer(folder: Path, *, what: str, patience: float = PATIENCE) -> Generator[None]:
    """Hold a folder, which is made if it is missing; other processes that want to wait, and are refused in the end.

    Args:
        folder: of which files are about to be written.
        what: goes on in it, for the error of the others: "a training".
        patience: seconds to wait for another process that holds it; infinity: however long that takes.

    Raises:
        UserError: another process holds the folder, or it cannot be written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with sole_writer(folder, what="a training"):
        ...     [file.name for file in folder.iterdir()]
        ['.lock']
        >>> list(folder.iterdir())
        []
    """
    is_new = not folder.exists()
    path = folder / LOCK
    lock = FileLock(path)
    told = f"{folder}: {what} is going on in this folder in another process"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=min(patience, PATIENCE))
        except Timeout:
            if patience <= PATIENCE:
                raise
            logging.getLogger("dmlkit").warning(f"{told}; waiting for it to end")
            lock.acquire(timeout=patience - PATIENCE if isfinite(patience) else -1)
    except Timeout:
        raise UserError(f"{told}; wait for it, or choose another --output") from None
    except OSError as error:  # a disk that is full, or for reading only
        raise UserError(f"{folder}: cannot write into this folder: {error.strerror or error}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the release: who waits for it sees that the file is gone, and makes one
        lock.release()
        if is_new:
            with suppress(OSError):  # unless it is empty still
                folder.rmdir()


def is_held(folder: Path) -> bool:
    """Whether a process is the sole writer of a folder now. Reads only; a killed one's lock file counts for nothing.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with sole_writer(folder, what="a training"):
        ...     is_held(folder)
        True
        >>> is_held(folder)
        False
    """
    try:
        import fcntl
    except ImportError:  # on Windows
        return (folder / LOCK).exists()
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back at once; who wants it meanwhile tries again
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
