"""What stands in the folder of a gallery beside its table."""

from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, Field, FiniteFloat, PositiveInt

from dmlkit.embedding.manifest import Description
from dmlkit.errors import UserError

MANIFEST, CREATING, TABLE = "gallery.json", "creating.json", "images"
TABLE_FOLDER = f"{TABLE}.lance"
IndexKind = Literal["ivf_pq", "ivf_hnsw_sq"]


class ApproximateIndex(BaseModel, frozen=True, extra="forbid", strict=True):
    """An index that finds most of the nearest, and how far a search through it looks."""

    name: str
    """LanceDB's; where the table has no index of this name, the search is exact."""
    kind: IndexKind
    """How vectors are kept in it."""
    nprobes: PositiveInt
    """Parts of the index that a search looks at."""
    candidates: Annotated[FiniteFloat, Field(gt=0)]
    """Images that are compared exactly, for each neighbour that is asked for."""
    recall: FiniteFloat
    """Share of the 10 nearest that it found, measured on images of the gallery."""


class Content(NamedTuple):
    """What a version of a gallery held when it was written."""

    images: int
    checksum: int  # the sum of the checksums of all rows: their order may change


class GalleryManifest(Description, frozen=True, strict=True):
    """``gallery.json``: the model that all embeddings of a gallery are of, and how it was created."""

    kind: ClassVar[str] = "manifest of a gallery"
    version: ClassVar[int] = 3  # 1 knew no approximate index; 2 no checksums
    older: ClassVar[dict[int, tuple[str, ...]]] = {1: (), 2: ()}

    run: str
    """The run whose model embeds images, where it was."""
    thumbnails: bool
    """Small pictures are kept in the rows."""
    threshold: FiniteFloat | None
    """The similarity below which an image is of no label of the gallery."""
    approximate: ApproximateIndex | None = None
    """What ``dmlkit gallery index`` has built."""
    contents: dict[int, Content] = Field(default_factory=dict[int, Content])
    """By version, what it held; empty where rows have no checksums. A version that a kill left may be missing."""
    files: dict[str, int] = Field(default_factory=dict[str, int])
    """CRC-32 of LanceDB's manifests and deletions."""


class GalleryVersion(NamedTuple):
    """A state of a gallery that can be restored."""

    number: int
    time: datetime
    images: int


def holds_gallery(path: Path) -> bool:
    """Whether a folder is a gallery."""
    return (path / MANIFEST).exists()


def read_gallery_manifest(path: Path) -> GalleryManifest:
    """The manifest of a gallery.

    Raises:
        UserError: there is none, or its creation was stopped, or it is damaged.
    """
    if not holds_gallery(path):
        stopped = (path / CREATING).exists()
        told = (
            "the creation of this gallery was stopped; give the same command again"
            if stopped
            else ("no gallery here (gallery.json is missing); expected a folder that dmlkit gallery create wrote")
        )
        raise UserError(f"{path}: {told}")
    return GalleryManifest.read(path / MANIFEST)


def check_threshold(threshold: float | None) -> None:
    """Make sure that similarities compare with a threshold.

    Raises:
        UserError: it is nan or infinite.
    """
    if threshold is not None and not isfinite(threshold):
        raise UserError(f"--threshold {threshold}: expected a similarity, which is a finite number")


def lancedb() -> Any:
    """The package that keeps galleries, and tables for others.

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
    except ImportError:
        raise UserError("this needs LanceDB; install it with: pip install 'dmlkit[gallery]'") from None
    return package
