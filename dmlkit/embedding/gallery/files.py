"""Files of a gallery, their checksums, and what its manifest says without the model: read without torch or LanceDB."""

from math import isfinite
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self
from uuid import UUID

from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, PositiveInt

from dmlkit.errors import UserError
from dmlkit.files.document import Document
from dmlkit.files.escape import command_word
from dmlkit.files.regular import file_checksum

MANIFEST, IDENTIFICATION, TABLE = "gallery.json", "identification.json", "images"
TABLE_FOLDER = f"{TABLE}.lance"
"""Answer for an image that has none of the labels of a gallery."""
IndexKind = Literal["ivf_pq", "ivf_hnsw_sq", "ivf_sq", "ivf_rq"]
VectorPrecision = Literal["int8", "binary"]
OF_PRECISION: dict[VectorPrecision, IndexKind] = {"int8": "ivf_sq", "binary": "ivf_rq"}
"""Index that keeps a number of each vector in a byte or in a bit, under the names of ``dmlkit eval --precision``."""


class ApproximateIndex(BaseModel, frozen=True, extra="forbid", strict=True):
    """Approximate index, and how far a search through it goes."""

    name: str
    """LanceDB's name; if the table has no index of this name, the search is exact."""
    kind: IndexKind
    """Representation of vectors in the index."""
    nprobes: PositiveInt
    """Number of parts of the index that a search visits."""
    candidates: Annotated[FiniteFloat, Field(gt=0)]
    """Number of images compared exactly per requested neighbor."""
    recall: FiniteFloat
    """Share of the 10 nearest images that it found, measured on images of the gallery."""

    @property
    def option(self) -> str:
        """Option of ``dmlkit gallery index`` that builds such an index."""
        return f"--{'precision' if self.kind in OF_PRECISION.values() else 'kind'} {self.value}"

    @property
    def value(self) -> str:
        """Value of this option."""
        return next((name for name, kind in OF_PRECISION.items() if kind == self.kind), self.kind)


class FileStamp(NamedTuple):
    """Size in bytes and time of modification of a file."""

    size: int
    nanoseconds: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the stamp of a file."""
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns)


class Content(NamedTuple):
    """Contents of a version of a gallery when it was written."""

    images: int
    checksum: int  # the sum of the checksums of all rows: their order may change


def holds_gallery(path: Path) -> bool:
    """Return whether a folder is a gallery."""
    return (path / MANIFEST).exists()


class GalleryState(BaseModel, frozen=True, extra="forbid", strict=True):
    """Contents of the newest version of a gallery, as ``dmlkit gallery info`` prints them."""

    version: PositiveInt
    """Number of the version."""
    labels: dict[str, PositiveInt]
    """Number of images by label, in the order of the labels."""
    without_label: NonNegativeInt
    """Number of images without a label."""
    has_index: bool
    """Whether this version has the approximate index that the manifest describes."""
    not_indexed: NonNegativeInt
    """Number of images outside the index; all of them if there is none."""

    @property
    def images(self) -> int:
        """Number of all images."""
        return sum(self.labels.values()) + self.without_label


class RecordedGallery(Document, frozen=True, strict=True):
    """What ``gallery.json`` records besides the models."""

    kind: ClassVar[str] = "manifest of a gallery"

    thumbnails: bool
    """Whether rows have small pictures."""
    current: str = ""
    """Name of the model described here, which the table's schema has at those versions that it embedded; empty for the
    model of the creation."""
    contents: dict[int, Content] = Field(default_factory=dict[int, Content])
    """Contents by version; empty if rows have no checksums. A version may be missing if its writer was killed."""
    files: dict[str, int] = Field(default_factory=dict[str, int])
    """CRC-32 of LanceDB's files, which never change: manifests, deletions, rows and indices."""
    stamps: dict[str, FileStamp] = Field(default_factory=dict[str, FileStamp])
    """Stamps of the files of rows and indices; a file that still has its stamp is not compared with its checksum."""
    state: GalleryState | None = None
    """Contents of the newest version; null if they are not known, or have too many labels."""


class GallerySummary(RecordedGallery, frozen=True, strict=True, extra="allow"):
    """``gallery.json`` without the classes of its model: `GalleryManifest` checks what is only kept here."""

    dim: PositiveInt
    """Number of coordinates of an embedding."""
    similarity: str
    """Name of the similarity of two embeddings."""
    manifold: dict[str, Any]
    """Name and options of the manifold."""
    model: dict[str, Any]
    """Source of the embeddings."""
    fusion: dict[str, Any] | None = None
    """Second source, see `Fusion`."""
    run: str
    """See `GalleryManifest`, as for all that follow."""
    threshold: FiniteFloat | None
    approximate: ApproximateIndex | None = None
    local: dict[str, Any] | None = None
    others: dict[str, Any] = Field(default_factory=dict[str, Any])


