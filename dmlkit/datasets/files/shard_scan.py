"""Scan of one shard for images and labels by the headers of its tar file, without reading or extracting images.

Members form a sample if their names are equal up to the first dot after the last slash, as in WebDataset.
"""

import json
import os
import tarfile
from math import isfinite
from pathlib import Path
from typing import IO, Any

from dmlkit.datasets.files.paths import readable_name
from dmlkit.datasets.files.tar import BOX, TEXTS, arrow_table, plain_name
from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt
from dmlkit.files.regular import EXTENSIONS, check_regular

LABELS = ("cls", "json")
MAX_LABEL_BYTES = 1_000_000  # size of a .cls or .json; captions and boxes of an image take a few thousand bytes
Row = dict[str, Any]
"""Row of an index, see `COLUMNS`."""


class ScanError(Exception):
    """Problem of a shard or of one of its images."""


def scan_shard(root: Path, shard: str) -> Any:
    """Return the images and problems of a shard as rows of an index, a pyarrow table.

    Raises:
        UserError: the file cannot be opened or read.
    """
    path = root / shard
    try:
        check_regular(path)
        with path.open("rb") as file:
            rows = _rows(file)
    except OSError as error:  # not a row of the index: fixing a permission does not change the file's stamp
        raise UserError(f"{path}: cannot read this shard: {error.strerror or error}") from error
    return arrow_table([{"shard": shard, **row} for row in rows])


def _rows(file: IO[bytes]) -> list[Row]:
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    rows: list[Row] = []
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.size < 0:  # it would lead back to earlier headers, endlessly
                    raise ScanError(f"{member.name!a} has a size of {member.size} bytes")
                fault = _add(samples, member)
                if fault:
                    rows.append({"fault": fault})
            _check_end(file, tar.offset)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # damaged headers raise ValueError, RecursionError and more
        reason = str(error) or type(error).__name__
        rows.append(
            {"fault": f"{reason}; the tar file is truncated, damaged or compressed: download or write it again"}
        )
    return [row for key, parts in samples.items() if (row := _row(file, key, parts))] + rows


def _add(samples: dict[str, dict[str, tarfile.TarInfo]], member: tarfile.TarInfo) -> str | None:
    """Add a member to its sample; return an error if the member must not be read."""
    name = plain_name(member.name)
    folder, _, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    kind = extension.lower()
    if member.isdir() or not stem or not dot or not _counts(kind):
        return None
    if not readable_name(name):
        return f"{name!a}: this name is not UTF-8; rename the member"
    if name.startswith("/") or ".." in folder.split("/"):
        return f"{name}: this name leads out of the shard; rename the member"
    if not member.isreg() or member.issparse():
        return f"{name} is a link or another special file, which is not read; write the image itself"
    parts = samples.setdefault(f"{folder}/{stem}" if folder else stem, {})
    if kind in parts:
        return f"{name} is in this shard twice; give each image a unique key"
    parts[kind] = member
    return None


def _counts(extension: str) -> bool:
    return extension in LABELS or f".{extension}" in EXTENSIONS


def _row(file: IO[bytes], key: str, parts: dict[str, tarfile.TarInfo]) -> Row | None:
    images = [member for kind, member in parts.items() if kind not in LABELS]
    if len(images) != 1:
        names = ", ".join(plain_name(member.name) for member in images) or "none"
        return {"fault": f"{key} has {len(images)} images ({names}); expected one"}
    image = images[0]
    row: Row = {"name": plain_name(image.name), "offset": image.offset_data, "size": image.size}
    try:
        fields = _fields(_content(file, parts["json"])) if "json" in parts else {}
        if "cls" in parts:
            label = _text(_content(file, parts["cls"])).strip()
            if fields.get("label") not in (None, label):
                raise ScanError(
                    f"the label is {excerpt(label)!r} in its .cls, but {excerpt(fields['label'])!r} in its .json"
                )
            fields["label"] = label
        if not fields.get("label"):
            raise ScanError("no label; expected a .cls file, or a .json file with the key 'label'")
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
    """Return the keys of a .json that are columns of a table; ignore other keys."""
    try:
        data = json.loads(_text(content))
    except (ValueError, RecursionError) as error:
        raise ScanError(f"its .json cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ScanError(f"its .json contains a {type(data).__name__}; expected an object with the key 'label'")
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
    """Check that the headers end at a block of zeros and not in the middle of the tar file.

    The standard library treats a truncated or damaged header as the end.
    """
    file.seek(offset)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise ScanError("this tar file has no end marker")
    while block:
        if block.strip(b"\0"):
            raise ScanError(f"this tar file has data after its end at byte {offset:,}")
        block = file.read(1 << 20)
