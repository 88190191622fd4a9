"""Checks of a dataset on disk: problems of its files and images, and its counts compared with the published ones."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.archives import Published, md5
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import frames
from dmlkit.datasets.files.listing import LISTED_SPLITS, Listing
from dmlkit.errors import UserError
from dmlkit.files.image_file import BadImageError
from dmlkit.loading.batches import default_workers
from dmlkit.loading.survey import strays_of

MOST_NAMED = 10  # files in a note
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
    """Check archives, lists, splits and counts, without opening an image.

    Raises:
        UserError: the root is missing, the table is unreadable, or the images are rendered.
    """
    findings = Findings(rows=list(archive_rows(config)))
    try:
        listing = config.listing()
    except UserError as error:
        broken = [
            f"{row.check}: {row.found}, expected {row.expected}" for row in findings.rows if row.verdict == "fault"
        ]
        raise UserError("\n".join([*broken, str(error)])) from None
    if listing is None:
        raise UserError(f"dataset {config.name}: the images are rendered, so there are no files to check")
    overlaps = listing.overlaps()
    findings.faults += [*listing.faults, *overlaps]
    findings.notes += listing.notes
    findings.notes += stray_file_notes(config, listing)
    findings.rows += count_rows(listing, config.published)
    findings.rows.append(Finding("classes in two splits", "0", str(len(overlaps)), "fault" if overlaps else "ok"))
    findings.rows += class_size_rows(listing)
    if not findings.faults:
        findings.faults += split_faults(config, listing)
    return listing, findings


def stray_file_notes(config: DatasetConfig, listing: Listing) -> Iterator[str]:
    """Yield a note on the files below the root that are not images, and one on the images in no class folder."""
    others, outside = strays_of(config, listing)
    for names, reason in ((others, "not an image"), (outside, "not in the folder of a class")):
        if names:
            names = sorted(names)
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            files = "1 file is" if len(names) == 1 else f"{len(names)} files are"
            yield f"{listing.root}: {files} not used ({reason}): {', '.join(names[:MOST_NAMED])}{more}"


def split_faults(config: DatasetConfig, listing: Listing) -> list[str]:
    """Return the errors that ``dmlkit train`` would raise: an empty split, or a single class to evaluate on."""
    faults: list[str] = []
    for split in config.own_splits:
        try:
            images = config.images_of(listing, split)
        except UserError as error:
            faults.append(str(error))
            continue
        if split != "train" and len(images.class_names) < 2:
            faults.append(f"{listing.source or listing.root}: {split} has a single class, expected at least two")
    return list(dict.fromkeys(faults))


def archive_rows(config: DatasetConfig) -> Iterator[Finding]:
    """Yield the check of the md5 of each archive in the root or next to it."""
    if config.published is None:
        return
    root = Path(getattr(config, "root", "."))
    for archive in config.published.archives:
        path = next((folder / archive.file for folder in (root, root.parent) if (folder / archive.file).exists()), None)
        if path is not None and archive.md5 is not None:
            found = md5(path)
            size = f"{found}, {path.stat().st_size:,} bytes"
            verdict: Verdict = "ok" if found == archive.md5 else "fault"
            yield Finding(f"md5 of {path}", archive.md5, size if verdict == "fault" else found, verdict)


def count_rows(listing: Listing, published: Published | None) -> Iterator[Finding]:
    """Yield numbers of images and classes per split, compared with the published ones."""
    masks: dict[str, np.ndarray] = {split: listing.splits == index for index, split in enumerate(LISTED_SPLITS)}
    if listing.query is not None and listing.gallery is not None:
        masks |= {"query": listing.query, "gallery": listing.gallery}
    for split, mask in masks.items():
        expected = published.counts.get(split) if published else None
        if expected is None and not mask.any():
            continue
        found = int(mask.sum()), len(np.unique(listing.labels[mask]))
        for what, count, wanted in zip((f"{listing.sample}s", "classes"), found, expected or ("", ""), strict=True):
            shown = f"{wanted:,}" if expected else ""
            yield Finding(f"{split} {what}", shown, f"{count:,}", "ok" if not expected or count == wanted else "fault")


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


class Inspection(NamedTuple):
    """Result of decoding an image."""

    position: int
    digest: bytes  # hash of the pixels; empty if the image cannot be read
    fault: str
    note: str


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
            return Inspection(index, b"", str(error), "")
        # with the shape, because two plain images of different sides may have the same bytes
        content = repr(tuple(pixels.shape)).encode() + pixels.movedim(0, -1).contiguous().numpy().tobytes()
        note = f"{self.images.paths[index]}: animated, {count} frames; only the first is used" if count > 1 else ""
        return Inspection(index, hashlib.blake2b(content, digest_size=16).digest(), "", note)

    def __len__(self) -> int:
        return len(self.images)


def check_images(listing: Listing, findings: Findings, *, is_published: bool, advance: Callable[[int], None]) -> None:
    """Read every sample, and add unreadable, animated and duplicate ones to the findings.

    Args:
        listing: listing of `check_files`.
        findings: findings of `check_files`, extended here.
        is_published: whether the images are a benchmark's, whose duplicates are not errors.
        advance: called with the number of images done.
    """
    images = listing.everything()
    seen: dict[bytes, list[int]] = {}
    unreadable = 0
    loader: Any = DataLoader(Inspected(images), batch_size=64, collate_fn=list, num_workers=default_workers())
    for batch in loader:
        for item in batch:
            if item.fault:
                unreadable += 1
                findings.faults.append(item.fault)
            else:
                seen.setdefault(item.digest, []).append(item.position)
            if item.note:
                findings.notes.append(item.note)
        advance(len(batch))
    findings.rows.append(Finding("unreadable", "0", str(unreadable), "fault" if unreadable else "ok"))
    groups = [group for group in seen.values() if len(group) > 1]
    findings.rows += duplicate_rows(listing, images.paths, groups, findings, is_published=is_published)


def duplicate_rows(
    listing: Listing, paths: Sequence[str], groups: list[list[int]], findings: Findings, *, is_published: bool
) -> Iterator[Finding]:
    """Yield findings on images with equal pixels; across classes they are errors, except in a benchmark."""
    kinds: dict[str, list[list[int]]] = {"within a class": [], "across classes": []}
    for group in groups:
        is_one_class = len({int(listing.labels[index]) for index in group}) == 1
        kinds["within a class" if is_one_class else "across classes"].append(group)
    for kind, found in kinds.items():
        # the authors' archives contain duplicates, and removing them would make results incomparable
        verdict: Verdict = "fault" if kind == "across classes" and not is_published else "note"
        lines = [f"duplicate {kind}: {', '.join(paths[index] for index in group)}" for group in found]
        (findings.faults if verdict == "fault" else findings.notes).extend(lines)
        yield Finding(f"duplicates {kind}", "0", str(len(found)), verdict if found else "ok")
