"""Survey of a user's photos before the first recipe: images and classes of each split, sizes, and unused files."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dmlkit.datasets.base import DatasetConfig, Split
from dmlkit.datasets.files.dataset import Box
from dmlkit.datasets.files.listing import LISTED_SPLITS, ListedImages, ListedSplit, Listing
from dmlkit.datasets.files.paths import DATA_CHECK, raise_faults
from dmlkit.datasets.files.tar import content_in_shard
from dmlkit.datasets.folder import FolderConfig, stray_files
from dmlkit.datasets.shards import holds_shards
from dmlkit.datasets.table import TableConfig
from dmlkit.errors import UserError
from dmlkit.files.image_file import BadImageError, decoding, opened
from dmlkit.files.source import EXPECTED_DATA, require_path
from dmlkit.recipe.file import read_recipe
from dmlkit.recipe.start import validation_fraction

SAMPLE = 10_000  # images, at most, whose headers are read: 1 400 take 0.2 s
LEAST = 2  # classes of each split: a single class has nothing to be compared with


@dataclass(frozen=True)
class Survey:
    """Summary of a dataset.

    Args:
        images: number of images per split.
        classes: number of classes per split.
        per_class: number of images in the smallest, the median and the largest training class.
        sides: smallest, median and largest shorter side of the measured images, in pixels.
        measured: number of measured images, at most `SAMPLE`.
        unreadable: paths of those that could not be opened.
        strays: files that are not images, and images outside of the class folders, relative to the root.
        trained: number of images of the classes that are not held out for validation.
        held_out: names of the validation and test classes, on which nothing is trained.
    """

    images: dict[ListedSplit, int]
    classes: dict[ListedSplit, int]
    per_class: tuple[int, float, int]
    sides: tuple[int, float, int]
    measured: int
    unreadable: list[str]
    strays: tuple[list[str], list[str]]
    trained: int
    held_out: dict[Split, tuple[str, ...]]

    @property
    def names_validation(self) -> bool:
        """Whether the dataset has its own validation classes."""
        return self.classes["validation"] > 0


Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Progress bar of a step, given its name and its number of images; it is called with the number of images done."""


def _no_bar(_what: str, _total: int) -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda _: None)


def survey(config: DatasetConfig, bar: Bar = _no_bar) -> Survey:
    """Count the images of a dataset, and measure a sample of them.

    Raises:
        UserError: the dataset has no files, has problems, too few classes, or no readable image.
    """
    listing = config.listing()
    if listing is None:
        raise UserError(f"dataset {config.name}: the images are rendered; expected a dataset of image files")
    raise_faults([*listing.faults, *listing.overlaps()], DATA_CHECK)
    counts: dict[ListedSplit, np.ndarray] = {split: listing.class_sizes(split) for split in LISTED_SPLITS}
    classes: dict[ListedSplit, int] = {split: len(count) for split, count in counts.items()}
    _check_classes(classes, str(listing.source or listing.root))
    sides, measured, unreadable = _measure(listing, bar)
    settled = config.model_copy(update={"validation_fraction": validation_fraction(classes["train"])})
    validates = settled.validates or classes["validation"]
    held_out: tuple[Split, ...] = ("validation", "test") if validates else ("test",)
    sizes = counts["train"]
    return Survey(
        images={split: int(count.sum()) for split, count in counts.items()},
        classes=classes,
        per_class=(int(sizes.min()), float(np.median(sizes)), int(sizes.max())),
        sides=sides,
        measured=measured,
        unreadable=unreadable,
        strays=strays_of(config, listing),
        trained=len(settled.images_of(listing, "train")),
        held_out={split: settled.images_of(listing, split).class_names for split in held_out},
    )


def strays_of(config: DatasetConfig, listing: Listing) -> tuple[list[str], list[str]]:
    """Return the files of a folder of classes that are not images, and the images that belong to no class."""
    return stray_files(listing.root, listing.names) if isinstance(config, FolderConfig) else ([], [])


def _check_classes(classes: dict[ListedSplit, int], where: str) -> None:
    needed = {"train": "to train on", "validation": "to validate on", "test": "to test on"}
    found = {split: count for split, count in classes.items() if count or split != "validation"}
    if min(found.values()) < LEAST:
        parts = [f"{count} {needed[split]}" for split, count in found.items()]
        count = sum(found.values())
        raise UserError(
            f"{where}: has {count} {'class' if count == 1 else 'classes'}, {', '.join(parts)}; expected at least "
            f"{LEAST} of each: add images of more classes"
        )


def _measure(listing: Listing, bar: Bar) -> tuple[tuple[int, float, int], int, list[str]]:
    """Measure the shorter sides of evenly spaced images; also return their number and those that cannot be opened."""
    images = listing.everything()
    if not isinstance(images, ListedImages):
        raise UserError(f"{listing.source or listing.root} contains vectors; expected photos")
    sides: list[int] = []
    unreadable: list[str] = []
    fault: BadImageError | None = None
    sample = sorted({int(index) for index in np.linspace(0, len(images) - 1, SAMPLE).round()})
    with bar("measuring photos", len(sample)) as advance:
        for index in sample:
            path = images.paths[index]
            try:
                sides.append(_side(path, images.box(index)))
            except BadImageError as error:
                fault = error
                unreadable.append(path)
            advance(1)
    if not sides:
        raise UserError(f"none of {len(sample)} images could be opened; the last error: {fault}")
    return (min(sides), float(np.median(sides)), max(sides)), len(sample), unreadable


def _side(path: str, box: Box | None) -> int:
    """Return the shorter side of an image or of a box of it."""
    with decoding(path), opened(path, content_in_shard(path)) as image:
        width, height = image.size if box is None else (box[2] - box[0], box[3] - box[1])
        return round(min(width, height))


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
    require_path(target, EXPECTED_DATA)
    if target.suffix.lower() in (".csv", ".parquet"):
        return TableConfig(file=str(target), validation_fraction=0.0)
    if not target.is_dir():
        raise UserError(
            f"{target}: unsupported kind of file; expected a recipe (.yaml), a table (.csv or .parquet), or a folder"
        )
    signs = {sign: name for name, benchmark in published.items() for sign in benchmark.signs}
    other = "shards" if holds_shards(target) else "folder"
    name = next((name for sign, name in signs.items() if (target / sign).exists()), other)
    return DatasetConfig.variants[name](root=str(target), validation_fraction=0.0)
