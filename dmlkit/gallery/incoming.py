"""Images that come into a gallery: which ones are new, and their embeddings."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dmlkit.distributed.launch import Ranks
from dmlkit.files.image_file import BadImageError
from dmlkit.files.outputs import writing
from dmlkit.gallery.files import VECTORS
from dmlkit.gallery.images import LabelledImage
from dmlkit.loading.inputs import refuse_nothing_read
from dmlkit.vectors.fill import Filled, FillJob, fill
from dmlkit.vectors.images import ImageList
from dmlkit.vectors.progress_bar import Bar
from dmlkit.vectors.store import PART_IMAGES, VectorStore, keys_of, stored_model, write_part
from dmlkit.vectors.stored import known_points
from dmlkit.vectors.trained import TrainedModel


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

        If the process is stopped, finished parts are kept, and the same call resumes.

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

    Points that the model's run has are copied; local features are always computed.

    Args:
        needs_all: what to do about an image that cannot be read. Default: it is left out.
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
    return "" if image.label == label else f", with the label {label!r}, which it keeps; here it has {image.label!r}"
