"""Reading of a file that a user names: only a regular one, what it is by its suffix, and its text.

Reading a FIFO or a device might never end. Nothing here imports torch.
"""

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

from dmlkit.errors import UserError, first_line, warn_once
from dmlkit.files.escape import quoted

HEIC = frozenset({".heic", ".heics", ".heif", ".heifs", ".hif"})
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
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
WORKBOOKS = (".xlsx", ".xlsm", ".xls", ".ods")
TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".arrow", ".feather", ".ipc", ".json", *WORKBOOKS)
VIDEOS = frozenset({".mp4", ".mov", ".m4v", ".avi", ".mkv", ".webm"})
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def is_video(path: Path) -> bool:
    """Return whether a file is a video, by its name."""
    return path.suffix.lower() in VIDEOS and not path.is_dir()


def check_regular(path: str | Path) -> None:
    """Raise an `OSError` unless a path is a regular file, or a link to one, before it is opened."""
    kind = stat.S_IFMT(os.stat(path).st_mode)  # noqa: PTH116 - Path costs twice the time, for each of a million images
    if kind != stat.S_IFREG:
        raise OSError(f"this is {KINDS.get(kind, 'no file')}; expected a regular file")


def cache_folder() -> Path:
    """Return the folder of dmlkit in the user's cache: ``$XDG_CACHE_HOME/dmlkit``, or ``~/.cache/dmlkit``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dmlkit")


def read_start(path: Path, size: int) -> bytes:
    """Read the first ``size`` bytes of a regular file. The size in its status is not used: files in /proc report 0."""
    check_regular(path)
    with path.open("rb") as file:
        return file.read(size)


def other_content(start: bytes) -> str:
    """Return what a file is instead of an image, a table or weights, by its first bytes; an empty text if unknown."""
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return "this is a Git LFS pointer, not the file itself; run git lfs pull"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "this is a page of a website (HTML or XML), not the file itself; download it again"
    if start[4:8] == b"ftyp" and start[8:12] in HEIC_BRANDS:
        return "this is an HEIC image, which needs pillow-heif: pip install pillow-heif"
    return ""


def what_instead(path: Path, otherwise: str) -> str:
    """Return what a file is instead of the expected one, see `other_content`, or else another text."""
    try:
        return other_content(read_start(path, 512)) or otherwise
    except OSError:
        return otherwise


@contextmanager
def reading(path: Path, what: str, *errors: type[Exception], missing: str = "no such file") -> Generator[None]:
    """Check that a path is a regular file, and turn errors of reading it into a `UserError` that says what it is."""
    try:
        check_regular(path)
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: {missing}") from None
    except UserError:
        raise
    except (OSError, *errors) as error:
        reason = (isinstance(error, OSError) and error.strerror) or first_line(error)
        raise UserError(f"{path}: cannot read {what}: {what_instead(path, reason)}") from error


def read_text(path: Path, missing: str = "no such file") -> str:
    """Read a text file, see `utf8_of`; ``missing`` says what was expected if there is none."""
    with reading(path, "this file", missing=missing):
        content = path.read_bytes()
    return utf8_of(content, str(path)).decode()


def utf8_of(content: bytes, where: str) -> bytes:
    """Return a text in UTF-8, without a byte order mark, that is in UTF-8, UTF-16 or Windows-1252 (Latin-1)."""
    nulls = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}.get(content[:2])
    if nulls is None and len(content) > 1 and 0 in content[:2]:  # as of ASCII, without a mark
        nulls = "utf-16-le" if content[1] == 0 else "utf-16-be"
    try:
        if nulls is not None:
            return content.decode(nulls).encode()
        content = content.removeprefix(b"\xef\xbb\xbf")
        content.decode()
    except UnicodeDecodeError as error:
        if nulls is not None:
            raise UserError(f"{where}: cannot read this text: {error}; save it as UTF-8") from None
        line = content.count(b"\n", 0, error.start) + 1
        others = (character for character in content.decode(errors="surrogateescape") if character > "\x7f")
        if all("\ud800" <= character <= "\udfff" for character in others):  # no mix of two encodings
            with suppress(UnicodeDecodeError):
                text = content.decode("cp1252")
                shown = quoted(text.split("\n")[line - 1].strip(), 50)
                warn_once(f"{where}: is not UTF-8, so it is read as Windows-1252; line {line}: {shown}")
                return text.encode()
        byte = content[error.start : error.start + 1]
        raise UserError(f"{where}: line {line} is not UTF-8: got the byte {byte!r}; save it as UTF-8") from None
    return content


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
