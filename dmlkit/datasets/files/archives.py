"""What the authors of a benchmark published: its archives, their checksums, and how many images and classes."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dmlkit.files.regular import check_regular


@dataclass(frozen=True)
class Archive:
    """A file to download.

    Args:
        file: its name.
        url: where it is, or the page that leads to it.
        md5: of the whole file; None where nobody published one.
    """

    file: str
    url: str
    md5: str | None


@dataclass(frozen=True)
class Published:
    """A benchmark as published.

    Args:
        title: its name in the literature.
        archives: what to download.
        marker: a file below the root, once the archives are unpacked there.
        signs: files and folders, one of which tells a root of this benchmark from other folders.
        counts: (images, classes) of each split.
    """

    title: str
    archives: tuple[Archive, ...]
    marker: str
    signs: tuple[str, ...]
    counts: Mapping[str, tuple[int, int]]

    def instructions(self, root: Path) -> Iterator[str]:
        """Where to get the archives and where to put them, one line each."""
        for archive in self.archives:
            checksum = f"md5 {archive.md5}" if archive.md5 else "no md5 is published"
            yield f"{self.title}: get {archive.file} from {archive.url} ({checksum})"
        yield f"{self.title}: unpack into {root}, so that {root / self.marker} exists"


def md5(path: Path) -> str:
    """The MD5 sum of a file, in bounded memory: a guard against truncated downloads, not against attackers."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
