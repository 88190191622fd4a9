"""Images that come into a gallery: which ones are new, and their rows."""

import hashlib
import shutil
from collections.abc import Callable, Container, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import torch
from torch import Tensor

from dmlkit.datasets.files.image import thumbnail
from dmlkit.datasets.files.table_file import SightingCells
from dmlkit.distributed.launch import Ranks
from dmlkit.embedding.gallery.images import ID_LENGTH, LabelledImage, LabelledImages
from dmlkit.embedding.gallery.manifest import (
    CHECKED,
    CHECKSUM,
    GalleryManifest,
    checksum_field,
    lists_of,
    matrix_of,
    row_checksums,
)
from dmlkit.embedding.gallery.table import MODEL
from dmlkit.embedding.in_memory import UNSOUND, Known
from dmlkit.embedding.job import EmbedJob, PartEmbedder
from dmlkit.embedding.parts import BATCH_IMAGES, PartFolder
from dmlkit.embedding.progress_bar import EMBEDDING, Bar
from dmlkit.embedding.stored import known_points
from dmlkit.embedding.trained import TrainedModel
from dmlkit.errors import UserError
from dmlkit.files.image_file import BadImageError, box_cell
from dmlkit.files.lock import is_held
from dmlkit.files.outputs import writing
from dmlkit.files.source import INCOMING
from dmlkit.loading.inputs import refuse_nothing_read
from dmlkit.manifolds.base import check_points
from dmlkit.manifolds.euclidean import Euclidean

RESUMES = "finished parts are kept; fix the problem and run the same command again"


def schema_of(manifest: GalleryManifest) -> Any:
    """Return the columns of a gallery's table."""
    import pyarrow as pa

    manifold = manifest.build_manifold()
    vector = manifold.index_vectors(manifold.from_features(torch.zeros(1, manifest.features)), "gallery")
    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("label", pa.string()),
            pa.field("path", pa.string(), nullable=False),
            pa.field("thumbnail", pa.binary()),
            pa.field("point", pa.list_(pa.float32(), manifest.dim), nullable=False),
            pa.field("vector", pa.list_(pa.float32(), vector.shape[1]), nullable=False),
            *(pa.field(name, pa.string()) for name in SightingCells._fields),
            pa.field("box", pa.string()),
            *([pa.field("local", pa.binary(), nullable=False)] if manifest.local else []),
            pa.field("added", pa.timestamp("us", "UTC"), nullable=False),
            checksum_field(len(CHECKED) - (manifest.local is None)),
        ],
        metadata={MODEL: manifest.current} if manifest.current else None,
    )


