"""Embeddings of a run's splits, kept in the run: the first command embeds the images, and all others read them."""

import hashlib
import json
import os
from collections.abc import Container, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from dmlkit.datasets.base import DatasetConfig, Split
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError, warn
from dmlkit.files.document import differences
from dmlkit.files.lock import sole_writer
from dmlkit.files.outputs import EMBEDDING_FILES
from dmlkit.files.source import LOCAL
from dmlkit.loading.image_changes import changes_since, stamp
from dmlkit.loading.inputs import inputs_of
from dmlkit.model import head_alone
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.features import software_of, stored_features
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.in_memory import Embeddings, Known, embed_images, fused
from dmlkit.vectors.job import EmbedJob, write_embeddings
from dmlkit.vectors.local_features import embed_with_patches
from dmlkit.vectors.manifest import Description, Manifest, SplitRecord
from dmlkit.vectors.parts import PART_IMAGES, Part
from dmlkit.vectors.points import all_points
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.trained import TrainedModel, describe


def split_embeddings(
    run: RunFolder,
    trained: TrainedModel,
    fabric: Ranks,
    dataset: Dataset,
    split: Split,
    *,
    of: str = "",
    bar: Bar = no_bar,
) -> Embeddings:
    """Return the embeddings of a split of a run, read from the run's folder of them or written to it.

    They are embedded again, with a warning that says why, if the weights, the preprocessing, the images, the software
    or the device are not those of the folder, or if it is damaged. Where the run cannot be written, a warning says so.
    Where training has stored the features of a frozen backbone, only the head is computed.
    The result is equal to the bit to that of `embed_images`. Another process that needs them meanwhile waits. Another
    dataset or transform than the run's own, and another computation than torch's, are embedded without the folder.

    Args:
        trained: its model, with the recipe of the dataset.
        fabric: the device, and the ranks; the first one reads and writes the folder.
        dataset: all images of the split.
        split: name of the split.
        of: name of a part of the model, if it is not all of it, for a folder of its own.

    Raises:
        UserError: no image could be read, or see `embed_dataset`.
    """
    if trained.fusion is not None:
        homes = [(one.run or run, one) for one in trained.members]
        return fused(trained, [split_embeddings(home, one, fabric, dataset, split, bar=bar) for home, one in homes])
    own = run.recipe()
    is_own = (trained.recipe.dataset.name, trained.recipe.transform) == (own.dataset.name, own.transform)
    if not is_own or trained.computation is not None:  # what a run keeps is torch's, equal to the bit
        return embed_images(trained, fabric, dataset, f"the {split} split of {run.path}", bar)
    stored = None
    if fabric.is_global_zero:
        stored = StoredSplit(split_job(run, trained, dataset, split, device=fabric.device.type, of=of), trained)
    found = fabric.broadcast(stored and stored.read()[0])
    if found is not None:
        return found
    with sole_embedding(stored.job if stored else None) as error:
        reason = ""
        if stored is not None:
            found, reason = stored.read()  # another process may have stored them while this one waited for it
        found = fabric.broadcast(found)
        if found is not None:
            return found
        if reason:
            warn(f"{reason}; the images are embedded again")
        found = _embedded(run, trained, fabric, dataset, split, bar)
        if stored is not None:
            error = error or stored.write(found, fabric.device.type)
        if error:
            warn(f"{error}; the embeddings are not stored, and the next command embeds the images again")
    return found


def _embedded(
    run: RunFolder, trained: TrainedModel, fabric: Ranks, dataset: Dataset, split: Split, bar: Bar
) -> Embeddings:
    """Embed a split: its images, or the features of a frozen backbone that training has stored."""
    source = f"the {split} split of {run.path}"
    features = stored_features(run, trained, fabric, dataset, split)
    if features is None:
        return embed_images(trained, fabric, dataset, source, bar)
    recipe = trained.recipe.model_copy(update={"transform": None})
    return embed_images(TrainedModel.of(recipe, head_alone(trained.model)), fabric, features, source)


