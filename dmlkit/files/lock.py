"""Lock for the only writer of a folder. It is released when the process that holds it ends, even if it is killed."""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path

from filelock import FileLock, Timeout

from dmlkit.errors import UserError, warn

LOCK = ".lock"
PATIENCE = 8  # seconds: loader processes notice within 5 that the process that held the lock was killed


@contextmanager
def sole_writer(folder: Path, *, what: str, patience: float = PATIENCE) -> Generator[None]:
    """Lock a folder, and create it if it is missing; other processes that try to lock it wait, and fail in the end.

    Args:
        what: what runs in the folder, for the error of other processes, e.g. "a training".
        patience: seconds to wait for another process that holds the lock; infinity waits without limit.
    """
    path = folder / LOCK
    lock = FileLock(path)
    message = f"{folder}: {what} is running in this folder in another process"
    try:
        try:
            is_new = _acquire(lock, folder, min(patience, PATIENCE))
        except Timeout:
            if patience <= PATIENCE:
                raise
            warn(f"{message}; waiting for it to end")
            is_new = _acquire(lock, folder, patience - PATIENCE if isfinite(patience) else -1)
    except Timeout:
        raise UserError(f"{message}; wait until it ends, and rerun the same command") from None
    except OSError as error:  # the disk is full or read-only
        raise UserError(f"{folder}: cannot write into this folder: {error.strerror or error}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the release: a waiting process sees that the file is gone, and creates it
        if is_new:
            with suppress(OSError):  # the folder is not empty, or a waiting process was faster
                folder.rmdir()
        lock.release()


def _acquire(lock: FileLock, folder: Path, seconds: float) -> bool:
    """Acquire a lock within some seconds, and return whether its folder had to be created for it."""
    is_new = False
    while not lock.is_locked:
        is_new = is_new or not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # the process that held it has removed the empty folder: create it again
            lock.acquire(timeout=seconds)
    return is_new


def is_held(folder: Path) -> bool:
    """Return whether a process is the sole writer of a folder now; the lock file of a killed process does not count."""
    try:
        import fcntl
    except ImportError:  # on Windows
        return (folder / LOCK).exists()
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released at once; a process that fails meanwhile retries
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
