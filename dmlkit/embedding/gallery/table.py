"""LanceDB's table of a gallery: opening it, its versions, and its exceptions. This module imports no torch."""

from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from dmlkit.embedding.gallery.files import MANIFEST, TABLE, GallerySummary, check_files, way_back
from dmlkit.errors import UserError, first_line
from dmlkit.files.source import require_gallery

FROM_BACKUP = "restore the files of this folder from a backup, or create it again"
FAULTS = (OSError, RuntimeError, ValueError, LookupError, ArithmeticError)
"""Exceptions of LanceDB and Arrow for damaged files."""


class GalleryVersion(NamedTuple):
    """State of a gallery that can be restored."""

    number: int
    time: datetime
    images: int
    run: str
    """Run whose model made its embeddings."""


def lancedb() -> Any:
    """Return the package ``lancedb``, which stores galleries and exported tables.

    Raises:
        UserError: it is not installed.
    """
    import os
    import warnings

    os.environ.setdefault("LANCEDB_LOG", "error")  # it warns of its own defaults
    # loader processes are forked after it is imported; they decode images and never call it
    warnings.filterwarnings("ignore", message="lancedb fork support")
    try:
        import lancedb as package
    except ModuleNotFoundError:
        raise UserError("this needs LanceDB; install it with: pip install 'dmlkit[gallery]'") from None
    return package


@contextmanager
def reading(path: Path, doing: str = "read", advice: str | None = None) -> Generator[None]:
    """Turn any exception of LanceDB into one error that names the gallery.

    A panic of its Rust code may be a BaseException that is not an Exception. The line that Rust prints about it stays,
    since suppressing it would redirect stderr for all threads of the process.

    Args:
        doing: verb for what the block does with it.
        advice: what to do about the error. Default: restore its files or an earlier version.

    Raises:
        UserError: the block fails.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ in ("PanicException", "RustPanic")
        if not is_panic and (isinstance(error, UserError) or not isinstance(error, FAULTS)):
            raise
        reason = first_line(error)
        raise UserError(f"{path}: cannot {doing} this gallery: {reason}; {advice or way_back(path)}") from error


def open_table(path: Path) -> Any:
    """Open the table of a gallery at its newest version.

    Raises:
        UserError: the gallery is damaged.
    """
    database = lancedb()
    with reading(path, advice=FROM_BACKUP):
        return database.connect(path).open_table(TABLE)


def history(path: Path) -> list[GalleryVersion]:
    """Return all versions of a gallery that can be restored, the oldest first.

    Raises:
        UserError: there is no gallery, or it cannot be opened.
    """
    require_gallery(path)
    manifest = GallerySummary.read(path / MANIFEST)
    check_files(path, manifest, all_versions=True)
    table = open_table(path)
    with reading(path, advice=FROM_BACKUP):
        versions = table.list_versions()
        found = [
            GalleryVersion(one["version"], one["timestamp"], int(one["metadata"]["total_rows"]), run)
            for one, run in zip(versions, _runs(table, manifest, [one["version"] for one in versions]), strict=True)
        ]
    contents = manifest.contents
    return [one._replace(images=contents[one.number].images) if one.number in contents else one for one in found]


MODEL = b"dmlkit.model"
"""Key of a table's schema: the name of the model of its embeddings, see `RecordedGallery.current`."""


def model_name(table: Any) -> str:
    """Return the name of the model of a table at its version; to be called while `reading`."""
    return ((table.schema.metadata or {}).get(MODEL) or b"").decode()


def _runs(table: Any, manifest: GallerySummary, versions: list[int]) -> list[str]:
    """Return the run of each version's model; opening a version takes 2 ms, so only where there are several models."""
    if not manifest.others:
        return [manifest.run] * len(versions)
    runs = {manifest.current: manifest.run} | {name: str(one["run"]) for name, one in manifest.others.items()}
    found = list[str]()
    for version in versions:
        table.checkout(version)
        found.append(runs[model_name(table)])
    return found