class StoredSplit:
    """Embeddings of a split in a run's folder, or the place for them, by the job that embeds them."""

    def __init__(self, job: EmbedJob, trained: TrainedModel) -> None:
        self.job, self.description, self.recipe = job, describe(trained), trained.recipe

    def open(self) -> tuple[EmbeddingFolder | None, str]:
        """Open the folder if its embeddings are whole and those of this model and these images; all are checked.

        Returns:
            The folder, or None and the reason if a folder is there.
        """
        output = self.job.output
        if not (output / "manifest.json").exists():
            return None, ""
        try:
            folder = EmbeddingFolder(output)
            reason = self._difference(folder.manifest)
            if not reason:
                folder.check_points()
        except (UserError, OSError) as error:
            return None, str(error).partition("; ")[0]
        return (None, f"{output}: {reason}") if reason else (folder, "")

    def _difference(self, manifest: Manifest) -> str:
        """Return in words why stored embeddings are not the wanted ones."""
        wanted, stored = self.job.split, manifest.split
        if manifest.source != self.job.source:
            return f"holds embeddings of {manifest.source}, which are kept"
        if wanted is None or stored is None:
            return "does not record its images"
        wanted = wanted.model_copy(update={"device": wanted.device or stored.device})
        changes = _differences(manifest, stored, self.description, wanted)
        if stored.images != wanted.images:
            changes.append(changes_since(self.job.output / "items.parquet", self.job.dataset))
        if changes:
            return f"holds other embeddings ({'; '.join(changes)})"
        images = len(self.job.dataset)
        omitted = {row for row in stored.omitted if row < images}
        if len(omitted) != len(stored.omitted) or manifest.count + len(omitted) != images:
            return f"has {manifest.count} embeddings and lists {len(stored.omitted)} omissions of {images} images"
        inputs = inputs_of(self.job.dataset, self.recipe.transform, training=False) if omitted else {}
        if any(inputs[row, 0].input is not None for row in omitted):  # a disk may have failed for a moment
            return "lacks an image that can be read now"
        return ""

    def read(self) -> tuple[Embeddings | None, str]:
        """Return the stored embeddings, or None and the reason if a folder is there."""
        folder, reason = self.open()
        if folder is None or folder.manifest.split is None:
            return None, reason
        was_read = torch.ones(len(self.job.dataset), dtype=torch.bool)
        was_read[list(folder.manifest.split.omitted)] = False
        rows = was_read.nonzero()[:, 0]
        return Embeddings(all_points(folder), self.job.dataset.labels[rows], rows, list(folder.skipped)), ""

    def finished(self) -> Manifest | None:
        """Return the manifest of stored embeddings, with the job's threshold; otherwise clear the folder for new ones.

        Raises:
            UserError: the embeddings lack images that the job does not allow to be left out.
        """
        folder, reason = self.open()
        if folder is None:
            if not self.is_taken():
                self.clear()
            if reason:
                warn(f"{reason}; the images are embedded again")
            return None
        if folder.skipped and not self.job.skip_bad_images:
            raise UserError(f"{folder.skipped[0]}; {self.job.way_on}")
        self.job.parts.leave()
        manifest = folder.manifest
        if manifest.threshold != self.job.threshold:  # calibrated since
            manifest = manifest.model_copy(update={"threshold": self.job.threshold})
            manifest.write(self.job.output / "manifest.json")
        return manifest

    def write(self, found: Embeddings, device: str) -> str:
        """Store embeddings, unless the folder holds those of other images; return the error of a full disk, if any."""
        output = self.job.output
        if self.is_taken():
            return ""
        try:
            write_embeddings(self.job, self.description, lambda: _parts(found, device), scratch=output)
            self.job.parts.leave()  # those of an interrupted dmlkit embed
        except OSError as error:
            if not (output / "manifest.json").exists():
                self.clear()
            return f"{output}: cannot write embeddings: {error.strerror or error}"
        return ""

    def is_taken(self) -> bool:
        """Return whether the folder holds the embeddings of other images than the split's."""
        try:
            return Manifest.read(self.job.output / "manifest.json").source != self.job.source
        except UserError:  # there is none, or it is damaged
            return False

    def clear(self) -> None:
        """Remove the embeddings, if they can be removed."""
        for name in reversed(EMBEDDING_FILES):
            with suppress(OSError):
                (self.job.output / name).unlink(missing_ok=True)


def _differences(theirs: Description, their_record: SplitRecord, ours: Description, record: SplitRecord) -> list[str]:
    """Return in words what embeddings depend on and is not the same, apart from the images."""
    found, wanted = (
        {
            "geometry": description.manifold.model_dump(mode="json"),
            "preprocessing": description.preprocessing.model_dump(mode="json"),
            "software": split.software,
            "device": split.device,
        }
        for description, split in ((theirs, their_record), (ours, record))
    )
    weights = ["other weights"] if theirs.model.fingerprint != ours.model.fingerprint else []
    return [*weights, *differences("", found, wanted)]


def _parts(found: Embeddings, device: str) -> Iterator[Part]:
    faults = found.faults
    for start in range(0, len(found.points), PART_IMAGES):
        rows = slice(start, start + PART_IMAGES)
        yield Part(found.points[rows], found.indices[rows], faults, device)
        faults = []


def split_job(
    run: RunFolder, trained: TrainedModel, dataset: Dataset, split: Split, *, device: str, of: str = ""
) -> EmbedJob:
    """Return the job that embeds a split of a run into the run's folder of these embeddings.

    Args:
        device: kind of the device; empty if it is known only later, and any will do.
        of: see `split_embeddings`.
    """
    recipe = trained.recipe
    return EmbedJob(
        dataset,
        source=f"{recipe.dataset.name}:{split}" + (f" ({of})" if of else ""),
        output=run.embeddings_of(f"{split}-{of}" if of else split, trained.checkpoint),
        skip_bad_images=recipe.dataset.on_bad_image == "skip",
        split=SplitRecord(
            images=hash_images(dataset, recipe.dataset),
            software=software_of(recipe),
            device=device,
            checkpoint=trained.saved,
        ),
        stamps=stamps_of(dataset),
        run=run.path,
    )


