"""The images and labels of one shard, by the headers of its tar file: no image is read, and nothing is extracted.

Members belong together whose names are equal up to the first dot behind the last slash, as WebDataset has it.
"""

import json
import os
import tarfile
from math import isfinite
from pathlib import Path
from typing import IO, Any

from dmlkit.datasets.files.image import EXTENSIONS
from dmlkit.datasets.files.paths import readable_name
from dmlkit.datasets.files.tar.index_file import BOX, TEXTS, arrow_table
from dmlkit.datasets.files.tar.member import plain_name
from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt
from dmlkit.files.regular import check_regular

LABELS = ("cls", "json")
MAX_LABEL_BYTES = 1_000_000  # of a .cls or .json; captions and boxes of an image have some thousand
Row = dict[str, Any]
"""Of an index, see `COLUMNS`."""


class ScanError(Exception):
    """What is wrong with a shard or with an image of it."""


def scan_shard(root: Path, shard: str) -> Any:
    """The images of a shard and its faults, as the rows of an index: a pyarrow table.

    Args:
        root: the folder of the dataset.
        shard: the tar file, relative to it.

    Raises:
        UserError: it cannot be read at all.
    """
    path = root / shard
    try:
        check_regular(path)
        with path.open("rb") as file:
            rows = _rows(file)
    except OSError as error:  # not a row: who mends a permission does not change the file
        raise UserError(f"{path}: cannot read this shard: {error.strerror or error}") from error
    return arrow_table([{"shard": shard, **row} for row in rows])


def _rows(file: IO[bytes]) -> list[Row]:
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    rows: list[Row] = []
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.size < 0:  # it would lead back to headers that were read, for ever
                    raise ScanError(f"{member.name!a} has {member.size} bytes")
                fault = _add(samples, member)
                if fault:
                    rows.append({"fault": fault})
            _check_end(file, tar.offset)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # of damaged headers: ValueError, RecursionError and more
        told = str(error) or type(error).__name__
        rows.append({"fault": f"{told}; it is cut off, damaged or compressed: fetch or write it again"})
    return [row for key, parts in samples.items() if (row := _row(file, key, parts))] + rows


def _add(samples: dict[str, dict[str, tarfile.TarInfo]], member: tarfile.TarInfo) -> str | None:
    """Put a member to its sample; a fault if it must not be read."""
    name = plain_name(member.name)
    folder, _, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    kind = extension.lower()
    if member.isdir() or not stem or not dot or not _counts(kind):
        return None
    if not readable_name(name):
        return f"{name!a}: this name is not UTF-8"
    if name.startswith("/") or ".." in folder.split("/"):
        return f"{name}: this name leads out of the shard"
    if not member.isreg() or member.issparse():
        return f"{name}: is a link or no plain file, which is not followed; write the image itself"
    parts = samples.setdefault(f"{folder}/{stem}" if folder else stem, {})
    if kind in parts:
        return f"{name}: is in this shard twice; give each image a key of its own"
    parts[kind] = member
    return None


def _counts(extension: str) -> bool:
    return extension in LABELS or f".{extension}" in EXTENSIONS


def _row(file: IO[bytes], key: str, parts: dict[str, tarfile.TarInfo]) -> Row | None:
    images = [member for kind, member in parts.items() if kind not in LABELS]
    if len(images) != 1:
        names = ", ".join(plain_name(member.name) for member in images) or "none"
        return {"fault": f"{key}: has {len(images)} images ({names}); expected one"}
    image = images[0]
    row: Row = {"name": plain_name(image.name), "offset": image.offset_data, "size": image.size}
    try:
        fields = _fields(_content(file, parts["json"])) if "json" in parts else {}
        if "cls" in parts:
            label = _text(_content(file, parts["cls"])).strip()
            if fields.get("label") not in (None, label):
                raise ScanError(f"its .cls says {excerpt(label)!r}, its .json {excerpt(fields['label'])!r}")
            fields["label"] = label
        if not fields.get("label"):
            raise ScanError("no label; expected it in a .cls, or in a .json by the key 'label'")
    except ScanError as error:
        return {"name": row["name"], "fault": str(error)}
    return {**row, **fields}


def _content(file: IO[bytes], member: tarfile.TarInfo) -> bytes:
    if member.size > MAX_LABEL_BYTES:
        raise ScanError(f"{member.name} has {member.size:,} bytes; expected at most {MAX_LABEL_BYTES:,}")
    return os.pread(file.fileno(), member.size, member.offset_data)


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ScanError(f"its label is not UTF-8: {error}") from error


def _fields(content: bytes) -> Row:
    """What a .json says by the names that a table's columns have; other keys are somebody else's."""
    try:
        data = json.loads(_text(content))
    except (ValueError, RecursionError) as error:
        raise ScanError(f"its .json cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ScanError(f"its .json holds {type(data).__name__}; expected an object with the key 'label'")
    fields: Row = {}
    for name in (*TEXTS, *BOX):
        value = data.get(name)
        if value is not None:
            fields[name] = _number(name, value) if name in BOX else _plain(name, value)
    return fields


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ScanError(f"{name} {excerpt(repr(value))} in its .json; expected a number of pixels")
    return float(value)


def _plain(name: str, value: Any) -> str:
    if isinstance(value, bool) and name in ("query", "gallery"):
        return str(value).lower()
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ScanError(f"{name} {excerpt(repr(value))} in its .json; expected text or a whole number")
    text = str(value)
    if not readable_name(text):
        raise ScanError(f"{name} {text!a} in its .json is not UTF-8")
    return text


def _check_end(file: IO[bytes], offset: int) -> None:
    """Make sure that the headers ended where a tar file does, at a block of zeros, and not in its midst.

    The standard library takes a header that is cut off or damaged for the end.
    """
    file.seek(offset)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise ScanError("this tar file has no end")
    while block:
        if block.strip(b"\0"):
            raise ScanError(f"this tar file goes on behind its end, at byte {offset:,}")
        block = file.read(1 << 20)
