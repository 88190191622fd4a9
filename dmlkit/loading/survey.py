"""Survey of a user's photos before the first recipe: numbers of images and classes, and image sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.dataset import BadImageError
from dmlkit.datasets.files.image import decoding, opened
from dmlkit.datasets.files.listing import LISTED_SPLITS, ListedImages, ListedSplit, Listing
from dmlkit.datasets.files.tar import content_in_shard
from dmlkit.datasets.shards import holds_shards
from dmlkit.datasets.table import TableConfig
from dmlkit.errors import UserError
from dmlkit.recipe.file import read_recipe

SAMPLE = 200  # images whose headers are read; their median side is within a few percent of that of all images


@dataclass(frozen=True)
class Survey:
    """Summary of a dataset.

    Args:
        images: number of images per split.
        classes: number of classes per split.
        per_class: number of images in the smallest, the median and the largest training class.
        sides: smallest, median and largest shorter side of `SAMPLE` images, in pixels.
        unreadable: number of sampled images that could not be opened.
    """

    images: dict[ListedSplit, int]
    classes: dict[ListedSplit, int]
    per_class: tuple[int, float, int]
    sides: tuple[int, float, int]
    unreadable: int

    @property
    def names_validation(self) -> bool:
        """Whether the dataset has its own validation classes."""
        return self.classes["validation"] > 0


def survey(config: DatasetConfig, advance: Callable[[int], None] = lambda _: None) -> Survey:
    """Count the images of a dataset, and measure a sample of them.

    Args:
        config: configuration of the dataset.
        advance: called with the number of images measured, at most `SAMPLE` in total.

    Raises:
        UserError: the dataset has no files, has problems, too few training classes, or no readable image.
    """
    listing = config.listing()
    if listing is None:
        raise UserError(f"dataset {config.name}: the images are rendered; expected a dataset of image files")
    counts: dict[ListedSplit, np.ndarray] = {split: _class_sizes(listing, split) for split in LISTED_SPLITS}
    for split in LISTED_SPLITS:
        if split != "validation" or listing.has(split):
            listing.images(split)  # raises if there are problems
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
    """Return the number of images per class of a split, (C,)."""
    return np.unique(listing.labels[listing.splits == LISTED_SPLITS.index(split)], return_counts=True)[1]


def _measure(listing: Listing, advance: Callable[[int], None]) -> tuple[tuple[int, float, int], int]:
    """Measure the shorter sides of evenly spaced images; also return how many could not be opened."""
    images = listing.everything()
    if not isinstance(images, ListedImages):
        raise UserError(f"{listing.source or listing.root} contains vectors; expected photos")
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
        raise UserError(f"none of {len(sample)} images could be opened; the last error: {fault}")
    return (min(sides), float(np.median(sides)), max(sides)), len(sample) - len(sides)


def dataset_at(target: Path, dataset: str | None = None, overrides: Sequence[str] = ()) -> DatasetConfig:
    """Return the dataset of a recipe, or that of a folder or table, without holding out validation classes.

    Raises:
        UserError: there is no such folder, or the path is a file of another kind.
    """
    if target.suffix in (".yaml", ".yml"):
        if dataset is not None:
            raise UserError("--dataset applies only to folders; remove it, since a recipe names its dataset")
        return read_recipe(target, overrides).dataset
    if overrides:
        raise UserError(f"--set applies only to recipes, got {target}; remove it, or use a recipe")
    published = {name: kind.published for name, kind in DatasetConfig.variants.items() if kind.published is not None}
    if dataset is not None:
        known = [*sorted(published), "folder", "shards"]
        if dataset not in known:
            raise UserError(f"--dataset: got {dataset!r}, expected {', '.join(known)}")
        return DatasetConfig.variants[dataset](root=str(target), validation_fraction=0.0)
    if target.suffix.lower() in (".csv", ".parquet"):
        return TableConfig(file=str(target), validation_fraction=0.0)
    if target.exists() and not target.is_dir():
        raise UserError(
            f"{target}: unsupported kind of file; expected a recipe (.yaml), a table (.csv or .parquet), or a folder"
        )
    if not target.is_dir():
        lines = [line for benchmark in published.values() for line in benchmark.instructions(target)]
        raise UserError("\n".join([f"{target}: no such folder", *lines]))
    signs = {sign: name for name, benchmark in published.items() for sign in benchmark.signs}
    other = "shards" if holds_shards(target) else "folder"
    name = next((name for sign, name in signs.items() if (target / sign).exists()), other)
    return DatasetConfig.variants[name](root=str(target), validation_fraction=0.0)
