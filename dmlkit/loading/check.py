"""A dataset on disk before it is used: a survey of its images and classes, and checks for problems.

The survey comes before the first recipe: images and classes of each split, sizes, and unused files. The checks list
problems of files and images, and compare counts with the published ones.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from dmlkit.datasets.base import SHARE, DatasetConfig, Split
from dmlkit.datasets.files.archives import Published, md5
from dmlkit.datasets.files.dataset import Dataset, evenly_spread, search_faults
from dmlkit.datasets.files.image import Turns, frames
from dmlkit.datasets.files.listing import LISTED_SPLITS, ListedImages, ListedSplit, Listing
from dmlkit.datasets.folder import FolderConfig
from dmlkit.datasets.hf import stored_dataset, stored_features
from dmlkit.datasets.table import TableConfig
from dmlkit.errors import OptionError, UserError, counted, some_of
from dmlkit.files.image_file import BadImageError, decoding, opened
from dmlkit.files.image_table import EXPECTED, lists_images
from dmlkit.files.paths import DATA_CHECK, raise_faults, require_readable
from dmlkit.files.readers.base import reader_of
from dmlkit.files.source import EXPECTED_DATA, require_path
from dmlkit.loading.batches import WORKER_START, default_workers, start_reader
from dmlkit.recipe.file import read_recipe
from dmlkit.recipe.overrides import is_recipe
from dmlkit.recipe.start import validation_fraction

SAMPLE = 10_000  # images, at most, whose headers are read: 1 400 take 0.2 s
LEAST = 2  # classes of each split: a single class has nothing to be compared with


@dataclass(frozen=True)
class Survey:
    """Summary of a dataset."""

    images: dict[ListedSplit, int]
    classes: dict[ListedSplit, int]
    per_class: tuple[int, float, int]  # number of images in the smallest, the median and the largest training class
    sides: tuple[int, float, int]  # smallest, median and largest shorter side of the measured images, in pixels
    measured: int
    unreadable: list[str]
    trained: int
    held_out: dict[Split, tuple[str, ...]]  # names of the validation and test classes, on which nothing is trained
    dataset: DatasetConfig
    notes: list[str]

    @property
    def names_validation(self) -> bool:
        """Whether the dataset has its own validation classes."""
        return self.classes["validation"] > 0


Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Progress bar of a step, given its name and its number of images; it is called with the number of images done."""


def survey(config: DatasetConfig, bar: Bar = lambda _what, _total: nullcontext(lambda _: None)) -> Survey:
    """Count the images of a dataset, and measure a sample of them."""
    listing = config.listed()
    if listing is None:
        raise UserError(f"dataset {config.name}: the images are rendered; expected a dataset of image files")
    shared, notes = listing.shared_classes() if not config.tests_known else [], list[str]()
    if shared:
        raise_faults(listing.overlaps() if config.label_separator else [])
        config, listing = config.model_copy(update={"split": "images"}), listing.of_known_classes(SHARE)
        notes.append(
            f"{listing.source or listing.root}: {counted(len(shared), 'class is', 'classes are')} in several splits "
            f"({some_of(shared)}), so the recipe has split: images: test images search the training images of known "
            "classes; halves would test unseen classes instead"
        )
    raise_faults(listing.faults, DATA_CHECK)
    listing.warn_of_notes()
    counts: dict[ListedSplit, np.ndarray] = {split: listing.class_sizes(split) for split in LISTED_SPLITS}
    classes: dict[ListedSplit, int] = {split: len(count) for split, count in counts.items()}
    if isinstance(config, FolderConfig):
        config.check_depth()
    _check_classes(classes, str(listing.source or listing.root))
    sides, measured, unreadable = _measure(listing, bar)
    fraction = validation_fraction(int(counts["train"].sum()) if config.tests_known else classes["train"])
    settled = config.model_copy(update={"validation_fraction": fraction})
    if settled.tests_known:
        try:
            settled.images_of(listing, "validation")
        except OptionError:  # two photos of each class remain to train on
            settled = settled.model_copy(update={"validation_fraction": 0.0})
    validates = "validation" in settled.own_splits or classes["validation"]
    held_out: tuple[Split, ...] = ("validation", "test") if validates else ("test",)
    splits: tuple[Split, ...] = ("train", *held_out)
    parts = {split: settled.searched_of(listing, split) for split in splits}
    for split, images in parts.items():
        fault, remarks = search_faults(images, split, str(listing.source or listing.root))
        raise_faults([] if fault is None else [fault])
        notes += remarks
    sizes = counts["train"]
    return Survey(
        images={split: int(count.sum()) for split, count in counts.items()},
        classes=classes,
        per_class=(int(sizes.min()), float(np.median(sizes)), int(sizes.max())),
        sides=sides,
        measured=measured,
        unreadable=unreadable,
        trained=len(parts["train"]),
        held_out={split: parts[split].class_names for split in held_out},
        dataset=config,
        notes=notes,
    )


