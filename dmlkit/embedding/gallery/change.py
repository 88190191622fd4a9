"""Changes of a gallery, each in one commit: readers see the state before or after, and two writers take turns."""

import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from dmlkit.datasets.files.boxes import Boxes
from dmlkit.datasets.files.paths import readable_name
from dmlkit.embedding.fusion import OWN_MODEL, ModelChoice, with_local
from dmlkit.embedding.gallery.files import (
    MANIFEST,
    TABLE,
    TABLE_FOLDER,
    check_files,
    check_threshold,
    recorded_files,
)
from dmlkit.embedding.gallery.folder import GalleryFolder, is_any, present
from dmlkit.embedding.gallery.images import LabelledImage, images_of
from dmlkit.embedding.gallery.incoming import Incoming, remove_interrupted
from dmlkit.embedding.gallery.manifest import (
    GalleryManifest,
    GalleryModel,
    check_content,
    content_of,
    manifest_at,
    read_gallery_manifest,
    state_of,
)
from dmlkit.embedding.gallery.table import lancedb, model_name, open_table, reading
from dmlkit.embedding.manifest import check_same_description
from dmlkit.embedding.points import load_same_model, warn_of_other_model
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.trained import TrainedModel, describe
from dmlkit.errors import UserError
from dmlkit.files.escape import command_word
from dmlkit.files.lock import sole_writer
from dmlkit.files.outputs import check_folder, check_place, writing
from dmlkit.files.source import CREATING_MARK, INCOMING
from dmlkit.run_folder.folder import RunFolder
from dmlkit.run_folder.threshold import threshold_of

MOST_LABELS = 10_000  # in the recorded state: reading a million from gallery.json would slow down every command
PATIENCE = 600  # seconds that a writer waits for another, which holds a gallery for one commit alone


def add_images(
    path: Path,
    images: Path | Sequence[LabelledImage],
    *,
    label: str | None = None,
    boxes: Boxes | None = None,
    model: ModelChoice = OWN_MODEL,
    trained: TrainedModel | None = None,
    bar: Bar = no_bar,
) -> Incoming:
    """Add images to a gallery; an image that it already has is reported and left unchanged, unless it gets a label.

    If the process is stopped, the gallery is unchanged, and the same call resumes with the parts that were embedded.

    Args:
        images: see `images_of`; or images that were listed before.
        label: label of all images, for a path.
        boxes: boxes of the images, each of which is added, see `images_at`; for a path.
        model: the gallery's run, if it has moved, and the device.
        trained: the gallery's model, if it is loaded already, on the device.

    Raises:
        UserError: there is no gallery or no image, or the run has another model.
    """
    gallery = GalleryFolder(path)
    gallery.check(["id"])  # a damaged id would let its picture in a second time
    run = model.run or gallery.run
    incoming = Incoming.of(images_of(images, label, boxes, run) if isinstance(images, Path) else list(images))
    place = incoming.place(path)
    with sole_writer(place, what="an addition of these images", patience=inf):
        gallery = GalleryFolder(path)  # now: another process may have added the same images meanwhile
        with reading(path):
            incoming.drop(present(gallery.table, list(incoming.new)))
        fabric = model.start()
        if trained is None:
            trained = load_same_model(gallery, model, fabric)
        else:  # loaded before a migration, perhaps
            check_same_description(describe(trained), "the loaded model", gallery.manifest, str(path))
        trained = with_local(trained, gallery.manifest.local, str(path))
        warn_of_other_model(describe(trained), gallery)
        with incoming.embedded(gallery.manifest, trained, fabric, place, bar) as rows, changing(path) as table:
            if model_name(table) != gallery.manifest.current:
                raise UserError(f"{path}: was migrated to another model in the meantime; rerun the same command")
            if table.version != gallery.version:  # another process may have added some meanwhile
                incoming.drop(present(table, list(incoming.new)))
            if labeled := sorted(incoming.labeled & incoming.new.keys()):  # without those that cannot be read
                table.delete(is_any("id", labeled))
            if incoming.new:
                table.add(rows.reader(incoming.new, table.schema))
    with suppress(OSError):  # another process waited for this one, and is there now
        place.rmdir()
    return incoming