class EmbeddedRows:
    """Rows in an unnamed file, which disappears with the process.

    Args:
        file: empty file, opened for reading and writing.
    """

    def __init__(self, manifest: GalleryManifest, file: IO[bytes]) -> None:
        import pyarrow as pa

        self.manifest, self.file = manifest, file
        self.schema = schema_of(manifest)
        self.manifold = manifest.build_manifold()
        self.writer = pa.ipc.new_stream(file, self.schema)

    def write(self, images: Mapping[str, LabelledImage], parts: PartFolder) -> dict[str, str]:
        """Write the rows of images, given by their ids, from the parts of their embeddings, one in memory at a time.

        Returns:
            Messages by the id of an image that could not be read.

        Raises:
            UserError: a point has no vector of an index.
        """
        broken, pairs = dict[str, str](), list(images.items())
        for number, part in enumerate(parts.read()):
            read = part.indices.tolist()
            missing = [pairs[row][0] for row in sorted({*parts.images(number)}.difference(read))]
            broken |= zip(missing, part.faults, strict=True)
            self._write([pairs[row] for row in read], part.points, part.local)
        return broken

    def write_columns(self, columns: Mapping[str, Any], points: Tensor, local: Tensor | None) -> None:
        """Write rows with points (n, D) and local features (n, P, C), given their other columns as Arrow arrays.

        Raises:
            UserError: a point has no vector of an index.
        """
        import pyarrow as pa

        vectors = self.manifold.index_vectors(points.double(), "gallery").float()
        # numbers near 1e38 may be points of flat space, while their squares are none
        check_points(Euclidean(vectors.shape[1]), vectors, lambda row: columns["path"][row].as_py(), UNSOUND)
        arrays = {**columns, "point": lists_of(points.numpy()), "vector": lists_of(vectors.numpy())}
        if local is not None:
            arrays["local"] = pa.array([row.tobytes() for row in local.numpy()], pa.binary())
        arrays[CHECKSUM] = row_checksums([arrays[name] for name in CHECKED if name in arrays])
        self.writer.write_batch(pa.record_batch([arrays[name] for name in self.schema.names], schema=self.schema))

    def reader(self, ids: Container[str], schema: Any = None) -> Any:
        """Return the rows of some ids as an Arrow stream.

        Args:
            schema: schema of a table from before rows had checksums, or places. Default: all columns.
        """
        import pyarrow as pa

        self.writer.close()
        self.file.seek(0)
        stored, names = pa.ipc.open_stream(self.file), (schema or self.schema).names
        width = 0 if CHECKSUM not in names else (schema or self.schema).field(CHECKSUM).type.list_size
        kinds = [checksum_field(width) if name == CHECKSUM else self.schema.field(name) for name in names]
        fields = pa.schema(kinds, metadata=self.schema.metadata)

        def kept() -> Iterator[Any]:
            for batch in stored:
                part = batch.filter(pa.array([id in ids for id in batch.column("id").to_pylist()]))  # noqa: A001
                columns = {name: part.column(name) for name in names}
                if width:  # a table that lacks some columns has no checksums of them
                    columns[CHECKSUM] = lists_of(matrix_of(part.column(CHECKSUM))[:, :width])
                yield pa.record_batch([columns[name] for name in names], schema=fields)

        return pa.RecordBatchReader.from_batches(fields, kept())

    def _write(self, images: list[tuple[str, LabelledImage]], points: Tensor, local: Tensor | None) -> None:
        import pyarrow as pa

        texts: dict[str, list[str | None]] = {
            "id": [id for id, _ in images],  # noqa: A001
            "label": [image.label for _, image in images],
            "path": [image.path for _, image in images],
            **{name: [getattr(image.sighting, name) for _, image in images] for name in SightingCells._fields},
            "box": [box_cell(image.box) for _, image in images],
        }
        columns = {name: pa.array(cells, pa.string()) for name, cells in texts.items()}
        pictures = [thumbnail(one.path, one.box) if self.manifest.thumbnails else None for _, one in images]
        columns["thumbnail"] = pa.array(pictures, pa.binary())
        columns["added"] = pa.array([datetime.now(UTC)] * len(images), pa.timestamp("us", "UTC"))
        self.write_columns(columns, points, local)


