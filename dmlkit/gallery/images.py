"""Images for a gallery: their files, labels and ids by content, which of them are new, and their embeddings."""

import hashlib
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dmlkit.datasets.files.boxes import Boxes
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError
from dmlkit.files.columns import LABEL, SIGHTING, sighting_cells
from dmlkit.files.image_file import BadImageError, Box, decoding
from dmlkit.files.labels import stated_label
from dmlkit.files.outputs import BOX, writing
from dmlkit.files.paths import raise_faults, readable_name, unreadable_name
from dmlkit.files.regular import check_regular
from dmlkit.files.where import cells_of, row_texts
from dmlkit.gallery.files import VECTORS
from dmlkit.loading.inputs import refuse_nothing_read
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.fill import Filled, FillJob, fill
from dmlkit.vectors.images import NONE, ImageList, images_at, label_depth, listed_images
from dmlkit.vectors.progress_bar import Bar
from dmlkit.vectors.store import PART_IMAGES, VectorStore, keys_of, stored_model, write_part
from dmlkit.vectors.stored import known_points
from dmlkit.vectors.trained import TrainedModel

ID_LENGTH = 32  # hexadecimal digits, 128 bits: no two of 10^15 images share one by chance


@dataclass(frozen=True)
class LabelledImage:
    """Image file, or a box of it, for a gallery."""

    path: str
    label: str | None
    box: Box | None = None
    cells: str | None = None
    """Other columns of its row in a table, see `row_texts`; a time and a place are among them."""

    def id(self) -> str:
        """Return a hash of the contents of the file, and of the box."""
        with decoding(self.path):
            check_regular(self.path)
            digest = hashlib.sha256(Path(self.path).read_bytes())
        if self.box is not None:
            digest.update(self.box.text.encode())
        return digest.hexdigest()[:ID_LENGTH]


def images_of(
    source: Path, label: str | None, boxes: Boxes | None = None, run: Path | None = None
) -> tuple[list[LabelledImage], Sequence[str]]:
    """Return the images of a file, a folder or a table, and messages on wrong entries, see `images_at`.

    Args:
        label: label of all images instead of their own, see `stated_label`.
        run: run that embeds them, whose levels name the folders of a label, see `label_depth`.
    """
    run_folder = None if run is None else RunFolder(run)
    depth = label_depth(run_folder.recipe()) if run_folder is not None and run_folder.recipe_path.exists() else 1
    options = (boxes or Boxes())._replace(skips=True)
    labels = None if label is None else NONE
    listed = listed_images(source, labels, options, depth=depth)
    table, images = listed or (None, images_at(source, labels, boxes, depth=depth))
    raise_faults(unreadable_name(path) for path in images.paths if not readable_name(path))
    names = images.label_names(images.labels)
    if label is not None:
        names = [stated_label(label, "--label")] * len(images)
    if table is not None and options.source is None and not any(names):
        raise UserError(f"{source}: no image has a label; fill the column label, or state one with --label")
    columns: Any = {}
    if table is not None:
        columns = {name: table.table[name] for name in table.table.column_names if name not in ("path", LABEL, *BOX)}
        if columns.keys() & {*SIGHTING}:
            columns |= zip(SIGHTING, zip(*sighting_cells(table), strict=True), strict=True)
    cells = row_texts(cells_of(columns), len(images))
    labeled = [
        LabelledImage(os.path.abspath(path), name, images.box(row), text)  # noqa: PTH100 - links are not followed
        for row, (path, name, text) in enumerate(zip(images.paths, names, cells, strict=True))
    ]
    return labeled, images.left_out


