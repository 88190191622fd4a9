"""Published facts of a benchmark: archives, checksums, and numbers of images and classes."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dmlkit.errors import OptionError
from dmlkit.files.regular import check_regular
from dmlkit.files.source import MOVED


@dataclass(frozen=True)
class Archive:
    """File to download."""

    file: str  # name of the file
    url: str  # address of the file, or of the page that links to it
    md5: str | None  # published checksum of the file; None if there is none


@dataclass(frozen=True)
class Published:
    """Published facts of a benchmark."""

    title: str  # name in the literature
    archives: tuple[Archive, ...]  # files to download
    signs: tuple[str, ...]  # files and folders; a root of this benchmark contains at least one of them
    counts: Mapping[str, tuple[int, int]]  # numbers (images, classes) per split


def md5(path: Path) -> str:
    """Compute the MD5 sum of a file in bounded memory; it detects truncated downloads, not attacks."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def locate(root: Path, folders: Iterable[str], markers: Iterable[str]) -> Path | None:
    """Return the first folder below a root that contains one of the markers; ``"."`` is the root itself."""
    return next((root / folder for folder in folders for marker in markers if (root / folder / marker).exists()), None)


def missing(root: Path, published: Published, layouts: str) -> OptionError:
    """Return the error for a root without the benchmark, with download instructions."""
    fault = f"no {published.title} in this folder" if root.exists() else "no such folder"
    files = ", ".join(
        f"{archive.file} ({f'md5 {archive.md5}' if archive.md5 else 'no md5 is published'}) from {archive.url}"
        for archive in published.archives
    )
    moved = f"{MOVED}root=PATH; else download {published.title}, under its terms: {files}"
    return OptionError("dataset.root", f"{root}: {fault}; expected {layouts}; {moved}")


MAX_DIGITS = 18  # a number with so many digits always fits into 64 bits


def whole_number(text: str) -> int | None:
    """Return the non-negative whole number that a text represents; None for any other text.

    Example:
        >>> whole_number("042"), whole_number("²"), whole_number("-1"), whole_number("9" * 19)
        (42, None, None, None)
    """
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else None
