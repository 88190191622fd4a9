"""Changes of a gallery, each in one commit: readers see the state before or after, and two writers take turns."""

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from time import time
from typing import Any, NamedTuple

import torch

from dmlkit.datasets.files.boxes import Boxes
from dmlkit.datasets.files.image import thumbnail
from dmlkit.errors import UserError
from dmlkit.files.arrays import Values
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import command_word, near_path, quoted
from dmlkit.files.labels import label_of, stated_label
from dmlkit.files.lock import sole_writer
from dmlkit.files.outputs import check_folder, check_place, writing
from dmlkit.files.source import CREATING_MARK, place_of_run
from dmlkit.gallery.files import (
    MANIFEST,
    THUMBNAILS,
    VECTORS,
    VERSIONS,
    check_threshold,
    index_file,
    read_rows,
    rows_file,
    thumbnail_file,
)
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.images import Incoming, LabelledImage, images_of
from dmlkit.gallery.index import extend_index
from dmlkit.gallery.manifest import GalleryManifest, GalleryModel, changing, commit, moved, new_rows, schema
from dmlkit.nearest.near_pairs import check_reachable
from dmlkit.run_folder.folder import RunFolder
from dmlkit.run_folder.threshold import threshold_value
from dmlkit.vectors.fusion import OWN_MODEL, ModelChoice, with_local
from dmlkit.vectors.manifest import ModelSource, check_same_description
from dmlkit.vectors.points import load_same_model, warn_of_other_model
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.store import PART_IMAGES, SUFFIX, VectorStore, keys_of, write_part
from dmlkit.vectors.trained import TrainedModel, describe