@dataclass
class Incoming:
    """Images for a gallery, and the outcome."""

    new: dict[str, LabelledImage] = field(default_factory=dict[str, LabelledImage])
    """Images that the gallery does not have, by their ids."""
    repeated: list[str] = field(default_factory=list[str])
    """One message per image that the gallery already has, or that comes twice."""
    skipped: list[str] = field(default_factory=list[str])  # one message per image that could not be read
    labeled: set[str] = field(default_factory=set[str])  # ids of those of ``new`` that the gallery has without a label
    added: int = 0  # number of rows written
    resumed: int = 0  # number of images that were embedded before, e.g. by an interrupted command

    @property
    def unlabeled(self) -> int:
        """Number of images without a label."""
        return sum(image.label is None for image in self.new.values())

    @classmethod
    def of(cls, images: Sequence[LabelledImage], left_out: Sequence[str] = ()) -> "Incoming":
        """Return images with their ids by content, and messages on those that were left out before."""
        incoming = cls(skipped=list(left_out))
        for image in images:
            try:
                id = image.id()  # noqa: A001
            except BadImageError as error:
                incoming.skipped.append(str(error))
                continue
            known = incoming.new.setdefault(id, image)
            if known.label is None and image.label is not None:  # those of the folder itself come first
                incoming.new[id], known, image = image, image, known
            if known is not image:
                other = _other_label(image, known.label)
                incoming.repeated.append(f"{image.path}: the same picture as {known.path}{other}")
        return incoming

    def drop(self, rows: Any) -> None:
        """Drop the images in the rows of a gallery, except those without a label there that get one now."""
        rows = zip(*(rows[name].to_pylist() for name in ("id", "label")), strict=True)
        known = {name: label for name, label in rows if name in self.new}
        self.labeled = {name for name, label in known.items() if label is None and self.new[name].label is not None}
        for id, label in known.items():  # noqa: A001
            if id not in self.labeled:
                image = self.new.pop(id)
                self.repeated.append(f"{image.path}: is in the gallery already{_other_label(image, label)}")

    def embed(
        self, gallery: Path, trained: TrainedModel, ranks: Ranks, bar: Bar, used: Container[str] = ()
    ) -> VectorStore:
        """Embed the new images into the gallery's store, and return it; those that cannot be read are dropped.

        Args:
            used: parts that are not opened: those of the gallery, without any of ``labeled``.
        """
        filled = fill_gallery(gallery, self.new, trained, ranks, bar, used=used)
        self.resumed = filled.known
        self.skipped += filled.faults
        for name, row in zip([*self.new], filled.rows.tolist(), strict=True):
            if row < 0:
                del self.new[name]
        refuse_nothing_read(len(self.new) + len(self.repeated), self.skipped, "the images")
        return filled.store


def fill_gallery(
    gallery: Path,
    images: Mapping[str, LabelledImage],
    trained: TrainedModel,
    ranks: Ranks,
    bar: Bar,
    *,
    needs_all: str = "",
    used: Container[str] = (),
) -> Filled:
    """Embed images, given by their ids, into the store of a gallery.

    Points that the model's run has are copied; local features are always computed. For ``needs_all`` see `FillJob`.
    """
    listed = ImageList([image.path for image in images.values()], boxes=[image.box for image in images.values()])
    vectors_folder, keys, model = gallery / VECTORS, keys_of([*map(bytes.fromhex, images)]), stored_model(trained)
    options: dict[str, Any] = {"used": used, "keeps_damaged": True}  # an earlier version may name it
    store = VectorStore.at(vectors_folder / model.key, trained, **options)
    missing = torch.from_numpy(store.find(keys) < 0)
    if missing.any() and trained.local is None and (known := known_points(trained, listed)):
        new = missing[known.indices].nonzero()[:, 0]
        with writing(store.path / "points"):
            for part in new.split(PART_IMAGES) if len(new) else ():
                write_part(store.path, keys[known.indices[part].numpy()], known.points[part])
    job = FillJob(listed, keys, vectors_folder, model, exact=False, needs_all=needs_all)
    filled = fill(job, trained, ranks, bar=bar, **options)
    return filled._replace(known=len(images) - int(missing.sum()))


def _other_label(image: LabelledImage, label: str | None) -> str:
    here = "no label" if image.label is None else repr(image.label)
    return "" if image.label == label else f", with the label {label!r}, which it keeps; here it has {here}"