def remove_images(path: Path, *, labels: Sequence[str] = (), ids: Sequence[str] = (), paths: Sequence[str] = ()) -> int:
    """Remove the images with one of some labels, ids or paths from a gallery.

    Returns:
        Number of removed images.

    Raises:
        UserError: nothing is named, or no image has one of the names; then none is removed.
    """
    absolute = [os.path.abspath(name) for name in paths]  # noqa: PTH100 - as they were added, links not followed
    named = [("label", list(labels)), ("id", list(ids)), ("path", absolute)]
    if not any(values for _, values in named):
        raise UserError("remove: expected --label, --id or --path, to select the images to remove")
    read_gallery_manifest(path)
    with changing(path) as table:
        GalleryFolder(path).check([column for column, values in named if values])  # a damaged label would stay
        for column, values in named:
            for value in values:
                if not readable_name(value) or table.count_rows(is_any(column, [value])) == 0:
                    raise UserError(f"--{column} {value}: no image of {path} has this {column}; nothing was removed")
        condition = " OR ".join(is_any(column, values) for column, values in named if values)
        return table.delete(condition).num_deleted_rows


def restore_version(path: Path, version: int) -> int:
    """Restore a version of a gallery as a new version, which can itself be undone.

    Returns:
        Number of images of that version.

    Raises:
        UserError: there is no such version.
    """
    manifest = read_gallery_manifest(path)
    with changing(path, is_sound=False) as table:
        versions = [found["version"] for found in table.list_versions()]
        if version not in versions:
            raise UserError(f"{path}: has no version {version}; dmlkit gallery history {command_word(path)} lists them")
        check_files(path, manifest, version)
        wanted = open_table(path)
        wanted.checkout(version)
        check_content(path, manifest, wanted, is_newest=False)
        table.restore(version)
        return table.count_rows()


def compact_gallery(path: Path) -> None:
    """Merge small files, and remove files that belong to no version of the last 7 days; no image changes.

    What interrupted additions and migrations have embedded is removed too.

    Raises:
        UserError: there is no gallery, or its folder cannot be written.
    """
    read_gallery_manifest(path)
    with changing(path) as table:
        table.optimize()
        record_content(path, forget=True)
    remove_interrupted(path)


@contextmanager
def changing(path: Path, *, is_sound: bool = True) -> Generator[Any]:
    """Lock a gallery for one writer, yield its table, and record its contents at the end.

    Args:
        is_sound: raise an error if the newest version is damaged.

    Raises:
        UserError: another process keeps the lock, or the gallery cannot be read or written.
    """
    check = f"dmlkit gallery info --verify {command_word(path)}"
    advice = f"is the disk full or read-only? {check} checks the gallery for damage"
    with sole_writer(path, what="a change of a gallery", patience=PATIENCE), reading(path, "change", advice):
        if is_sound:
            GalleryFolder(path)
        else:
            check_files(path, read_gallery_manifest(path), all_versions=True)
        table = open_table(path)
        _record_model(path, table)  # a migration may have been killed after its commit
        yield table
        record_content(path)


def _record_model(path: Path, table: Any) -> GalleryManifest:
    """Describe the model of a table's version first in the manifest of a gallery, and return the manifest."""
    manifest = read_gallery_manifest(path)
    found = manifest_at(path, manifest, table)
    if found is not manifest:
        found.write(path / MANIFEST)
    return found


def record_content(path: Path, *, forget: bool = False) -> None:
    """Record the contents of the newest version of a gallery, before another process may write.

    If the process is killed before this, the version as a whole is not checked later.

    Args:
        forget: remove the records of versions that no longer exist; listing versions takes 0.2 ms each.
    """
    table = open_table(path)
    manifest = _record_model(path, table)
    if manifest.contents and table.version not in manifest.contents:
        found = _with_content(path, manifest, table)
        if forget:
            kept = {one["version"] for one in table.list_versions()}
            update: dict[str, Any] = {"contents": {key: one for key, one in found.contents.items() if key in kept}}
            for name, known in (("files", found.files), ("stamps", found.stamps)):
                update[name] = {file: one for file, one in known.items() if (path / file).exists()}
            found = found.model_copy(update=update)
        found.write(path / MANIFEST)


