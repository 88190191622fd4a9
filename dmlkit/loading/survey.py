"""A quick look at someone's photos before the first recipe: how many, of how many classes, how large."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.dataset import BadImageError
from dmlkit.datasets.files.image import decoding, opened
from dmlkit.datasets.files.listing import LISTED_SPLITS, ListedImages, ListedSplit, Listing
from dmlkit.datasets.files.tar.member import content_in_shard
from dmlkit.errors import UserError

SAMPLE = 200  # images whose headers are read: their median side is within a few percent of that of all


@dataclass(frozen=True)
class Survey:
    """What a dataset looks like.

    Args:
        images: of each split.
        classes: of each split.
        per_class: images of the smallest, the median and the largest training class.
        sides: shorter sides of `SAMPLE` images, pixels: the smallest, the median and the largest.
        unreadable: how many of those could not be opened.
    """

    images: dict[ListedSplit, int]
    classes: dict[ListedSplit, int]
    per_class: tuple[int, float, int]
    sides: tuple[int, float, int]
    unreadable: int

    @property
    def names_validation(self) -> bool:
        """Whether the dataset says itself which classes validate."""
        return self.classes["validation"] > 0


def survey(config: DatasetConfig, advance: Callable[[int], None] = lambda _: None) -> Survey:
    """Count the images of a dataset, and measure a sample of them.

    Args:
        config: the dataset.
        advance: told of images measured, `SAMPLE` in all or as many as there are.

    Raises:
        UserError: the dataset has no files or faulty ones, too few classes to train on, or no readable image.
    """
    listing = config.listing()
    if listing is None:
        raise UserError(f"dataset {config.name}: its images are rendered; there are no photos to look at")
    counts: dict[ListedSplit, np.ndarray] = {split: _class_sizes(listing, split) for split in LISTED_SPLITS}
    for split in LISTED_SPLITS:
        if split != "validation" or listing.has(split):
            listing.images(split)  # tells all faults
    sizes = counts["train"]
    sides, unreadable = _measure(listing, advance)
    return Survey(
        images={split: int(count.sum()) for split, count in counts.items()},
        classes={split: len(count) for split, count in counts.items()},
        per_class=(int(sizes.min()), float(np.median(sizes)), int(sizes.max())),
        sides=sides,
        unreadable=unreadable,
    )


def _class_sizes(listing: Listing, split: ListedSplit) -> np.ndarray:
    """Images of each class of a split, (C,)."""
    return np.unique(listing.labels[listing.splits == LISTED_SPLITS.index(split)], return_counts=True)[1]


def _measure(listing: Listing, advance: Callable[[int], None]) -> tuple[tuple[int, float, int], int]:
    """The shorter sides of a sample, evenly drawn, and how many of it could not be opened."""
    images = listing.everything()
    if not isinstance(images, ListedImages):
        raise UserError(f"{listing.source or listing.root}: holds vectors; expected photos")
    sides: list[int] = []
    fault: BadImageError | None = None
    sample = sorted({int(index) for index in np.linspace(0, len(images) - 1, SAMPLE).round()})
    for index in sample:
        try:
            path = images.paths[index]
            with decoding(path), opened(path, content_in_shard(path)) as image:
                box = images.box(index)
                width, height = image.size if box is None else (box[2] - box[0], box[3] - box[1])
                sides.append(round(min(width, height)))
        except BadImageError as error:
            fault = error
        advance(1)
    if not sides:
        raise UserError(f"none of {len(sample)} images could be opened; the last: {fault}")
    return (min(sides), float(np.median(sides)), max(sides)), len(sample) - len(sides)