def stamps_of(dataset: Dataset) -> list[tuple[int, int] | None]:
    """Return the size and modification time of the file of each image; None for a box and other samples."""
    return [None if (file := dataset.file(index)) is None else stamp(file) for index in range(len(dataset))]


def embed_files(trained: TrainedModel, fabric: Ranks, dataset: Dataset, source: str, bar: Bar = no_bar) -> Embeddings:
    """Embed images, but read the points of those that the model's run has stored; see `known_points`.

    Patches of a model that computes them are computed with the points, so that no image passes the network twice.

    Raises:
        UserError: see `embed_images` and `embed_with_patches`.
    """
    if trained.local is not None and trained.local.run == LOCAL:
        return embed_with_patches(trained, trained.local, fabric, dataset, source, bar)
    if trained.fusion is not None:
        return fused(trained, [embed_files(one, fabric, dataset, source, bar) for one in trained.members])
    known = known_points(trained, dataset, fabric) if fabric.is_global_zero else None
    return embed_images(trained, fabric, dataset, source, bar, fabric.broadcast(known))


def known_points(trained: TrainedModel, dataset: Dataset, fabric: Ranks) -> Known | None:
    """Return the points of those images of a list that are in a folder of embeddings of a run; None if there are none.

    An image is known by the path of its file; the file must have the size and time that it had when it was embedded,
    and the weights, the preprocessing, the software and the device must be the same. They are equal to the bit to
    those computed in the same batches; in others they differ by rounding. A warning says what is computed again.
    """
    files = (dataset.file(index) for index in range(len(dataset)))
    places = {os.path.realpath(file): index for index, file in enumerate(files) if file is not None}
    points: dict[int, Tensor] = {}
    for path in sorted(trained.run.embeddings.glob("*/manifest.json")) if trained.run and trained.saved else ():
        changed = 0
        for file, mark, point in _stored_images(path.parent, trained, fabric.device.type, places):
            if mark == stamp(file):
                points[places[file]] = point
            else:
                changed += 1
        if changed:
            warn(f"{path.parent}: {changed} of these images changed after they were embedded, and are embedded again")
    rows = sorted(points)
    return Known(torch.tensor(rows), torch.stack([points[row] for row in rows])) if rows else None


def _stored_images(
    folder: Path, trained: TrainedModel, device: str, wanted: Container[str]
) -> Iterator[tuple[str, tuple[int, int], Tensor]]:
    """Yield file, size and time, and point of the stored images that are wanted, if the model is the same."""
    try:
        split = Manifest.read(folder / "manifest.json").split
        if split is None or split.checkpoint != trained.saved:
            return
        stored = EmbeddingFolder(folder)
        names = stored.items.column_names
        if "modified" not in names:  # all images were in memory
            return
        files, *marks = (stored.items[name].to_pylist() for name in ("path", "bytes", "modified"))
        files = [os.path.realpath(file) for file in files]
        rows = [row for row, file in enumerate(files) if file in wanted and marks[0][row] is not None]
        record = SplitRecord(images=split.images, software=software_of(trained.recipe), device=device)
        changes = _differences(stored.manifest, split, describe(trained), record)
        if changes and rows:
            warn(f"{folder}: holds other embeddings ({'; '.join(changes)}); the images are embedded again")
        if changes or not rows:
            return
        points = all_points(stored)
    except (UserError, OSError) as error:
        warn(f"{str(error).partition('; ')[0]}; the images are embedded again")
        return
    yield from ((files[row], (marks[0][row], marks[1][row]), points[row]) for row in rows)


def hash_images(dataset: Dataset, config: DatasetConfig) -> str:
    """Return a hash that changes with the images of a dataset, their order or their labels.

    Files count by their names, sizes and modification times, samples in memory by their content, and samples of neither
    kind by the recipe's options of the dataset.
    """
    options = config.model_dump(mode="json", exclude={"on_bad_image"})
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for index, label in enumerate(dataset.labels.tolist()):
        digest.update(f"\0{dataset.key(index)}\0{dataset.class_names[label]}\0".encode())
        if dataset.in_memory:
            digest.update(dataset.sample(index).numpy().tobytes())
        else:
            digest.update(repr(stamp(dataset.paths[index])).encode())
    return digest.hexdigest()


@contextmanager
def sole_embedding(job: EmbedJob | None) -> Generator[str]:
    """Wait until no other process embeds into a folder, and keep others waiting within the block.

    Args:
        job: the job of the folder; None on ranks that do not write.

    Yields:
        The error if the folder cannot be written, else an empty text.
    """
    with ExitStack() as stack:
        error = ""
        try:
            if job is not None:
                stack.enter_context(sole_writer(job.output, what="an embedding of these images", patience=inf))
        except UserError as unwritable:
            error = str(unwritable)
        yield error
