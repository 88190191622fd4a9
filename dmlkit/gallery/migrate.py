"""A newer model for a gallery: its images are embedded again into the store, and swapped in by one commit."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from uuid import uuid4

from dmlkit.errors import UserError, some_of
from dmlkit.files.image_file import BadImageError, Box
from dmlkit.files.lock import sole_writer
from dmlkit.files.source import require_gallery
from dmlkit.gallery.change import gallery_model
from dmlkit.gallery.files import VECTORS
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.images import LabelledImage, fill_gallery
from dmlkit.gallery.manifest import changing, commit, moved
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.fusion import OWN_MODEL, ModelChoice
from dmlkit.vectors.manifest import check_same_description
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.store import stored_model
from dmlkit.vectors.trained import TrainedModel, describe


@dataclass(frozen=True)
class Migrated:
    """Outcome of a migration."""

    images: int
    before: int  # version with the embeddings of the old model
    version: int  # the newest one
    resumed: int  # images that were embedded before, e.g. by an interrupted command
    is_new: bool  # the gallery had another model before
    threshold: float | None = None  # for pairs, of the calibrated new run; none is used for points with patches
    index: str | None = None
    """Options that built the approximate index of the old embeddings, which the new ones do not have."""
    lost: str | None = None
    """Local features that the old embeddings had and the new ones do not have."""


WAY_ON = (
    "nothing was changed; restore the file, or remove the image with dmlkit gallery remove, and rerun the same command "
    "to resume"
)


def migrate_gallery(
    path: Path, run: Path, images: Path | None = None, *, model: ModelChoice = OWN_MODEL, bar: Bar = no_bar
) -> Migrated:
    """Embed all images of a gallery with another run, and replace the old embeddings in one commit.

    Other processes may add and remove images meanwhile. If the process is stopped, no version changes, and the same
    call resumes. The old embeddings remain a version, see `restore_version`, with their threshold and index.

    Args:
        images: folder that has the images now, if they have moved: an image is looked for by the end of its path.
    """
    if images is not None and not images.is_dir():
        raise UserError(f"{images}: no such folder; expected the folder that has the images of {path} now")
    require_gallery(path)
    ranks = model.start()
    trained = model.load(RunFolder(run), ranks)
    place = path / VECTORS / stored_model(trained).key / "migration"
    with sole_writer(place, what="a migration of this gallery", patience=inf):
        gallery = GalleryFolder(path)  # now: another process may have migrated it meanwhile
        if _has_model(gallery, trained):
            return Migrated(len(gallery), gallery.version, gallery.version, 0, is_new=False)
        located = _located(gallery, images, {}, bar)
        resumed = fill_gallery(path, located, trained, ranks, bar, needs_all=WAY_ON).known
        with changing(path) as manifest:
            gallery = GalleryFolder(path)
            located = _located(gallery, images, located, bar)
            filled = fill_gallery(path, located, trained, ranks, bar, needs_all=WAY_ON)  # those added meanwhile
            paths = [image.path for image in located.values()]
            described, name = gallery_model(trained, run), uuid4().hex[:12]
            announced = manifest.model_copy(update={"others": {**manifest.others, name: described}}).of_model(name)
            changed = commit(path, announced, moved(gallery.table, filled.store, filled.rows, paths))
    index = gallery.manifest.approximate
    return Migrated(
        len(gallery),
        gallery.version,
        changed.versions[-1].number,
        resumed,
        is_new=True,
        threshold=None if trained.local else described.threshold,
        index=f"--method {index.kind}" if index else None,
        lost="patches" if gallery.manifest.local and not trained.local else None,
    )


def _has_model(gallery: GalleryFolder, trained: TrainedModel) -> bool:
    """Return whether the embeddings of a gallery are those of a model itself, not of one that was aligned with it."""
    ours, theirs = describe(trained), gallery.manifest
    with suppress(UserError):
        check_same_description(ours, "", theirs, "")
        return (ours.model.fingerprint, trained.local) == (theirs.model.fingerprint, theirs.local)
    return False


def _located(
    gallery: GalleryFolder, images: Path | None, known: Mapping[str, LabelledImage], bar: Bar
) -> dict[str, LabelledImage]:
    """Return the images of a gallery by their ids, each where its content is now."""
    located, lost = dict[str, LabelledImage](), list[str]()
    with bar("comparing files", len(gallery)) as advance:
        for name, path, box in zip(gallery.ids, gallery.paths, gallery.boxes, strict=True):
            if image := known.get(name) or _file(name, path, box, images):
                located[name] = image
            else:
                lost.append(path)
            advance(1)
    if lost:
        raise UserError(
            f"{gallery.path}: {len(lost)} of {len(gallery)} images are missing or have changed: "
            f"{some_of(lost)}; nothing was changed: restore these files, name the folder that "
            "has them now as IMAGES, or remove them with dmlkit gallery remove"
        )
    return located


def _file(name: str, path: str, box: Box | None, images: Path | None) -> LabelledImage | None:
    """Return the image with an id, at its path or below the folder of the moved images; None if it is not there."""
    places = [path]
    if images is not None:
        parts = Path(path).parts[1:]
        places = [*(str(images.absolute().joinpath(*parts[start:])) for start in range(len(parts))), path]
    for place in places:
        image = LabelledImage(place, None, box)
        with suppress(BadImageError):
            if image.id() == name:
                return image
    return None
