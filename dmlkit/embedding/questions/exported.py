"""Search and identification in an exported gallery: one ONNX file that embeds images and compares them.

``dmlkit export GALLERY --format onnx`` writes it. This module imports neither torch nor LanceDB, so that the answer on
one image comes soon.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import FiniteFloat, NonNegativeInt, PositiveInt

from dmlkit.embedding.gallery.files import check_threshold
from dmlkit.embedding.items import PointItem
from dmlkit.embedding.progress_bar import EMBEDDING, Bar, no_bar
from dmlkit.embedding.questions.answers import (
    Answer,
    Answers,
    Identified,
    Sigmoid,
    answer_of,
    are_nearest,
    known_labels,
    vote,
)
from dmlkit.errors import UserError, first_line
from dmlkit.files.document import Document
from dmlkit.files.image_file import BadImageError, box_of_cell, image_files, read_pixels
from dmlkit.files.outputs import NEAREST
from dmlkit.files.regular import TABLES, require_regular_file
from dmlkit.files.source import require_queries

METADATA = "gallery"
"""Key of the record in the metadata of the ONNX file."""
SIMILARITIES = "similarities"
"""Output of the graph: the similarity (B, N) of each image to each image of the gallery."""


class GalleryRecord(Document, frozen=True, strict=True):
    """What an exported gallery knows of its images, and how it decides on others."""

    kind: ClassVar[str] = "record of an exported gallery"
    version: ClassVar[int] = 2  # 1 had no boxes
    older: ClassVar[dict[int, tuple[str, ...]]] = {1: ()}

    source: str
    """The gallery."""
    gallery_version: PositiveInt
    """Its version at the time of the export."""
    similarity: str
    """Name of the similarity."""
    names: tuple[str, ...]
    """All labels."""
    codes: tuple[NonNegativeInt, ...]
    """Label of each image, an index into ``names``."""
    ids: tuple[str, ...]
    """Id of each image."""
    paths: tuple[str, ...]
    """Path of each image."""
    boxes: tuple[str | None, ...] = ()
    """Box of each image as galleries keep it, null for a full image; empty if there is none."""
    probability: Sigmoid | None
    """Probability of a guess by the nearest image."""
    threshold: FiniteFloat | None
    """Similarity below which an image is unknown."""
    least_probability: FiniteFloat | None
    """Probability below which an image is unknown."""
    note: str | None
    """Message on the calibration or the threshold."""


@dataclass(frozen=True)
class ExportedGallery:
    """Exported gallery, opened.

    Raises:
        UserError: onnxruntime is not installed, or the file is no exported gallery.
    """

    path: Path

    def __post_init__(self) -> None:
        if len(self.record.codes) != self.session.get_outputs()[1].shape[1]:
            raise UserError(f"{self.path}: its record and its images differ in number; export the gallery again")

    @property
    def source(self) -> str:
        return str(self.path)

    def __len__(self) -> int:
        return len(self.record.codes)

    @cached_property
    def session(self) -> Any:
        """Session of onnxruntime."""
        require_regular_file(self.path)
        try:
            import onnxruntime
        except ImportError:
            raise UserError(f"{self.path}: needs onnxruntime; install it with: pip install 'dmlkit[onnx]'") from None
        try:
            return onnxruntime.InferenceSession(self.path, providers=["CPUExecutionProvider"])
        except Exception as error:  # of many kinds, defined in compiled code
            reason = first_line(error)
            raise UserError(f"{self.path}: cannot read this ONNX file: {reason}") from error

    @cached_property
    def record(self) -> GalleryRecord:
        """What is known of the images."""
        stored = self.session.get_modelmeta().custom_metadata_map.get(METADATA)
        if stored is None:
            raise UserError(
                f"{self.path}: has a model, but no gallery; export a gallery: dmlkit export GALLERY --format onnx"
            )
        return GalleryRecord.from_json(stored, str(self.path))

    def items_at(self, rows: Any) -> list[PointItem]:
        one = self.record
        boxes = [box_of_cell(one.boxes[row]) if one.boxes else None for row in rows.tolist()]
        return [
            PointItem(one.ids[row], one.names[one.codes[row]], one.paths[row], box=box)
            for row, box in zip(rows.tolist(), boxes, strict=True)
        ]

    def similarities(self, pixels: np.ndarray) -> np.ndarray:
        """Return the similarity (N,) of an image (H, W, 3) uint8 to each image of the gallery."""
        return self.session.run([SIMILARITIES], {"images": pixels[None]})[0][0]


def search_exported(
    source: Path, queries: Path, *, k: int, others: Mapping[str, object] | None = None, bar: Bar = no_bar
) -> Answers:
    """Find the k nearest images of each query in an exported gallery, exactly.

    Args:
        queries: an image, or a folder of images.
        k: neighbors per query; all images if there are fewer.
        others: values of the options that apply to other sources alone, see `check_plain`.

    Raises:
        UserError: k is below 1, an option does not apply, there is no exported gallery, or no query can be read.
    """
    if k < 1:
        raise UserError(f"-k {k}: expected at least 1 neighbor")
    check_plain(source, others or {})
    asked = _Asked(source, queries, k)
    for _ in asked.similarities(bar):
        pass
    return asked.answers()


def identify_exported(
    source: Path,
    images: Path,
    *,
    threshold: float | None = None,
    others: Mapping[str, object] | None = None,
    bar: Bar = no_bar,
) -> Identified:
    """Find the label of each image by the nearest image of an exported gallery, or report it as unknown.

    Args:
        images: an image, or a folder of images.
        threshold: similarity below which an image is unknown. Default: as in the gallery when it was exported.
        others: values of the options that apply to other sources alone, see `check_plain`.

    Raises:
        UserError: an option does not apply, there is no exported gallery, or no image can be read.
    """
    check_plain(source, others or {})
    check_threshold(threshold)
    asked = _Asked(source, images, NEAREST)
    record = asked.gallery.record
    low, doubtful = (record.threshold, record.least_probability) if threshold is None else (threshold, None)
    codes, found = np.array(record.codes), list[Answer]()
    for similarities in asked.similarities(bar):
        first = int(similarities.argmax())  # of equally near ones that which was added first
        rest = np.where(codes == codes[first], -np.inf, similarities)
        rows = [first, int(rest.argmax())][: len(record.names)]
        decision = vote(codes[rows].tolist(), (similarities[rows] + 0.0).tolist())  # a distance of 0 is no -0
        found.append(answer_of(record.names, decision, record.probability, low, doubtful))
    near = asked.answers()
    known = known_labels(images, near.queries, [None] * len(found), record.names)
    answers = [answer._replace(known=right) for answer, right in zip(found, known, strict=True)]
    note = record.note if threshold is None else None
    return Identified(answers, near, low, doubtful, note, in_source=sum(are_nearest(near)))


def check_plain(source: Path, options: Mapping[str, object]) -> None:
    """Raise a `UserError` for the first option with a value; it does not apply to an exported gallery."""
    for name, value in options.items():
        if value not in (None, False):
            raise UserError(
                f"{name}: does not apply to {source}, an exported gallery; use the gallery itself, or remove the option"
            )


class _Asked:
    """Images that are compared with an exported gallery, one after the other, and the k nearest of each."""

    def __init__(self, source: Path, images: Path, k: int) -> None:
        if images.suffix.lower() in TABLES or require_queries(images) != "images":
            raise UserError(f"{images}: expected an image or a folder of images, since {source} is an exported gallery")
        self.images = image_files(images) if images.is_dir() else [str(images)]
        if not self.images:
            raise UserError(f"{images}: no images found in this folder or below it")
        self.gallery, self.k = ExportedGallery(source), k
        self.paths, self.skipped = list[str](), list[str]()
        self.near, self.rows = list[np.ndarray](), list[np.ndarray]()

    def similarities(self, bar: Bar) -> Iterator[np.ndarray]:
        """Yield the similarities (N,) of each image that can be read to all of the gallery."""
        with bar(EMBEDDING, len(self.images)) as advance:
            for path in self.images:
                try:
                    found = self.gallery.similarities(read_pixels(path))
                except BadImageError as error:
                    self.skipped.append(str(error))
                else:
                    self.paths.append(path)
                    self.rows.append(np.argsort(-found, kind="stable")[: self.k])
                    self.near.append(found[self.rows[-1]])
                    yield found
                advance(1)
        if not self.paths:
            raise UserError(self.skipped[0])

    def answers(self) -> Answers:
        """Return the nearest images of those that were compared."""
        return Answers(
            self.gallery,
            self.paths,
            np.stack(self.near),
            np.stack(self.rows),
            self.skipped,
            self.paths,
            [None] * len(self.paths),
            self.gallery.record.similarity,
        )
