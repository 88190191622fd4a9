"""Writing files so that a crash never leaves half a one, and telling how two pieces of plain data differ."""

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4


@contextmanager
def atomic_write(path: Path, *, scratch: Path | None = None) -> Generator[Path]:
    """A path to write to; when the block ends well it is flushed to disk and renamed to ``path``.

    Args:
        path: the file.
        scratch: for a file that several processes may write at once: a folder on the same file system, in which each
            writes under a name of its own. By default one name beside ``path``, which the next attempt reuses.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "file.txt"
        >>> with atomic_write(target) as partial:
        ...     _ = partial.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    partial = scratch / f".{path.name}.{uuid4().hex}.partial" if scratch else path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, data: dict[str, Any], *, scratch: Path | None = None) -> None:
    """Write JSON for people and programs, all or nothing; ``scratch`` as in `atomic_write`."""
    with atomic_write(path, scratch=scratch) as partial:
        partial.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
