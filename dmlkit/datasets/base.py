"""The dataset interface: labelled samples of one split, and how validation classes are cut from training ones."""

from math import ceil
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dmlkit.component import ComponentConfig
from dmlkit.datasets.files.archives import Published
from dmlkit.datasets.files.dataset import ClassSubset, Dataset
from dmlkit.datasets.files.listing import Listing
from dmlkit.errors import UserError

Split = Literal["train", "validation", "test", "all"]
FOLDS = 4


class DatasetConfig(ComponentConfig, frozen=True):
    """Root of the dataset family."""

    published: ClassVar[Published | None] = None
    """For a benchmark: its archives and the counts of the literature."""
    sample: ClassVar[Literal["image", "vector"]] = "image"
    """What it holds."""

    split: Literal["official", "reality_check"] = "official"
    """``reality_check`` tests on the last half of the classes and validates on a fold of the first half."""
    fold: Annotated[int, Field(ge=0, lt=FOLDS)] = 0
    """The fold that validates, with ``split: reality_check``."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the training classes, the last of them and at least two, held out to choose the best checkpoint."""
    on_bad_image: Literal["error", "skip"] = "error"
    """Whether an image that cannot be read stops the command, or is left out and listed in the summary."""
    cache: str | None = None
    """A folder that ``dmlkit data cache`` wrote: images are taken from it instead of being decoded."""

    @property
    def data_root(self) -> Path | None:
        """The folder all of which is its data: nothing else may be written there. None where a table names files."""
        root = getattr(self, "root", None)
        return None if root is None else Path(root)

    @property
    def validates(self) -> bool:
        """Whether there are validation classes."""
        return self.split == "reality_check" or self.validation_fraction > 0

    def build(self, split: Split) -> Dataset:
        """The images of a split; validation classes are cut from the training classes, never from test.

        Raises:
            UserError: files are missing, or too few classes are left for the split.
        """
        return self.images_of(self.listing(), split)

    def images_of(self, listing: Listing | None, split: Split) -> Dataset:
        """`build` from what the dataset's files say; None for a dataset without files.

        Raises:
            UserError: see `build`.
        """
        return self._fold(listing, split) if self.split == "reality_check" else self._official(listing, split)

    def _official(self, listing: Listing | None, split: Split) -> Dataset:
        load = self.load if listing is None else listing.images
        if split in ("test", "all"):
            return load(split)
        if listing is not None and listing.has("validation"):
            return listing.images(split)  # the dataset names its validation images
        whole = load("train")
        count = len(whole.class_names)
        # a single class would find itself whatever the model does
        held_out = max(2, ceil(count * self.validation_fraction)) if self.validation_fraction else 0
        if count - held_out < 1 or (split == "validation" and not held_out):
            raise UserError(
                f"dataset.validation_fraction: {self.validation_fraction} of {count} training classes leaves "
                f"{max(0, count - held_out)} to train and {held_out} to validate; expected at least one to train and "
                "two to validate, or validation_fraction 0"
            )
        kept = range(count - held_out) if split == "train" else range(count - held_out, count)
        return ClassSubset(whole, kept)

    def _fold(self, listing: Listing | None, split: Split) -> Dataset:
        whole = self.load("all") if listing is None else listing.images("all")
        if split == "all":
            return whole
        if whole.query is not None:
            raise UserError(f"dataset.split: reality_check needs one set of images, {self.name} has query and gallery")
        return ClassSubset(whole, class_fold(len(whole.class_names), self.fold)[split])

    def load(self, split: Literal["train", "test", "all"]) -> Dataset:
        """The images of the official split; ``train`` still holds the classes that `build` cuts for validation."""
        listing = self.listing()
        if listing is None:
            raise NotImplementedError
        return listing.images(split)

    def listing(self) -> Listing | None:
        """What the dataset's files say, faults included, before any image is opened; None without files, see `load`."""
        return None


def class_fold(count: int, fold: int) -> dict[Literal["train", "validation", "test"], list[int]]:
    """Classes of a fold of the Reality Check protocol (Musgrave et al., ECCV 2020).

    The last half of the sorted classes tests. Of the first half, n classes, floor(n / 4) contiguous ones validate:
    those before class floor(fold * n / 4), counted round the circle, so fold 0 validates on the last ones. Where
    4 does not divide n, its remainder never validates.

    Args:
        count: all classes.
        fold: 0..3.

    Raises:
        UserError: fewer than 16 classes leave single ones to validate, which find themselves whatever the model does.

    Example:
        >>> folds = class_fold(200, fold=1)  # CUB-200-2011
        >>> [(len(fold), fold[0], fold[-1]) for fold in folds.values()]
        [(75, 25, 99), (25, 0, 24), (100, 100, 199)]
    """
    half = count // 2
    size = half // FOLDS
    if size < 2:
        raise UserError(f"dataset.split: reality_check needs at least {4 * FOLDS} classes, there are {count}")
    end = fold * half // FOLDS
    validation = sorted(label % half for label in range(end - size, end))
    held_out = set(validation)
    return {
        "train": [label for label in range(half) if label not in held_out],
        "validation": validation,
        "test": list(range(half, count)),
    }
