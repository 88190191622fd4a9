"""Location of a benchmark's files below the user's root."""

from collections.abc import Iterable
from pathlib import Path

from dmlkit.datasets.files.archives import Published
from dmlkit.errors import UserError


def locate(root: Path, folders: Iterable[str], markers: Iterable[str]) -> Path | None:
    """Return the first folder below a root that contains one of the markers; ``"."`` is the root itself."""
    return next(
        (root / folder for folder in folders for marker in markers if (root / folder / marker).exists()),
        None,
    )


def missing(root: Path, published: Published, layouts: str) -> UserError:
    """Return the error for a root without the benchmark, with download instructions."""
    moved = "no such folder; if it has moved, use --set dataset.root=PATH"
    what = moved if not root.exists() else f"no {published.title} in this folder; expected {layouts}"
    return UserError("\n".join([f"dataset.root: {root}: {what}", *published.instructions(root)]))
