"""Change a gallery, each time in one commit: readers see it before or after, and two writers take turns."""

import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dmlkit.datasets.files.paths import readable_name
from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.gallery.folder import GalleryFolder, is_any, open_table, present
from dmlkit.embedding.gallery.images import images_of
from dmlkit.embedding.gallery.incoming import Incoming
from dmlkit.embedding.gallery.manifest import (
    CREATING,
    MANIFEST,
    TABLE,
    TABLE_FOLDER,
    GalleryManifest,
    check_content,
    check_files,
    check_threshold,
    content_of,
    holds_gallery,
    lancedb,
    read_gallery_manifest,
    reading,
    recorded_files,
)
from dmlkit.embedding.manifest import describe
from dmlkit.embedding.points import load_same_model
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.trained import load_model
from dmlkit.errors import UserError
from dmlkit.files.atomic import is_partial
from dmlkit.files.lock import LOCK, sole_writer
from dmlkit.files.outputs import check_place, writing
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.run_folder.threshold import threshold_of

PATIENCE = 600  # seconds that a writer waits for another, which holds a gallery for one commit alone


def add_images(
    path: Path,
    images: Path,
    *,
    label: str | None = None,
    run: Path | None = None,
    device: str = "auto",
    bar: Bar = no_bar,
) -> Incoming:
    """Add images to a gallery; a picture that is there already is told and left as it is.

    Args:
        path: the gallery.
        images: see `images_of`.
        label: of all images.
        run: where the gallery's run is now, if it has moved.
        device: see `start_fabric`.
        bar: shows each step.

    Raises:
        UserError: there is no gallery, or no image, or the run's model is another.
    """
    gallery = GalleryFolder(path)
    gallery.check(["id"])  # a damaged id would let its picture in a second time
    incoming = Incoming.of(images_of(images, label))
    with reading(path):
        incoming.drop(present(gallery.table, list(incoming.new)))
    fabric = start_fabric(device)
    trained = load_same_model(gallery, run, fabric)
    with incoming.embedded(gallery.manifest, trained, fabric, path, bar) as rows, changing(path) as table:
        if table.version != gallery.version:  # another process may have added some meanwhile
            incoming.drop(present(table, list(incoming.new)))
        if incoming.new:
            table.add(rows.reader(incoming.new, table.schema))
    incoming.added = len(incoming.new)
    return incoming


def remove_images(path: Path, *, labels: Sequence[str] = (), ids: Sequence[str] = (), paths: Sequence[str] = ()) -> int:
    """Take images out of a gallery: those with one of the labels, ids or paths.

    Returns:
        How many.

    Raises:
        UserError: nothing is named, or one of the names is of no image; then none is removed.
    """
    absolute = [os.path.abspath(name) for name in paths]  # noqa: PTH100 - as they were added, links not followed
    named = [("label", list(labels)), ("id", list(ids)), ("path", absolute)]
    if not any(values for _, values in named):
        raise UserError("remove: name what to take out by --label, --id or --path")
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
    """Make a gallery what it was at a version; that is a new version, so it can be taken back.

    Returns:
        How many images it has.

    Raises:
        UserError: there is no such version.
    """
    manifest = read_gallery_manifest(path)
    with changing(path, is_sound=False) as table:
        versions = [found["version"] for found in table.list_versions()]
        if version not in versions:
            raise UserError(f"{path}: has no version {version}; dmlkit gallery history {path} lists them")
        check_files(path, manifest, version)
        wanted = open_table(path)
        wanted.checkout(version)
        check_content(path, manifest, wanted, is_newest=False)
        table.restore(version)
        return table.count_rows()


def compact_gallery(path: Path) -> None:
    """Put small files together, and drop files that belong to no version of the last 7 days; no image changes.

    Raises:
        UserError: there is no gallery, or its folder cannot be written.
    """
    read_gallery_manifest(path)
    with changing(path) as table:
        table.optimize()
        record_content(path, forget=True)


@contextmanager
def changing(path: Path, *, is_sound: bool = True) -> Generator[Any]:
    """Give the table of a gallery to one writer at a time, and record what it holds in the end.

    Args:
        path: the gallery.
        is_sound: refuse a gallery whose newest version is damaged.

    Raises:
        UserError: another process does not let go of it, or it cannot be read or written.
    """
    advice = f"is the disk full, or not to be written? dmlkit gallery info --verify {path} tells whether it is damaged"
    with sole_writer(path, what="a change of a gallery", patience=PATIENCE), reading(path, "change", advice):
        if is_sound:
            GalleryFolder(path)
        else:
            check_files(path, read_gallery_manifest(path), all_versions=True)
        yield open_table(path)
        record_content(path)


