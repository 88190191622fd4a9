"""Files of a gallery and what its manifest says without the model: read without torch.

    gallery.json            models, versions, index; its rename is the commit of every change
    versions/7.parquet      a row per image of version 7: id, label, path, box, other columns of its table as JSON,
                            and where its point is
    vectors/KEY/            points of a model by the ids of their images, and its local features, see `VectorStore`
    thumbnails/ID.jpg       small pictures, if the gallery keeps them
    index-NAME.faiss        approximate index, if there is one

No file but ``gallery.json`` ever changes, so that readers keep the version that they opened.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, PositiveInt

from dmlkit.errors import UserError, first_line
from dmlkit.files.document import Document
from dmlkit.files.escape import command_word
from dmlkit.files.regular import file_checksum
from dmlkit.files.source import require_gallery

if TYPE_CHECKING:  # NumPy takes 0.1 s
    from dmlkit.files.arrays import Values

MANIFEST, IDENTIFICATION = "gallery.json", "identification.json"
VERSIONS, VECTORS, THUMBNAILS = "versions", "vectors", "thumbnails"
IndexKind = Literal["ivf_pq", "ivf_hnsw_sq", "int8", "binary"]
"""What an index keeps of vectors; ``int8`` and ``binary`` are the forms of ``dmlkit eval --form``."""


class ApproximateIndex(BaseModel, frozen=True, extra="forbid", strict=True):
    """Approximate index, and how far a search through it goes."""

    name: str
    """Name of its file, see `index_file`."""
    kind: IndexKind
    """Representation of vectors in the index."""
    images: NonNegativeInt
    """Number of images in it."""
    nprobes: PositiveInt
    """Number of parts of the index that a search visits."""
    candidates: Annotated[FiniteFloat, Field(gt=0)]
    """Number of images compared exactly per requested neighbor."""
    recall: FiniteFloat
    """Share of the 10 nearest images that it found, measured on images of the gallery."""


class GalleryVersion(BaseModel, frozen=True, extra="forbid", strict=True):
    """State of a gallery that can be restored."""

    number: PositiveInt
    time: datetime
    images: NonNegativeInt
    model: str
    """Name of the model of its embeddings; empty for the model of the creation."""
    rows: PositiveInt
    """Number in the name of the file of its rows: a restored version has the file of the old one."""
    checksum: NonNegativeInt
    """CRC-32 of this file."""


class RecordedGallery(Document, frozen=True, strict=True):
    """What ``gallery.json`` records besides the models."""

    kind: ClassVar[str] = "manifest of a gallery"

    thumbnails: bool
    """Whether images have small pictures."""
    current: str = ""
    """Name of the model described here, which is that of the newest version."""
    versions: tuple[GalleryVersion, ...] = ()
    """Versions that can be restored, the newest last."""
    numbers: NonNegativeInt = 0
    """Number of images that were ever added, which the column ``number`` counts; see `ApproximateIndex`."""

    @classmethod
    def of(cls, gallery: Path) -> Self:
        """Read the manifest of a gallery."""
        require_gallery(gallery)
        return cls.read(gallery / MANIFEST)


class GallerySummary(RecordedGallery, frozen=True, strict=True, extra="allow"):
    """``gallery.json`` without the classes of its model: `GalleryManifest` checks what is only kept here."""

    dim: PositiveInt
    similarity: str
    manifold: dict[str, Any]
    model: dict[str, Any]
    fusion: dict[str, Any] | None = None
    run: str
    threshold: FiniteFloat | None
    threshold_is_own: bool = True
    approximate: ApproximateIndex | None = None
    local: dict[str, Any] | None = None
    others: dict[str, Any] = Field(default_factory=dict[str, Any])


class CalibrationSummary(Document, frozen=True, extra="allow"):
    """``identification.json`` without its rates, see `Identification`."""

    kind: ClassVar[str] = "calibration of a gallery"

    gallery_model: str = ""
    """Model that was calibrated, see `RecordedGallery.current`; the calibration does not hold for others."""
    fits: Sequence[Any]


def check_threshold(threshold: float | None) -> None:
    """Raise a `UserError` for a threshold that is nan or infinite."""
    if threshold is not None and not isfinite(threshold):
        raise UserError(f"--threshold {threshold}: expected a similarity, which is a finite number")


def read_rows(path: Path, version: GalleryVersion, columns: list[str] | None = None) -> Any:
    """Return the rows of a version of a gallery as an Arrow table."""
    from pyarrow import parquet

    file = rows_file(path, version.rows)
    try:
        if file_checksum(file) != version.checksum:
            raise damaged(path, file, "is not what was written")
        with parquet.ParquetFile(file) as stored:  # read_table imports pandas where it is installed, 0.4 s
            return stored.read(columns)
    except FileNotFoundError:
        raise damaged(path, file, "is missing") from None
    except (OSError, ValueError) as error:
        raise damaged(path, file, f"cannot be read: {first_line(error)}") from error


def contents_of(path: Path, summary: GallerySummary) -> dict[str, Any]:
    """Return what ``dmlkit gallery info`` prints of the newest version of a gallery: its number, and counts of images.

    ``labels`` counts them by label; ``not_indexed`` are those outside of the index, all of them if there is none.
    """
    newest, index = summary.versions[-1], summary.approximate
    rows = read_rows(path, newest, ["label", "number"])
    counts = Counter[str | None](rows["label"].to_pylist())
    without_label = counts.pop(None, 0)
    return {
        "version": newest.number,
        "images": len(rows),
        "labels": {str(label): counts[label] for label in sorted(counts, key=str)},
        "without_label": without_label,
        "not_indexed": outside_of(read_index(path, index), rows["number"].to_numpy()).size if index else len(rows),
    }


def rows_file(path: Path, number: int) -> Path:
    """Return the file of the rows of a version."""
    return path / VERSIONS / f"{number}.parquet"


def index_file(path: Path, name: str) -> Path:
    """Return the file of an index."""
    return path / f"index-{name}.faiss"


def read_index(path: Path, index: ApproximateIndex) -> Any:
    """Return the index of a gallery, an object of FAISS."""
    import faiss

    file, word = index_file(path, index.name), command_word(path)
    advice = f"build it again with dmlkit gallery index {word}, or search with --exact"
    try:
        faiss_index = faiss.read_index(str(file))
    except (RuntimeError, MemoryError) as error:
        reason = "is missing" if not file.exists() else f"cannot be read as an index: {first_line(error)[-100:]}"
        raise UserError(f"{file}: {reason}; {advice}") from error
    if not isinstance(faiss_index, faiss.IndexIDMap) or faiss_index.ntotal != index.images:
        raise UserError(f"{file}: is not the index of {index.images} images that was written; {advice}")
    return faiss_index


def outside_of(index: Any, numbers: "Values") -> "Values":
    """Return the rows of images, given by their numbers, that an index does not have."""
    import faiss
    import numpy as np

    return np.flatnonzero(~np.isin(numbers, faiss.vector_to_array(index.id_map)))


def thumbnail_file(path: Path, name: str) -> Path:
    """Return the file of the small picture of an image, given its id."""
    return path / THUMBNAILS / f"{name}.jpg"


def damaged(path: Path, file: Path, what: str) -> UserError:
    """Return the error of a damaged gallery, with the way back."""
    word = command_word(path)
    return UserError(
        f"{path}: this gallery is damaged: {file.relative_to(path).as_posix()} {what}; restore this file from a "
        f"backup, or an earlier version: dmlkit gallery history {word} lists them, dmlkit gallery restore {word} "
        "VERSION restores one"
    )
