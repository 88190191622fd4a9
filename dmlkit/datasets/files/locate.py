"""Where below the user's root a benchmark's files lie."""

from collections.abc import Iterable
from pathlib import Path

from dmlkit.datasets.files.archives import Published
from dmlkit.errors import UserError


def locate(root: Path, folders: Iterable[str], markers: Iterable[str]) -> Path | None:
    """The first of some folders below a root that holds one of the markers; ``"."`` is the root itself."""
    return next(
        (root / folder for folder in folders for marker in markers if (root / folder / marker).exists()),
        None,
    )


def missing(root: Path, published: Published, layouts: str) -> UserError:
    """The error of a root without the benchmark: what was looked for, and where to get it."""
    moved = "no such folder; if it has moved, --set dataset.root=PATH"
    what = moved if not root.exists() else f"no {published.title} here; expected {layouts}"
    return UserError("\n".join([f"dataset.root: {root}: {what}", *published.instructions(root)]))
