"""Images that come into a gallery: which ones are new, and their embeddings."""

import hashlib
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError
from dmlkit.files.image_file import BadImageError
from dmlkit.files.lock import is_held
from dmlkit.files.outputs import writing
from dmlkit.files.source import INCOMING
from dmlkit.gallery.commit import PointBlock, blocks_of
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.images import ID_LENGTH, LabelledImage, LabelledImages
from dmlkit.loading.inputs import refuse_nothing_read
from dmlkit.vectors.in_memory import Known
from dmlkit.vectors.job import EmbedJob, PartEmbedder
from dmlkit.vectors.parts import BATCH_IMAGES
from dmlkit.vectors.progress_bar import EMBEDDING, Bar
from dmlkit.vectors.stored import known_points
from dmlkit.vectors.trained import TrainedModel

RESUMES = "finished parts are kept; fix the problem and run the same command again"


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
    def of(cls, images: Sequence[LabelledImage], left_out: Sequence[str] = ()) -> "Incoming":
        """Return images with their ids by content, and messages on those that were left out before."""
        found = cls(skipped=list(left_out))
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

    def drop(self, gallery: GalleryFolder) -> None:
        """Drop the images that a gallery has, except those without a label there that get one now."""
        known = {name: label for name, label in zip(gallery.ids, gallery.labels, strict=True) if name in self.new}
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
    def embedded(self, trained: TrainedModel, fabric: Ranks, place: Path, bar: Bar) -> Generator[Iterator[PointBlock]]:
        """Embed the new images, and yield their embeddings, which are in parts on the disk until the block ends.

        The parts are those of `dmlkit.vectors.job.embed_job`. If the process is stopped or the block fails, finished
        parts are kept, and the same call resumes.

        Args:
            place: folder in the gallery for the parts, of which this process is the sole writer.

        Raises:
            UserError: none of the images could be read, or see `PartEmbedder`.
        """
        images = LabelledImages(self.new)
        job = EmbedJob(images, "images for a gallery", place, skip_bad_images=True)
        parts = job.parts
        try:
            with writing(place, advice=RESUMES):
                self.resumed = embed_parts(job, trained, fabric, lambda: known_points(trained, images, fabric), bar)
                for number, part in enumerate(parts.read()):
                    missing = sorted({*parts.images(number)}.difference(part.indices.tolist()))
                    self.skipped += part.faults
                    for row in missing:
                        del self.new[images.ids[row]]
                if not self.new:
                    parts.discard()
                refuse_nothing_read(len(self.new) + len(self.repeated), self.skipped, "the images")
                yield blocks_of(images.ids, parts)
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