def record_content(path: Path, *, forget: bool = False) -> None:
    """Write down what the newest version of a gallery holds; its writer calls this, before another may write.

    A kill before it leaves a version that is not checked as a whole.

    Args:
        path: the gallery.
        forget: versions that are gone; to list those that are there takes 0.2 ms each.
    """
    manifest, table = read_gallery_manifest(path), open_table(path)
    if manifest.contents and table.version not in manifest.contents:
        contents = {**manifest.contents, table.version: content_of(table)}
        recorded = recorded_files(path, manifest)
        if forget:
            kept = {found["version"] for found in table.list_versions()}
            contents = {version: content for version, content in contents.items() if version in kept}
            there = {name for name in recorded["files"] if (path / name).exists()}
            recorded = {key: {name: known[name] for name in known if name in there} for key, known in recorded.items()}
        manifest.model_copy(update={"contents": contents, **recorded}).write(path / MANIFEST)


def create_gallery(
    run: Path,
    images: Path | None,
    output: Path,
    *,
    label: str | None = None,
    thumbnails: bool = False,
    threshold: float | None = None,
    checkpoint: CheckpointName | None = None,
    device: str = "auto",
    bar: Bar = no_bar,
) -> Incoming:
    """Create a gallery of a run's embeddings. A creation that was stopped starts over.

    Args:
        run: whose model embeds.
        images: see `images_of`; None creates an empty gallery.
        output: the folder, new or empty.
        label: of all images.
        thumbnails: keep small pictures.
        threshold: the similarity below which an image is of no label; by default the run's, if it was calibrated.
        checkpoint: which weights; by default the best, else the last.
        device: see `start_fabric`.
        bar: shows each step.

    Raises:
        UserError: the folder holds something, or see `images_of` and `load_model`.
    """
    if images is None and label is not None:
        raise UserError(f"--label {label}: is of IMAGES; name them, or leave it out to create an empty gallery")
    check_threshold(threshold)
    _check_new(output)
    check_place(output, [images, RunFolder(run).recipe().dataset.data_root])
    database = lancedb()
    incoming = Incoming.of([] if images is None else images_of(images, label))
    fabric = start_fabric(device)
    trained = load_model(RunFolder(run), fabric, checkpoint)
    description = describe(trained)
    calibrated = threshold_of(RunFolder(run), description.model.fingerprint)
    if threshold is None and calibrated is not None:
        threshold = calibrated.threshold
    manifest = GalleryManifest(**dict(description), run=str(run.resolve()), thumbnails=thumbnails, threshold=threshold)
    with sole_writer(output, what="the creation of a gallery"):
        _check_new(output)
        _discard(output)  # of a creation that was stopped
        with writing(output):
            manifest.write(output / CREATING)
        try:
            with incoming.embedded(manifest, trained, fabric, output, bar) as rows, writing(output, RuntimeError):
                table = database.connect(output).create_table(TABLE, rows.reader(incoming.new))
                contents = {table.version: content_of(table)}
                recorded = recorded_files(output, manifest)
                manifest.model_copy(update={"contents": contents, **recorded}).write(output / CREATING)
        except BaseException:
            _discard(output)
            raise
        (output / CREATING).replace(output / MANIFEST)
    incoming.added = len(incoming.new)
    return incoming


def _check_new(output: Path) -> None:
    """Make sure that a folder is free for a gallery: what is in it is of a creation that was stopped."""
    if holds_gallery(output):
        raise UserError(
            f"{output}: is a gallery already; add to it with dmlkit gallery add, or choose another --output"
        )
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"--output {output}: is a file; expected the name of a folder")
    names = {entry.name for entry in output.iterdir() if not is_partial(entry)} - {LOCK}
    if names and (CREATING not in names or names - {CREATING, TABLE_FOLDER}):
        raise UserError(f"{output}: is not empty and no gallery; choose another --output")


def _discard(output: Path) -> None:
    if (output / CREATING).exists():
        shutil.rmtree(output / TABLE_FOLDER, ignore_errors=True)
        (output / CREATING).unlink()