def _with_content(path: Path, manifest: GalleryManifest, table: Any) -> GalleryManifest:
    """Return a manifest with the contents of a table's version and the files; to be called while `reading`."""
    state = state_of(table, manifest.approximate)
    update = {
        "contents": {**manifest.contents, table.version: content_of(table)},
        "state": state if len(state.labels) <= MOST_LABELS else None,
        **recorded_files(path, manifest),
    }
    return manifest.model_copy(update=update)


class GallerySettings(NamedTuple):
    """What the manifest of a new gallery keeps besides its model."""

    thumbnails: bool = False
    """Store small pictures."""
    threshold: float | None = None
    """Similarity below which an image is unknown. Default: that of the run, if it was calibrated."""


DEFAULTS = GallerySettings()


def create_gallery(
    run: Path,
    images: Path | None,
    output: Path,
    *,
    label: str | None = None,
    boxes: Boxes | None = None,
    settings: GallerySettings = DEFAULTS,
    model: ModelChoice = OWN_MODEL,
    bar: Bar = no_bar,
) -> Incoming:
    """Create a gallery of a run's embeddings; if it is interrupted, the same call resumes.

    Args:
        run: run whose model embeds.
        images: see `images_of`; None creates an empty gallery.
        output: folder, new or empty.
        label: label of all images.
        boxes: boxes of the images, each of which is added, see `images_at`.
        settings: thumbnails and threshold.
        model: checkpoint, second model and device.

    Raises:
        UserError: the folder is not empty, or see `images_of` and `load_model`.
    """
    for option, given in ((f"--label {label}", label), ("--boxes", boxes)):
        if images is None and given is not None:
            raise UserError(f"{option}: applies only to IMAGES; give images, or remove it")
    check_threshold(settings.threshold)
    database = lancedb()
    incoming = Incoming.of([] if images is None else images_of(images, label, boxes, run))
    fabric = model.start()
    trained = model.load(RunFolder(run), fabric)
    manifest = GalleryManifest(**dict(gallery_model(trained, run, settings.threshold)), thumbnails=settings.thumbnails)
    with sole_writer(output, what="the creation of a gallery"):
        check_folder(output, "an interrupted gallery", CREATING_MARK, f"{INCOMING}*")
        check_place(output, [images, trained.recipe.dataset.data_root])
        _discard(output)  # of a creation that was stopped
        with writing(output):
            manifest.write(output / CREATING_MARK)
        try:
            place = incoming.place(output)
            with incoming.embedded(manifest, trained, fabric, place, bar) as rows, writing(output, RuntimeError):
                table = database.connect(output).create_table(TABLE, rows.reader(incoming.new))
                _with_content(output, manifest, table).write(output / CREATING_MARK)
        except BaseException:
            _discard(output)
            raise
        (output / CREATING_MARK).replace(output / MANIFEST)
        remove_interrupted(output)  # of other images
    return incoming


def gallery_model(trained: TrainedModel, run: Path, threshold: float | None = None) -> GalleryModel:
    """Return what a gallery knows of the model of a run; its threshold is the run's unless one is given."""
    description = describe(trained)
    calibrated = threshold_of(RunFolder(run), description.model.fingerprint)
    return GalleryModel(
        **dict(description),
        run=str(run.resolve()),
        threshold=calibrated.threshold if threshold is None and calibrated else threshold,
        threshold_is_own=threshold is not None,
        local=trained.local,
    )


def _discard(output: Path) -> None:
    if (output / CREATING_MARK).exists():
        shutil.rmtree(output / TABLE_FOLDER, ignore_errors=True)
        (output / CREATING_MARK).unlink()