JOINED = 8 * PART_IMAGES  # images of a part that joins others: 134 MB at 512 dimensions
KEPT = timedelta(days=7)  # of a version that is no longer the newest one, until `compact_gallery` removes it


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

    If the process is stopped, no version changes, and the same call resumes with the parts that were embedded.

    Args:
        images: see `images_of`; or images that were listed before.
        trained: the gallery's model, if it is loaded already, on the device.
    """
    import pyarrow as pa

    gallery = GalleryFolder(path)
    run = model.run or gallery.run
    listed, left_out = images_of(images, label, boxes, run) if isinstance(images, Path) else (images, ())
    incoming = Incoming.of(listed, left_out)
    incoming.drop(gallery.table)
    ranks = model.start()
    if trained is None:
        trained = load_same_model(gallery, model, ranks)
    else:  # loaded before a migration, perhaps
        check_same_description(describe(trained), "the loaded model", gallery.manifest, str(path))
    trained = with_local(trained, gallery.manifest.local, str(path))
    warn_of_other_model(describe(trained), gallery)
    places = zip(gallery.ids, gallery.table["part"].to_pylist(), strict=True)
    labeled = {part for name, part in places if name in incoming.labeled}  # need not be embedded again
    used = {Path(part).name for part in gallery.parts if part not in labeled}
    store = incoming.embed(path, trained, ranks, bar, used)
    with changing(path) as manifest:
        if manifest.current != gallery.manifest.current:
            raise UserError(f"{path}: was migrated to another model in the meantime; rerun the same command")
        known = read_rows(path, manifest.versions[-1])  # another process may have added some meanwhile
        incoming.drop(known)
        if incoming.new:
            manifest, rows = added(path, manifest, incoming, store)
            commit(path, manifest, pa.concat_tables([without(known, "id", incoming.labeled), rows]))
    return incoming


def added(path: Path, manifest: GalleryManifest, incoming: Incoming, store: VectorStore) -> tuple[GalleryManifest, Any]:
    """Return the manifest and the rows of a version for new images, and write their thumbnails."""
    images = incoming.new
    if not all((store.path / name).exists() for name in store.parts):  # left by a command that was killed a week ago
        raise UserError(f"{path}: was compacted in the meantime; rerun the same command")
    places, count = store.find(keys_of([*map(bytes.fromhex, images)])), len(images)
    for name, image in images.items() if manifest.thumbnails else ():  # versions and models share them by these names
        if not (file := thumbnail_file(path, name)).exists():
            file.parent.mkdir(exist_ok=True)
            with atomic_write(file) as partial:
                partial.write_bytes(thumbnail(image.path, image.box))
    incoming.added = count
    rows = new_rows(images, store, places, manifest.numbers)
    return manifest.model_copy(update={"numbers": manifest.numbers + count}), rows


def without(rows: Any, column: str, values: Iterable[str]) -> Any:
    """Return the rows that have none of some values in a column."""
    import pyarrow as pa

    left_out = {*values}
    indices = [row for row, value in enumerate(rows[column].to_pylist()) if value not in left_out]
    return rows.take(pa.array(indices, pa.int64()))


def remove_images(path: Path, *, labels: Sequence[str] = (), images: Sequence[str] = ()) -> int:
    """Remove the images of a gallery with one of some labels, or with an id or a path of some; return their number."""
    if not labels and not images:
        raise UserError("remove: expected ids or files of images, or --label, to select what to remove")
    with changing(path) as manifest:
        before = rows = read_rows(path, manifest.versions[-1])
        known = {column: set(rows[column].to_pylist()) for column in ("label", "id", "path")}
        names = list[str]()
        for label in labels:
            if (name := label_of(label)) is None or name not in known["label"]:
                raise UserError(f"--label {quoted(label)}: no image of {path} has this label; nothing was removed")
            names.append(name)
        ids = known["id"].intersection(images)
        files = {name: os.path.abspath(name) for name in images if name not in ids}  # noqa: PTH100 - links not followed
        for name, file in files.items():
            if file not in known["path"]:
                raise UserError(f"{quoted(name)}: no image of {path} has this id or path; nothing was removed")
        for column, values in (("label", names), ("id", ids), ("path", files.values())):
            rows = without(rows, column, values)
        commit(path, manifest, rows)
    return len(before) - len(rows)


def rename_label(path: Path, old: str, new: str) -> tuple[int, int]:
    """Give the images of a label another one, also one that exists already; return how many images had each before."""
    import pyarrow as pa

    known, name = label_of(old), stated_label(new, "NEW")
    with changing(path) as manifest:
        rows = read_rows(path, manifest.versions[-1])
        labels = rows["label"].to_pylist()
        counts = Counter[str | None](labels)
        if known is None or not counts[known]:
            raise UserError(f"{path}: no image has the label {old!r}; nothing was renamed")
        if known == name:
            raise UserError(f"NEW: {new!r} is the label that they have already; expected another one")
        renamed = pa.array([name if label == known else label for label in labels], pa.string())
        rows = rows.set_column(rows.schema.get_field_index("label"), schema().field("label"), renamed)
        commit(path, manifest, rows)
    return counts[known], counts[name]


def restore_version(path: Path, version: int, *, model: ModelSource | None = None) -> int:
    """Restore a version of a gallery as a new version, which can itself be undone; return its number of images.

    Args:
        model: the only one whose versions are restored, such as that of a server; by default those of any are.
    """
    with changing(path) as manifest:
        wanted = next((state for state in manifest.versions if state.number == version), None)
        if wanted is None:
            raise UserError(f"{path}: has no version {version}; dmlkit gallery history {command_word(path)} lists them")
        restored = manifest.of_model(wanted.model)
        if model not in (None, restored.model):
            raise UserError(
                f"{path}: version {version} has embeddings of another model, {near_path(restored.run)}; stop the "
                f"server, run dmlkit gallery restore {command_word(path)} {version}, and start it again"
            )
        read_rows(path, wanted)
        update = {"number": manifest.versions[-1].number + 1, "time": datetime.now(UTC)}
        versions = (*manifest.versions, wanted.model_copy(update=update))
        restored.model_copy(update={"versions": versions}).write(path / MANIFEST)
    return wanted.images


def compact_gallery(path: Path) -> None:
    """Join the parts, and remove versions that were replaced at least 7 days ago with their files; no image changes.

    What interrupted additions and migrations have embedded is kept as long.
    """
    with changing(path) as manifest:
        gallery = GalleryFolder(path)
        index = gallery.manifest.approximate
        if index is not None:
            manifest = manifest.model_copy(update={"approximate": extend_index(gallery, index)})
        if len(gallery.parts) > -(-len(gallery) // JOINED):
            manifest = commit(path, manifest, moved(gallery.table, *_joined_parts(gallery)))
        _forget(path, manifest)


def _joined_parts(gallery: GalleryFolder) -> tuple[VectorStore, Values]:
    """Write the points of a gallery into as few parts as possible; return the store and the row of each image."""
    place, keys = gallery.path / VECTORS / Path(gallery.parts[0]).parent, keys_of([*map(bytes.fromhex, gallery.ids)])
    names = list[str]()
    for rows in torch.arange(len(gallery)).split(JOINED):
        local = gallery.local_at(rows) if gallery.manifest.local else None
        names.append(write_part(place, keys[rows.numpy()], gallery.points_at(rows), local))
    others = {file.name for file in place.iterdir()}.difference(names)
    local = gallery.manifest.local
    store = VectorStore(place, gallery.manifest.dim, local.shape if local else None, used=others)
    return store, store.find(keys)


def _forget(path: Path, manifest: GalleryManifest) -> None:
    """Remove versions that another one replaced longer than `KEPT` ago, and what no other version needs."""
    now, newest = datetime.now(UTC), manifest.versions[-1]
    versions = [*(version for version, after in pairwise(manifest.versions) if now - after.time < KEPT), newest]
    tables = [read_rows(path, version, ["part", "id"]) for version in versions]
    parts = {path / VECTORS / part for table in tables for part in table["part"].unique().to_pylist()}
    names = {version.model for version in versions}
    others = {name: model for name, model in manifest.others.items() if name in names}
    manifest.model_copy(update={"versions": tuple(versions), "others": others}).write(path / MANIFEST)
    models: list[GalleryModel] = [manifest, *others.values()]
    wanted = {rows_file(path, version.rows) for version in versions}
    wanted |= {index_file(path, model.approximate.name) for model in models if model.approximate}
    if manifest.thumbnails:
        ids = {name for table in tables for name in table["id"].to_pylist()}  # most are in all versions
        wanted |= {thumbnail_file(path, name) for name in ids}
    for file in (path / VECTORS).glob(f"*/*{SUFFIX}"):
        if file not in parts and time() - file.stat().st_mtime > KEPT.total_seconds():
            file.unlink(missing_ok=True)
    for pattern in (f"{VERSIONS}/*", "index-*.faiss", f"{THUMBNAILS}/*"):
        for file in {*path.glob(pattern)} - wanted:
            file.unlink(missing_ok=True)


class GallerySettings(NamedTuple):
    """What the manifest of a new gallery keeps besides its model."""

    thumbnails: bool = False
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
    """Create a gallery of a run's embeddings, see `add_images`; if it is interrupted, the same call resumes."""
    for option in ("" if label is None else f"--label {label}", "" if boxes is None else boxes.option):
        if images is None and option:
            raise UserError(f"{option}: applies only to IMAGES; give images, or remove it")
    check_threshold(settings.threshold)
    listed, left_out = ([], ()) if images is None else images_of(images, label, boxes, run)
    incoming = Incoming.of(listed, left_out)
    ranks = model.start()
    if model.checkpoint is None:
        RunFolder(run).warn_of_loss()
    trained = model.load(RunFolder(run), ranks)
    if settings.threshold is not None and trained.local is None:
        check_reachable(trained.manifold, settings.threshold)
    manifest = GalleryManifest(**dict(gallery_model(trained, run, settings.threshold)), thumbnails=settings.thumbnails)
    with sole_writer(output, what="the creation of a gallery"):
        check_folder(output, "an interrupted gallery", CREATING_MARK)
        check_place(output, [images, trained.recipe.dataset.data_root])
        with writing(output):
            manifest.write(output / CREATING_MARK)
        for name in (VERSIONS, THUMBNAILS):  # of a creation that was stopped
            shutil.rmtree(output / name, ignore_errors=True)
        (output / VECTORS).mkdir(exist_ok=True)
        store, rows = incoming.embed(output, trained, ranks, bar), schema().empty_table()
        with writing(output / MANIFEST):
            if incoming.new:
                manifest, rows = added(output, manifest, incoming, store)
            commit(output, manifest, rows, CREATING_MARK)
            (output / CREATING_MARK).replace(output / MANIFEST)  # a mark in a gallery would let create replace it
    return incoming


def gallery_model(trained: TrainedModel, run: Path, threshold: float | None = None) -> GalleryModel:
    """Return what a gallery knows of the model of a run; its threshold is the run's unless one is given."""
    description = describe(trained)
    return GalleryModel(
        **dict(description),
        run=str(place_of_run(run)),
        threshold=threshold_value(run, description.model.fingerprint) if threshold is None else threshold,
        threshold_is_own=threshold is not None,
        local=trained.local,
    )