@dataclass
class Incoming:
    """Images for a gallery, and the outcome.

    Args:
        new: images that the gallery does not have, by their ids.
    """

    new: dict[str, LabelledImage] = field(default_factory=dict[str, LabelledImage])
    repeated: list[str] = field(default_factory=list[str])
    """One message per image that the gallery already has, or that comes twice."""
    skipped: list[str] = field(default_factory=list[str])
    """One message per image that could not be read."""
    added: int = 0
    """Number of rows written."""
    labeled: set[str] = field(default_factory=set[str])
    """Ids of those of ``new`` that the gallery has without a label."""
    resumed: int = 0
    """Number of images that an interrupted command had embedded."""

    @property
    def unlabeled(self) -> int:
        """Number of images without a label."""
        return sum(image.label is None for image in self.new.values())

    @classmethod
    def of(cls, images: list[LabelledImage]) -> "Incoming":
        """Return images with their ids by content."""
        found = cls()
        for image in images:
            try:
                id = image.id()  # noqa: A001
            except BadImageError as error:
                found.skipped.append(str(error))
                continue
            if id in found.new:
                first = found.new[id]
                found.repeated.append(
                    f"{image.path}: the same picture as {first.path}{_other_label(image, first.label)}"
                )
            else:
                found.new[id] = image
        return found

    def drop(self, known: Mapping[str, str | None]) -> None:
        """Drop the images whose ids, given with their labels, a gallery has, except those that get a label now."""
        self.labeled = {name for name, label in known.items() if label is None and self.new[name].label is not None}
        for id, label in known.items():  # noqa: A001
            if id not in self.labeled:
                image = self.new.pop(id)
                self.repeated.append(f"{image.path}: is in the gallery already{_other_label(image, label)}")

    def place(self, gallery: Path) -> Path:
        """Return the folder in a gallery that keeps the embeddings of these images until all are added."""
        digest = hashlib.sha256("\n".join(self.new).encode())
        return gallery / f"{INCOMING}{digest.hexdigest()[:ID_LENGTH]}"

    @contextmanager
    def embedded(
        self, manifest: GalleryManifest, trained: TrainedModel, fabric: Ranks, place: Path, bar: Bar
    ) -> Generator[EmbeddedRows]:
        """Embed the new images, and yield their rows, which are in an unnamed file until the block ends.

        The embeddings are computed in parts, as `dmlkit.embedding.job.embed_job` does. If the process is stopped or
        the block fails, finished parts are kept, and the same call resumes.

        Args:
            place: folder in the gallery for the parts, of which this process is the sole writer.

        Raises:
            UserError: none of the images could be read, or see `PartEmbedder`.
        """
        images = LabelledImages(self.new)
        job = EmbedJob(images, "images for a gallery", place, skip_bad_images=True)
        parts = job.parts
        try:
            # the file may turn out to be too large for the disk only when it is closed
            with writing(place.parent, advice=RESUMES), TemporaryFile(dir=place.parent) as file:
                rows = EmbeddedRows(manifest, file)
                self.resumed = embed_parts(job, trained, fabric, lambda: known_points(trained, images, fabric), bar)
                broken = rows.write(self.new, parts)
                self.skipped += broken.values()
                for id in broken:  # noqa: A001
                    del self.new[id]
                if not self.new:
                    parts.discard()
                refuse_nothing_read(len(self.new) + len(self.repeated), self.skipped, "the images")
                yield rows
            parts.discard()
            self.added = len(self.new)
        finally:
            parts.leave()
            with suppress(OSError):  # it has complete parts, or a lock
                place.rmdir()


def embed_parts(
    job: EmbedJob, trained: TrainedModel, fabric: Ranks, known: Callable[[], Known | None], bar: Bar
) -> int:
    """Embed the images of a job in one process, and return how many were embedded before.

    Parts of other images are removed. ``known`` returns points that need not be computed; local features always are.

    Raises:
        UserError: see `PartEmbedder`.
    """
    parts, description, count = job.parts, job.describe(trained), len(job.dataset)
    try:
        parts.check(description)
    except UserError:  # there are none, or the gallery got some of these images meanwhile
        parts.discard()
        parts.begin(description)
    wanted = parts.missing(range(len(parts)), trained.manifold.point_dim, skip_bad_images=job.skip_bad_images)
    resumed = count - sum(len(parts.images(part)) for part in wanted)
    if wanted:
        found = None if trained.local else known()
        computed = count - (0 if found is None else len(found.rows))
        workers = 0 if computed <= BATCH_IMAGES else trained.recipe.training.workers
        with bar(EMBEDDING, count) as advance:
            advance(resumed)
            PartEmbedder(replace(job, known=found), trained, fabric, workers=workers)(wanted, advance)
    return resumed


def remove_interrupted(gallery: Path) -> None:
    """Remove the embeddings of interrupted additions and migrations that nobody has resumed."""
    for place in gallery.glob(f"{INCOMING}*"):
        if not is_held(place):
            shutil.rmtree(place, ignore_errors=True)


def _other_label(image: LabelledImage, label: str | None) -> str:
    return "" if image.label == label else f", with the label {label!r}, which it keeps; here it has {image.label!r}"