def _check_classes(classes: dict[ListedSplit, int], where: str) -> None:
    needed = {"train": "to train on", "validation": "to validate on", "test": "to test on"}
    counts = {split: count for split, count in classes.items() if count or split != "validation"}
    if min(counts.values()) < LEAST:
        parts = [f"{count} {needed[split]}" for split, count in counts.items()]
        count = sum(counts.values())
        raise UserError(
            f"{where}: has {counted(count, 'class', 'classes')}, {', '.join(parts)}; expected at least "
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
    sample: list[int] = evenly_spread(torch.arange(len(images)), SAMPLE).tolist()
    with bar("measuring photos", len(sample)) as advance:
        for index in sample:
            path = images.paths[index]
            try:
                if (box := images.box(index)) is None and images.file(index) is None:  # stored in a table
                    sides_of = images.sample(index).shape[1:]
                else:
                    with decoding(path), opened(path) as image:
                        sides_of = image.size if box is None else (box.right - box.left, box.bottom - box.top)
                sides.append(round(min(sides_of)))
            except BadImageError as error:
                fault = error
                unreadable.append(path)
            advance(1)
    if not sides:
        raise UserError(f"none of {counted(len(sample), 'image', 'images')} could be opened; the last error: {fault}")
    return (min(sides), float(np.median(sides)), max(sides)), len(sample), unreadable


DAY = "day"
"""Column of groups that no table needs: the images of each class of one day are a group."""


def dataset_at(
    target: Path,
    dataset: str | None = None,
    overrides: Sequence[str] = (),
    *,
    columns: Mapping[str, str] | None = None,
    root: Path | None = None,
) -> DatasetConfig:
    """Return the dataset of a recipe, or that of a folder or table, without holding out validation classes.

    Args:
        dataset: name of the dataset in a folder. Default: recognized by its files.
        columns: see `read_images`; ``{"group": "day"}`` groups by day, unless a table has a column ``day``.
    """
    columns = dict(columns or {})
    if not is_recipe(target):
        require_readable(str(path) for path in (target, root) if path is not None)
    by_day = columns.get("group") == DAY and not is_recipe(target) and not stored_features(target)
    if by_day and (reader := reader_of(target)) is not None:
        by_day = DAY not in reader.read(target).table.column_names
    if by_day:
        del columns["group"]
    config = _dataset_at(target, dataset, overrides, columns, root)
    return config.model_copy(update={"group": DAY}) if by_day else config


def _dataset_at(
    target: Path, dataset: str | None, overrides: Sequence[str], columns: dict[str, str], root: Path | None
) -> DatasetConfig:
    published = {name: kind.published for name, kind in DatasetConfig.variants.items() if kind.published is not None}
    signs = {sign: name for name, benchmark in published.items() for sign in benchmark.signs}
    sign = next((name for sign, name in signs.items() if (target / sign).exists()), None)
    stored = stored_dataset(target, columns) if dataset is None and target.exists() else None
    is_table = stored is None and dataset is None and sign is None and target.exists() and lists_images(target, columns)
    if (columns or root) and not is_table and (stored is None or root):
        raise UserError(f"--column, --root: apply to a table, got {target}; remove them, or write them into the recipe")
    if is_recipe(target) and not is_table:
        if dataset is not None:
            raise UserError("--dataset applies only to folders; remove it, since a recipe names its dataset")
        return read_recipe(target, overrides).dataset
    if overrides:
        raise UserError(f"--set applies only to recipes, got {target}; remove it, or use a recipe")
    if dataset is not None:
        known = [*sorted(published), "folder"]
        if dataset not in known:
            raise UserError(f"--dataset: got {dataset!r}, expected {', '.join(known)}")
        return DatasetConfig.variants[dataset](root=str(target), validation_fraction=0.0)
    require_path(target, EXPECTED_DATA)
    if stored is not None:
        return stored
    if is_table:
        table_root = None if root is None else str(root)
        return TableConfig(file=str(target), root=table_root, columns=columns, validation_fraction=0.0)
    if not target.is_dir():
        raise UserError(f"{target}: unsupported kind of file; {EXPECTED}, or a recipe (.yaml)")
    return DatasetConfig.variants[sign or "folder"](root=str(target), validation_fraction=0.0)


Verdict = Literal["ok", "note", "fault"]


class Finding(NamedTuple):
    """Row of the report's table."""

    check: str
    expected: str
    found: str
    verdict: Verdict


@dataclass
class Findings:
    """Results of a check."""

    rows: list[Finding] = field(default_factory=list[Finding])
    faults: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    @property
    def errors(self) -> int:
        """Number of problems: the lines, and the rows that differ from published values, which have no line."""
        return len(self.faults) + sum(row.verdict == "fault" and row.expected != "0" for row in self.rows)


def check_files(config: DatasetConfig) -> tuple[Listing, Findings]:
    """Check archives, lists, splits and counts, without opening an image."""
    findings = Findings(rows=list(archive_rows(config)))
    try:
        listing = config.listed()
    except UserError as error:
        wrong = (row for row in findings.rows if row.verdict == "fault")
        lines = [f"{row.check}: {row.found}, expected {row.expected}" for row in wrong]
        raise UserError("\n".join([*lines, str(error)])) from None
    if listing is None:
        raise UserError(f"dataset {config.name}: the images are rendered, so there are no files to check")
    shared = listing.shared_classes() if config.split == "official" else []
    findings.faults += [*listing.faults, *(listing.overlaps() if shared else ())]
    findings.notes += listing.notes
    findings.rows += count_rows(listing, config.published)
    findings.rows.append(Finding("classes in two splits", "0", str(len(shared)), "fault" if shared else "ok"))
    findings.rows += class_size_rows(listing)
    if not findings.faults:
        faults, notes = split_faults(config, listing)
        findings.faults += faults
        findings.notes += notes
    return listing, findings


def split_faults(config: DatasetConfig, listing: Listing) -> tuple[list[str], list[str]]:
    """Return the errors that ``dmlkit train`` would raise, and its remarks: on an empty split, or nothing to find."""
    faults: list[str] = []
    notes: list[str] = []
    splits = dict.fromkeys(config.own_splits)
    if config.split != "all" and len(listing.rows_of("validation")):  # of a table or folder that names them
        splits["validation"] = None
    for split in splits:
        try:
            images = config.searched_of(listing, split)
        except UserError as error:
            faults.append(str(error))
            continue
        if len(images.class_names) < 2:
            faults.append(f"{listing.source or listing.root}: {split} has a single class, expected at least two")
        fault, remarks = search_faults(images, split, str(listing.source or listing.root))
        faults += [fault] if fault is not None else []
        notes += remarks
    return list(dict.fromkeys(faults)), notes


def archive_rows(config: DatasetConfig) -> Iterator[Finding]:
    """Yield the check of the md5 of each archive in the root or next to it."""
    if config.published is None:
        return
    root = Path(getattr(config, "root", "."))
    for archive in config.published.archives:
        path = next((folder / archive.file for folder in (root, root.parent) if (folder / archive.file).exists()), None)
        if path is not None and archive.md5 is not None:
            checksum = md5(path)
            is_ok, size = checksum == archive.md5, f", {path.stat().st_size:,} bytes"
            yield Finding(f"md5 of {path}", archive.md5, checksum + size * (not is_ok), "ok" if is_ok else "fault")


def count_rows(listing: Listing, published: Published | None) -> Iterator[Finding]:
    """Yield numbers of images and classes per split, compared with the published ones."""
    masks: dict[str, np.ndarray] = {split: listing.splits == index for index, split in enumerate(LISTED_SPLITS)}
    if listing.query is not None and listing.gallery is not None:
        masks |= {"query": listing.query, "gallery": listing.gallery}
    for split, mask in masks.items():
        expected = published.counts.get(split) if published else None
        if expected is None and not mask.any():
            continue
        counts = int(mask.sum()), len(np.unique(listing.labels[mask]))
        for unit, count, wanted in zip((f"{listing.sample}s", "classes"), counts, expected or ("", ""), strict=True):
            shown = f"{wanted:,}" if expected else ""
            yield Finding(f"{split} {unit}", shown, f"{count:,}", "ok" if not expected or count == wanted else "fault")


def class_size_rows(listing: Listing) -> Iterator[Finding]:
    """Yield the smallest, median and largest number of images per class, and a note on classes with one image."""
    for split in LISTED_SPLITS:
        counts = listing.class_sizes(split)
        if len(counts):
            spread = f"{counts.min()} / {median(counts.tolist()):g} / {counts.max()}"
            yield Finding(f"{split} {listing.sample}s per class, min / median / max", "", spread, "ok")
            lone = int((counts == 1).sum())
            if lone:
                yield Finding(f"{split} classes of a single {listing.sample}", "0", str(lone), "note")


MORE_FRAMES = "more than one frame or page, of which the first is used"
ONE_COLOR = "only one color"


class Inspection(NamedTuple):
    """Result of decoding an image."""

    position: int
    digest: bytes  # hash of the pixels; empty if the image cannot be read
    fault: str
    notes: tuple[str, ...] = ()  # on what is unusual


class Inspected(torch.utils.data.Dataset[Inspection]):
    """Inspections of a dataset's images, of whose pixels only a digest is kept."""

    def __init__(self, images: Dataset) -> None:
        self.images = images

    def __getitem__(self, index: int) -> Inspection:
        try:
            pixels = self.images.sample(index)
            is_file = self.images.file(index) is not None or self.images.box(index) is not None
            count = frames(self.images.paths[index]) if self.images.kind.has_pixels and is_file else 1
        except BadImageError as error:
            return Inspection(index, b"", str(error))
        # with the shape, because two plain images of different sides may have the same bytes
        content = repr(tuple(pixels.shape)).encode() + pixels.movedim(0, -1).contiguous().numpy().tobytes()
        is_plain = self.images.kind.has_pixels and bool((pixels == pixels[:, :1, :1]).all())
        notes = tuple(note for note, holds in ((MORE_FRAMES, count > 1), (ONE_COLOR, is_plain)) if holds)
        return Inspection(index, hashlib.blake2b(content, digest_size=16).digest(), "", notes)

    def __len__(self) -> int:
        return len(self.images)


def check_images(
    config: DatasetConfig, listing: Listing, findings: Findings, advance: Callable[[int], None] = lambda _: None
) -> None:
    """Read every sample, and add unreadable, unusual and duplicate ones to the findings of `check_files`."""
    images = listing.everything()
    images.limit(config.max_pixels)
    seen: dict[bytes, list[int]] = {}
    unusual: dict[str, list[str]] = {}
    unreadable = 0
    loader: Any = DataLoader(
        Inspected(images),
        batch_size=64,
        collate_fn=list,
        num_workers=default_workers(),
        worker_init_fn=partial(start_reader, Turns()),
        multiprocessing_context=WORKER_START,
    )
    for batch in loader:
        for item in batch:
            if item.fault:
                unreadable += 1
                findings.faults.append(item.fault)
            else:
                seen.setdefault(item.digest, []).append(item.position)
            for note in item.notes:
                unusual.setdefault(note, []).append(images.paths[int(item.position)])
        advance(len(batch))
    for note, paths in unusual.items():
        findings.notes.append(f"{counted(len(paths), 'image has', 'images have')} {note}: {some_of(paths)}")
    findings.rows.append(Finding("unreadable", "0", str(unreadable), "fault" if unreadable else "ok"))
    groups = [group for group in seen.values() if len(group) > 1]
    findings.rows += duplicate_rows(listing, images.paths, groups, findings, is_published=config.published is not None)


def duplicate_rows(
    listing: Listing, paths: Sequence[str], groups: list[list[int]], findings: Findings, *, is_published: bool
) -> Iterator[Finding]:
    """Yield findings on images with equal pixels; across classes they are errors, except in a benchmark."""
    kinds: dict[str, list[list[int]]] = {"within a class": [], "across classes": []}
    for group in groups:
        is_one_class = len({int(listing.labels[index]) for index in group} - {-1}) <= 1
        kinds["within a class" if is_one_class else "across classes"].append(group)
    for kind, copies in kinds.items():
        # the authors' archives contain duplicates, and removing them would make results incomparable
        verdict: Verdict = "fault" if kind == "across classes" and not is_published else "note"
        lines = [f"duplicate {kind}: {', '.join(paths[index] for index in group)}" for group in copies]
        (findings.faults if verdict == "fault" else findings.notes).extend(lines)
        yield Finding(f"duplicates {kind}", "0", str(len(copies)), verdict if copies else "ok")
