"""One writer a folder: a lock that ends with the process that holds it, however that ends."""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dmlkit.errors import UserError

LOCK = ".lock"
PATIENCE = 8  # seconds: loader processes see after at most 5 that kill -9 took the one that held the lock


@contextmanager
def sole_writer(folder: Path, *, what: str, patience: float = PATIENCE) -> Generator[None]:
    """Hold a folder, which is made if it is missing; other processes that want to are refused meanwhile.

    Args:
        folder: of which files are about to be written.
        what: goes on in it, for the error of the others: "a training".
        patience: seconds to wait for another process that holds it.

    Raises:
        UserError: another process holds the folder.

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
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    lock = FileLock(path)
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        raise UserError(
            f"{folder}: {what} is going on in this folder in another process; wait for it, or choose another --output"
        ) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the release: who waits for it sees that the file is gone, and makes one
        lock.release()
        if is_new:
            with suppress(OSError):  # unless it is empty still
                folder.rmdir()
