"""Writing files so that a crash never leaves half a one, and telling how two pieces of plain data differ."""

import json
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

NAME = 200  # characters of a file's name that its partial keeps: a file system takes 255
PARTIAL = re.compile(r"\..+\.[0-9a-f]{32}\.partial", re.DOTALL)
"""Names that `atomic_write` writes under."""


@contextmanager
def atomic_write(path: Path, *, scratch: Path | None = None) -> Generator[Path]:
    """A path to write to; when the block ends well it is flushed to disk and renamed to ``path``.

    The path is this attempt's alone, so any number of processes may write the file at once: the last one wins.

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
    partial = (scratch or path.parent) / f".{path.name[:NAME]}.{uuid4().hex}.partial"
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def remove_partials(folder: Path, *names: str) -> None:
    """Remove what killed processes left of files with these names, of which nobody else writes any now."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if PARTIAL.fullmatch(entry.name) and entry.name[1:].rsplit(".", 2)[0] in {name[:NAME] for name in names}:
            entry.unlink(missing_ok=True)


def write_json(path: Path, data: dict[str, Any], *, scratch: Path | None = None) -> None:
    """Write JSON for people and programs, all or nothing; ``scratch`` as in `atomic_write`."""
    with atomic_write(path, scratch=scratch) as partial:
        partial.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
