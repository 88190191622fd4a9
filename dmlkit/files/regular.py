"""Reading of a file that a user names: only a regular one, what it is by its suffix, and the columns of a CSV table.

Reading a FIFO or a device might never end. Nothing here imports torch.
"""

import csv
import os
import stat
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

from dmlkit.errors import UserError

HEIC = frozenset({".heic", ".heics", ".heif", ".heifs", ".hif"})
EXTENSIONS = frozenset(
    ".jpg .jpeg .jpe .jfif .mpo .png .apng .webp .bmp .tif .tiff .gif .ppm .pgm .pbm .pnm .pfm .avif .avifs "  # noqa: SIM905
    ".jp2 .j2k .j2c .jpc .jpf .jpx".split()
).union(HEIC if find_spec("pillow_heif") else ())
"""Suffixes of image files: those of `dmlkit.files.image_file.FORMATS` in Pillow."""
RAW = frozenset(
    ".3fr .arw .cr2 .cr3 .crw .dcr .dng .erf .fff .gpr .iiq .kdc .mef .mos .mrw .nef .nrw .orf .pef .raf .raw .rw2 "  # noqa: SIM905
    ".rwl .sr2 .srf .srw .x3f".split()
)
"""Suffixes of raw camera files. Some are TIFF files, of which Pillow reads a picture of 160 x 120 pixels."""
TABLES = (".csv", ".parquet")
VIDEOS = frozenset({".mp4", ".mov", ".m4v", ".avi", ".mkv", ".webm"})
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def check_regular(path: str | Path) -> None:
    """Check that a path is a regular file, or a link to one, before it is opened.

    Raises:
        OSError: the path is something else, which the message names, or it is missing.

    Example:
        >>> check_regular("/dev/zero")
        Traceback (most recent call last):
        ...
        OSError: this is a device; expected a regular file
    """
    kind = stat.S_IFMT(os.stat(path).st_mode)  # noqa: PTH116 - Path costs twice the time, for each of a million images
    if kind != stat.S_IFREG:
        raise OSError(f"this is {KINDS.get(kind, 'no file')}; expected a regular file")


def read_start(path: Path, size: int) -> bytes:
    """Read the first ``size`` bytes of a regular file. The size in its status is not used: files in /proc report 0.

    Raises:
        OSError: see `check_regular`; or the file cannot be read.
    """
    check_regular(path)
    with path.open("rb") as file:
        return file.read(size)


def other_content(start: bytes) -> str:
    """Return what a file is instead of an image, a table or weights, by its first bytes; an empty text if unknown.

    Example:
        >>> other_content(b"version https://git-lfs.github.com/spec/v1")
        'this is a Git LFS pointer, not the file itself; run git lfs pull'
    """
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return "this is a Git LFS pointer, not the file itself; run git lfs pull"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "this is a page of a website (HTML or XML), not the file itself; download it again"
    if start[4:8] == b"ftyp" and start[8:12] in (
        b"heic",
        b"heix",
        b"heim",
        b"heis",
        b"hevc",
        b"hevx",
        b"mif1",
        b"msf1",
    ):
        return NEEDS_HEIF
    return ""


NEEDS_HEIF = "this is an HEIC image, which needs pillow-heif: pip install pillow-heif"


def what_instead(path: Path, otherwise: str) -> str:
    """Return what a file is instead of the expected one, see `other_content`, or else another text."""
    try:
        return other_content(read_start(path, 512)) or otherwise
    except OSError:
        return otherwise


def read_text(path: Path, option: str, missing: str) -> str:
    """Read a text file that an option names; ``missing`` says what was expected if there is none.

    Raises:
        UserError: it is missing, not regular or not UTF-8.
    """
    require_regular_file(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{option} {path}: {missing}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option} {path}: cannot read this file: {error}") from error


def require_regular_file(path: Path) -> None:
    """Raise a `UserError` if a path exists and is not a regular file."""
    try:
        check_regular(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: {error}") from error


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file, read a megabyte at a time."""
    checksum = 0
    with path.open("rb") as file:
        while content := file.read(2**20):
            checksum = crc32(content, checksum)
    return checksum


TABLE_COLUMNS = ["path", "label"]


def columns_of(file: Path) -> list[str]:
    """Return the columns of a CSV table, in its first line; none if it is no such table, or cannot be read.

    Raises:
        UserError: the file is something else, see `other_content`.
    """
    if file.suffix.lower() != ".csv" or not file.is_file():
        return []
    if instead := what_instead(file, ""):
        raise UserError(f"{file}: cannot read this table: {instead}")
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            return next(csv.reader(lines), [])
    except (OSError, UnicodeDecodeError, csv.Error):  # reported by the reader of the table
        return []


def require_column(file: Path, columns: Sequence[str], name: str) -> None:
    """Raise a `UserError`, which names the most similar column, unless a table has a column once."""
    if name not in columns:
        near = "".join(f"; did you mean {one!r}?" for one in get_close_matches(name, columns, n=1))
        raise UserError(f"{file}: has no column {name!r}; it has {', '.join(columns)}{near}")
    if columns.count(name) > 1:
        raise UserError(f"{file}: has {columns.count(name)} columns {name!r}; expected one")


def missing_columns(columns: Sequence[str]) -> Iterator[str]:
    """Yield an error for each column that a table of a dataset must have and does not have."""
    for name in TABLE_COLUMNS:
        if name not in columns:
            yield f"has no column {name!r}; it has {', '.join(columns)}; rename the one with the {name}s"
