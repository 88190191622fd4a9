"""Names of image files: compact sequences of them, and checks that they stay below their root."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from dmlkit.errors import UserError, merged
from dmlkit.files.regular import reading

MAX_FAULTS = 20  # kinds of problems in one message
DATA_CHECK = "; run dmlkit data check --all to list all"

# a folder may have the name j: k; on Windows D:a.jpg is on another drive
DRIVE = r"^[A-Za-z]:" if os.name == "nt" else r"^[A-Za-z]:[/\\]"
# names that may leave the root: absolute on any system, or with a step upwards
SUSPICIOUS = rf"^[/\\]|{DRIVE}|(^|[/\\])\.\.([/\\]|$)"


class PickedPaths(Sequence[str]):
    """Strings of a sequence at ``rows``, each after ``prefix``, not copied: a million paths would take a gigabyte.

    Example:
        >>> list(PickedPaths(["a.jpg", "b.jpg", "c.jpg"], np.array([2, 0]), prefix="birds/"))
        ['birds/c.jpg', 'birds/a.jpg']
    """

    def __init__(self, names: Any, rows: np.ndarray, *, prefix: str = "") -> None:
        self.names, self.prefix = names, prefix
        # A copy, because a tensor sent to another process moves to shared memory, and an array over its old memory
        # would point to freed memory.
        self.rows = np.array(rows)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "PickedPaths": ...
    def __getitem__(self, index: int | slice) -> "str | PickedPaths":
        if isinstance(index, slice):
            return PickedPaths(self.names, self.rows[index], prefix=self.prefix)
        return f"{self.prefix}{self.names[int(self.rows[index])]}"


def inside(root: Path, name: str) -> str | None:
    """Return a file's name relative to a root, or None if it leads out of the root.

    Example:
        >>> root = Path("/data/birds")
        >>> inside(root, "owls/../1.jpg"), inside(root, "/data/birds/1.jpg"), inside(root, "../cats/1.jpg")
        ('1.jpg', '1.jpg', None)
    """
    if not re.search(SUSPICIOUS, name):
        return name
    absolute = os.path.abspath(root)  # noqa: PTH100 - Path.resolve would follow links, which users create on purpose
    relative = os.path.relpath(os.path.join(absolute, name.replace("\\", "/")), absolute)  # noqa: PTH118
    is_outside = relative == ".." or relative.startswith("../") or bool(re.match(DRIVE, name))
    return None if is_outside else relative


def are_of_windows(names: Iterable[str], root: Path) -> bool:
    r"""Return whether backslashes in names are those of folders: the first name with one is no file below the root.

    Example:
        >>> are_of_windows(["a.jpg", r"img\b.jpg"], Path("/data"))
        True
    """
    first = next((name for name in names if "\\" in name), None)
    return first is not None and not (root / first).exists()


def leaves_root(where: str, name: str, root: Path) -> str:
    """Return the error line for a name that leads out of the root."""
    return (
        f"{where}: path {name!r} leads out of the root {root}; expected a file below it: name the folder "
        "above all images with --root FOLDER, or dataset.root in a recipe"
    )


def readable_name(path: str) -> bool:
    """Return whether a file's name is UTF-8; Python represents other bytes by surrogates."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def unreadable_name(path: str) -> str:
    """Return the error line for a name that is not UTF-8."""
    return f"{path!a}: this name is not UTF-8; rename the file or folder"


def require_readable(paths: Iterable[str]) -> None:
    """Raise a `UserError` for names that are not UTF-8: recipes and other files of dmlkit cannot have them."""
    raise_faults(unreadable_name(path) for path in paths if not readable_name(path))


def read_lines(path: Path, faults: list[str]) -> list[str]:
    """Read the lines of a text file; report in ``faults`` if it is missing, not regular or not UTF-8."""
    try:
        with reading(path, "this list", UnicodeDecodeError, missing="no such file; unpack the archive again"):
            return path.read_text(encoding="utf-8").splitlines()
    except UserError as error:
        faults.append(str(error))
        return []


def raise_faults(faults: Iterable[str], advice: str = "") -> None:
    """Raise a `UserError` with a line per kind of problem, see `merged`, and how to list all, if there are any."""
    every = list(faults)
    lines = merged(every)
    if lines:
        more = [f"and {len(lines) - MAX_FAULTS:,} more"] if len(lines) > MAX_FAULTS else []
        raise UserError("\n".join([*lines[:MAX_FAULTS], *more]) + (advice if more or len(lines) < len(every) else ""))
