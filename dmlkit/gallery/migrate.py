"""A newer model for a gallery: its images are embedded again, in parts that resume, and swapped in by one commit."""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError, some_of
from dmlkit.files.atomic import write_text
from dmlkit.files.image_file import BadImageError, Box
from dmlkit.files.lock import sole_writer
from dmlkit.files.outputs import writing
from dmlkit.files.source import INCOMING
from dmlkit.gallery.change import gallery_model
from dmlkit.gallery.commit import blocks_of, changing, commit, moved, write_part
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.images import ID_LENGTH, LabelledImage, LabelledImages
from dmlkit.gallery.incoming import embed_parts
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.fusion import OWN_MODEL, ModelChoice
from dmlkit.vectors.in_memory import Known
from dmlkit.vectors.job import EmbedJob
from dmlkit.vectors.manifest import check_same_description
from dmlkit.vectors.parts import PartFolder
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.stored import known_points
from dmlkit.vectors.trained import TrainedModel, describe

IDS = "ids.txt"  # in the folder of a job: what its parts are of
SOURCE = "images of a gallery"


@dataclass(frozen=True)
class Migrated:
    """Outcome of a migration."""

    images: int
    """Number of images."""
    before: int
    """Version with the embeddings of the old model."""
    version: int
    """Newest version."""
    resumed: int
    """Number of images that an interrupted command had embedded."""
    is_new: bool
    """Whether the gallery had another model before."""
    threshold: float | None = None
    """Threshold for pairs of the calibrated new run."""
    index: str | None = None
    """Options that built the approximate index of the old embeddings, which the new ones do not have."""
    lost: str | None = None
    """Local features that the old embeddings had and the new ones do not have."""


@dataclass(frozen=True)
class MigrationJob(EmbedJob):
    """Job that embeds the images of a gallery again."""

    way_on = (
        "nothing was changed; restore the file, or remove the image with dmlkit gallery remove, and rerun the same "
        "command to resume"
    )


def migrate_gallery(
    path: Path, run: Path, images: Path | None = None, *, model: ModelChoice = OWN_MODEL, bar: Bar = no_bar
) -> Migrated:
    """Embed all images of a gallery with another run, and replace the old embeddings in one commit.

    Readers see the old embeddings until then, and other processes may add and remove images; those added meanwhile are
    embedded before the commit. If the process is stopped, the gallery is unchanged, and the same call resumes. The old
    embeddings remain a version of the gallery, see `restore_version`, with their threshold, calibration and index.

    Args:
        run: run whose model embeds from now on.
        images: folder that has the images now, if they have moved: an image is looked for by the end of its path.
        model: checkpoint, second model and device.

    Raises:
        UserError: an image is missing or has changed or cannot be read; then the gallery is unchanged.
    """
    if images is not None and not images.is_dir():
        raise UserError(f"{images}: no such folder; expected the folder that has the images of {path} now")
    GalleryFolder(path)
    fabric = model.start()
    trained = model.load(RunFolder(run), fabric)
    place = path / f"{INCOMING}migration"
    with sole_writer(place, what="a migration of this gallery", patience=inf):
        gallery = GalleryFolder(path)  # now: another process may have migrated it meanwhile
        if _has_model(gallery, trained):
            found = Migrated(len(gallery), gallery.version, gallery.version, 0, is_new=False)
        else:
            migration = Migration(gallery, trained, fabric, place, images, bar)
            try:
                migration.embed(gallery)
                found = migration.commit(run)
            finally:
                migration.leave()
    with suppress(OSError):  # another process waited for this one, and is there now
        place.rmdir()
    return found


def _has_model(gallery: GalleryFolder, trained: TrainedModel) -> bool:
    """Return whether the embeddings of a gallery are those of a model itself, not of one that was aligned with it.

    Local features must be the same ones too.
    """
    ours = describe(trained)
    try:
        check_same_description(ours, "", gallery.manifest, "")
    except UserError:
        return False
    same = ours.model.fingerprint == gallery.manifest.model.fingerprint
    return same and trained.local == gallery.manifest.local