class CalibrationSummary(Document, frozen=True, extra="allow"):
    """``identification.json`` without its rates, see `Identification`."""

    kind: ClassVar[str] = "calibration of a gallery"

    gallery_model: str = ""
    """Model that was calibrated, see `RecordedGallery.current`; the calibration does not hold for others."""


def is_calibrated(path: Path, model: str) -> bool:
    """Return whether a gallery has a calibration, and it is for one of its models.

    Args:
        model: see `RecordedGallery.current`.

    Raises:
        UserError: the calibration is damaged.
    """
    file = path / IDENTIFICATION
    return file.exists() and CalibrationSummary.read(file).gallery_model == model


def check_threshold(threshold: float | None) -> None:
    """Raise a `UserError` for a threshold that is nan or infinite."""
    if threshold is not None and not isfinite(threshold):
        raise UserError(f"--threshold {threshold}: expected a similarity, which is a finite number")


def recorded_state(path: Path, summary: GallerySummary) -> GalleryState | None:
    """Return the recorded contents of a gallery, if they are those of its newest version and no file is lost.

    Otherwise the gallery itself says what it holds, or why it cannot be read.

    Raises:
        UserError: a file has another checksum.
    """
    state = summary.state
    if state is None or state.version != max(manifests_of(path), default=0):
        return None
    if not all((path / name).exists() for name in summary.files):
        return None
    check_files(path, summary)
    return state


def manifests_of(path: Path) -> dict[int, Path]:
    """Return LanceDB's manifests by version; it counts from above, so that the newest is listed first."""
    found: dict[int, Path] = {}
    for file in (path / TABLE_FOLDER / "_versions").glob("*.manifest"):
        number = int(file.stem) if file.stem.isdecimal() else 0
        found[2**64 - 1 - number if number >= 2**63 else number] = file
    return found


def _deletions(path: Path) -> list[Path]:
    return sorted((path / TABLE_FOLDER / "_deletions").glob("*"))


def _large_files(path: Path) -> list[Path]:
    """Return the files of rows and indices."""
    table = path / TABLE_FOLDER
    return sorted(file for place in ("data/*", "_indices/*/*") for file in table.glob(place))


def _name_in_manifest(file: Path) -> bytes:
    """Return how the manifests that use a file of rows or indices name it: by its name, or the UUID of its index."""
    try:
        return UUID(file.parent.name).bytes
    except ValueError:
        return file.name.encode()


def recorded_files(path: Path, manifest: RecordedGallery) -> dict[str, Any]:
    """Return the checksums and stamps of a gallery's files, as fields of its manifest; known files are not read."""
    files, stamps, large = dict(manifest.files), dict(manifest.stamps), _large_files(path)
    for file in (*manifests_of(path).values(), *_deletions(path), *large):
        name = file.relative_to(path).as_posix()
        if name not in files:
            files[name] = file_checksum(file)
            stamps |= {name: FileStamp.of(file)} if file in large else {}
    return {"files": files, "stamps": stamps}


def check_files(
    path: Path,
    manifest: RecordedGallery,
    version: int | None = None,
    *,
    all_versions: bool = False,
    trust_stamps: bool = True,
) -> None:
    """Raise a `UserError` for a file that is missing or not what was written, before LanceDB reads it.

    For some damages it requests memory of an absurd size, and the process is aborted or, where the system grants the
    request, killed after it has filled the memory: there is no error to catch.

    Args:
        version: the version whose manifest, rows and indices to check. Default: the newest.
        all_versions: check the manifests of all versions, and no rows.
        trust_stamps: do not read files of rows and indices that have the size and time with which they were written.
    """

    def check(file: Path, advice: str) -> None:
        name = file.relative_to(path).as_posix()
        if not file.exists():
            raise UserError(f"{path}: this gallery is damaged: {name} is missing; {advice}")
        known = name not in manifest.files or (trust_stamps and manifest.stamps.get(name) == FileStamp.of(file))
        if not known and file_checksum(file) != manifest.files[name]:
            raise UserError(f"{path}: this gallery is damaged: {name} is not what was written; {advice}")

    manifests = manifests_of(path)
    newest = max(manifests, default=0) if version is None else version
    listed = [*manifests.values()] if all_versions else [manifests[newest]] if newest in manifests else []
    for file in (*listed, *_deletions(path)):
        check(file, "restore this file from a backup, or create the gallery again")
    if listed and not all_versions:
        content = listed[0].read_bytes()
        for file in sorted({*_large_files(path), *(path / name for name in manifest.stamps)}):
            if _name_in_manifest(file) in content:
                check(file, way_back(path))


def way_back(path: Path) -> str:
    """Return what to do about a damaged gallery that can be opened."""
    return (
        "restore the files of this folder from a backup, or an earlier version: dmlkit gallery history "
        f"{command_word(path)} lists them, dmlkit gallery restore {command_word(path)} VERSION brings one back"
    )
