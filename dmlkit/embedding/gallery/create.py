"""Create a gallery: whole, or not at all."""

import shutil
from pathlib import Path

from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.gallery.damage import content_of, recorded_files
from dmlkit.embedding.gallery.images import images_of
from dmlkit.embedding.gallery.incoming import Incoming
from dmlkit.embedding.gallery.manifest import (
    CREATING,
    MANIFEST,
    TABLE,
    TABLE_FOLDER,
    GalleryManifest,
    check_threshold,
    holds_gallery,
    lancedb,
)
from dmlkit.embedding.in_memory import Bar, no_bar
from dmlkit.embedding.manifest import describe
from dmlkit.embedding.trained import load_model
from dmlkit.errors import UserError
from dmlkit.files.atomic import is_partial
from dmlkit.files.lock import LOCK, sole_writer
from dmlkit.files.outputs import check_place, writing
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.run_folder.threshold import threshold_of


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
                files = recorded_files(output, {})
                manifest.model_copy(update={"contents": contents, "files": files}).write(output / CREATING)
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