class Migration:
    """Embeddings of a gallery's images by another model, in parts in a folder with this process as the sole writer."""

    def __init__(
        self, gallery: GalleryFolder, trained: TrainedModel, fabric: Ranks, place: Path, images: Path | None, bar: Bar
    ) -> None:
        self.path, self.trained, self.fabric, self.place, self.images = gallery.path, trained, fabric, place, images
        self.bar = bar
        self.found: dict[str, LabelledImage] = {}  # images that are there, by their ids
        self.resumed = sum(1 for _ in self._embedded())

    def embed(self, gallery: GalleryFolder) -> PartFolder:
        """Embed the images of a version of the gallery, except those that an earlier call has embedded.

        Raises:
            UserError: an image is missing or has changed, or cannot be read.
        """
        images = LabelledImages(self._located(gallery))
        job = MigrationJob(images, SOURCE, self._folder(images.ids), skip_bad_images=False)
        with writing(self.path):
            job.output.mkdir(parents=True, exist_ok=True)
            write_text(job.output / IDS, "\n".join(images.ids))
            embed_parts(job, self.trained, self.fabric, lambda: self._known(images), self.bar)
        return job.parts

    def commit(self, run: Path) -> Migrated:
        """Replace the old embeddings; other processes that write to the gallery wait.

        Raises:
            UserError: see `embed`, or the disk is full; then the gallery is unchanged.
        """
        with changing(self.path) as manifest:
            gallery = GalleryFolder(self.path)
            parts = self.embed(gallery)  # of images that were added meanwhile
            model, name = gallery_model(self.trained, run), uuid4().hex[:12]
            announced = manifest.model_copy(update={"others": {**manifest.others, name: model}}).of_model(name)
            bare = announced.model_copy(update={"thumbnails": False})  # they are kept
            written, rows = write_part(self.path, bare, self.found, blocks_of(gallery.ids, parts))
            kept = {"thumbnails": manifest.thumbnails, "numbers": manifest.numbers}
            paths = [self.found[one].path for one in gallery.ids]
            new = moved(gallery.table, rows["part"][0].as_py() if len(rows) else "", paths)
            changed = commit(self.path, written.model_copy(update=kept), new)
        shutil.rmtree(self.place / "jobs", ignore_errors=True)
        index, before_local = gallery.manifest.approximate, gallery.manifest.local
        return Migrated(
            len(gallery),
            gallery.version,
            changed.versions[-1].number,
            self.resumed,
            is_new=True,
            threshold=model.threshold,
            index=index.option if index else None,
            lost=before_local.what if before_local and not self.trained.local else None,
        )

    def leave(self) -> None:
        """Remove jobs without a complete part."""
        for folder in self.place.glob("jobs/*"):
            PartFolder(folder, 0).leave()
            if not (folder / "parts").exists():
                shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # some are to be resumed
            (self.place / "jobs").rmdir()

    def _folder(self, ids: list[str]) -> Path:
        digest = hashlib.sha256("\n".join([self.trained.fingerprint, *ids]).encode()).hexdigest()
        return self.place / "jobs" / digest[:ID_LENGTH]

    def _known(self, images: LabelledImages) -> Known | None:
        """Return the points of those images that earlier jobs of this model, or its run, have embedded."""
        rows = {name: row for row, name in enumerate(images.ids)}
        points: dict[int, Tensor] = {}
        stored = known_points(self.trained, images, self.fabric)
        if stored is not None:
            points |= dict(zip(stored.rows.tolist(), stored.points, strict=True))
        points |= {rows[name]: point for name, point in self._embedded() if name in rows}
        order = sorted(points)
        return Known(torch.tensor(order), torch.stack([points[row] for row in order])) if order else None

    def _embedded(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the ids of the images in complete parts of this model, and their points."""
        for file in sorted(self.place.glob(f"jobs/*/{IDS}")):
            ids = file.read_text(encoding="utf-8").split("\n")
            images = LabelledImages(dict.fromkeys(ids, LabelledImage("", None)))
            job = MigrationJob(images, SOURCE, file.parent, skip_bad_images=False)
            with suppress(UserError):  # of another model
                job.parts.check(job.describe(self.trained))
                for part in job.parts.complete(self.trained.manifold.point_dim):
                    yield from zip([ids[row] for row in part.indices.tolist()], part.points, strict=True)

    def _located(self, gallery: GalleryFolder) -> dict[str, LabelledImage]:
        """Return the images of a version by their ids, each where its content is now.

        Raises:
            UserError: some are missing or have changed; the first of them are named.
        """
        found, lost = dict[str, LabelledImage](), list[str]()
        with self.bar("comparing files", len(gallery)) as advance:
            for name, path, box in zip(gallery.ids, gallery.paths, gallery.boxes, strict=True):
                image = self.found.get(name) or self._file(name, path, box)
                if image is None:
                    lost.append(path)
                else:
                    found[name] = image
                advance(1)
        if lost:
            raise UserError(
                f"{self.path}: {len(lost)} of {len(gallery)} images are missing or have changed: "
                f"{some_of(lost)}; nothing was changed: restore these files, name the folder that "
                "has them now as IMAGES, or remove them with dmlkit gallery remove --path FILE"
            )
        self.found = found
        return found

    def _file(self, name: str, path: str, box: Box | None) -> LabelledImage | None:
        """Return the image with an id, at its path or below the folder of the moved images; None if it is not there."""
        places = [path]
        if self.images is not None:
            parts = Path(path).parts[1:]
            places = [*(str(self.images.absolute().joinpath(*parts[start:])) for start in range(len(parts))), path]
        for place in places:
            image = LabelledImage(place, None, box)
            with suppress(BadImageError):
                if image.id() == name:
                    return image
        return None
