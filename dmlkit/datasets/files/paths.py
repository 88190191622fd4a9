"""Names of image files: kept compactly, and never outside the root that they belong to."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from dmlkit.errors import UserError
from dmlkit.files.regular import check_regular

MAX_FAULTS = 20  # lines of one message

# absolute on any system, or with a step upwards: worth a closer look
SUSPICIOUS = r"^[/\\]|^[A-Za-z]:|(^|[/\\])\.\.([/\\]|$)"


class PickedPaths(Sequence[str]):
    """Some strings of a sequence, without copying them: a million paths cost a gigabyte as a tuple of a subset.

    Args:
        names: all of them.
        rows: (n,) int64, which ones; None takes all.
        prefix: put before each.

    Example:
        >>> list(PickedPaths(["a.jpg", "b.jpg", "c.jpg"], np.array([2, 0]), prefix="birds/"))
        ['birds/c.jpg', 'birds/a.jpg']
    """

    def __init__(self, names: Any, rows: np.ndarray | None = None, *, prefix: str = "") -> None:
        self.names, self.prefix = names, prefix
        # A copy: a tensor that is sent to another process moves to shared memory, and an array over it would stay
        # behind with memory that was freed.
        self.rows = np.arange(len(names)) if rows is None else np.array(rows)

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
    """A file's name relative to a root, or None if it leads out of the root.

    Example:
        >>> root = Path("/data/birds")
        >>> inside(root, "owls/../1.jpg"), inside(root, "/data/birds/1.jpg"), inside(root, "../cats/1.jpg")
        ('1.jpg', '1.jpg', None)
    """
    if not re.search(SUSPICIOUS, name):
        return name
    absolute = os.path.abspath(root)  # noqa: PTH100 - Path.resolve would follow links, which users make on purpose
    relative = os.path.relpath(os.path.join(absolute, name.replace("\\", "/")), absolute)  # noqa: PTH118
    is_outside = relative == ".." or relative.startswith("../") or bool(re.match("[A-Za-z]:", name))
    return None if is_outside else relative


def leaves_root(where: str, name: str, root: Path) -> str:
    """The fault of a name that leads out of the root."""
    return f"{where}: path {name!r} leaves the root {root}; expected a file below it"


def readable_name(path: str) -> bool:
    """Whether a file's name is UTF-8; Python stands surrogates for the bytes that are not."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def unreadable_name(path: str) -> str:
    """The fault of a name that is not UTF-8."""
    return f"{path!a}: this name is not UTF-8; rename the file or folder"


def read_lines(path: Path, faults: list[str]) -> list[str]:
    """The lines of a text file; a file that is missing, not regular or not UTF-8 is a fault."""
    try:
        check_regular(path)
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        faults.append(f"{path}: missing; unpack the archive again")
    except (OSError, UnicodeDecodeError) as error:
        faults.append(f"{path}: cannot read this list: {error}")
    return []


def raise_faults(faults: Iterable[str]) -> None:
    """Stop if there are faults: one line each, the first twenty.

    Raises:
        UserError: there are faults.
    """
    lines = list(faults)
    if len(lines) > MAX_FAULTS:
        more = len(lines) - MAX_FAULTS
        lines = [*lines[:MAX_FAULTS], f"and {more} more; dmlkit data check lists them all"]
    if lines:
        raise UserError("\n".join(lines))
