"""Reading pairs of images: a CSV table, or the pairs.txt of LFW."""

import csv
from pathlib import Path
from typing import NamedTuple

from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt
from dmlkit.files.regular import refuse_what_is_no_file

ANSWERS = {"1": True, "true": True, "same": True, "0": False, "false": False, "different": False}
"""What the column ``same`` may hold, capitals aside."""


class ImagePair(NamedTuple):
    """Two image files, and whether they are of one class, where that is known."""

    a: str
    b: str
    same: bool | None = None


def read_pairs(path: Path, root: Path | None = None) -> list[ImagePair]:
    """The pairs of a file.

    Args:
        path: ``.csv`` with the columns ``a``, ``b`` and, where answers are known, ``same`` (1 or 0); or ``.txt`` as of
            LFW: ``NAME 1 2`` is of one person, ``NAME 1 OTHER 3`` of two, and the image ``NAME/NAME_0001.jpg``.
        root: the folder that names in the file are relative to; by default the file's own.

    Raises:
        UserError: the file is missing, of another kind, empty, or has a line that is no pair.
    """
    if path.suffix.lower() not in (".csv", ".txt"):
        raise UserError(f"--pairs {path}: expected a .csv or .txt file")
    refuse_what_is_no_file(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"--pairs {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--pairs {path}: cannot read this file: {error}") from error
    folder = root or path.parent
    pairs = _table(path, text, folder) if path.suffix.lower() == ".csv" else _lfw(path, text, folder)
    if not pairs:
        raise UserError(f"--pairs {path}: no pairs in this file")
    return pairs


def _table(path: Path, text: str, folder: Path) -> list[ImagePair]:
    rows = csv.DictReader(text.splitlines(), strict=True)
    pairs: list[ImagePair] = []
    try:
        names = list(rows.fieldnames or ())
        missing = [name for name in ("a", "b") if name not in names]
        others = [name for name in names if name not in ("a", "b", "same")]
        if missing or others or len(set(names)) < len(names):
            raise UserError(f"--pairs {path}: has columns {excerpt(', '.join(names))}; expected a, b and maybe same")
        for row in rows:
            if None in row or None in row.values() or not row["a"] or not row["b"]:
                raise UserError(f"--pairs {path}:{rows.line_num}: expected {len(names)} cells, {', '.join(names)}")
            answer = ANSWERS.get(row["same"].strip().lower()) if "same" in row else None
            if "same" in row and answer is None:
                raise UserError(
                    f"--pairs {path}:{rows.line_num}: same: got {excerpt(repr(row['same']))}, expected 1 or 0"
                )
            pairs.append(ImagePair(str(folder / row["a"]), str(folder / row["b"]), answer))
    except csv.Error as error:
        raise UserError(f"--pairs {path}:{rows.line_num}: cannot read this table: {error}") from error
    return pairs


def _lfw(path: Path, text: str, folder: Path) -> list[ImagePair]:
    pairs: list[ImagePair] = []
    for number, line in enumerate(text.splitlines(), start=1):
        match line.split("\t") if "\t" in line else line.split():
            case [name, first, second] if first.isdecimal() and second.isdecimal():
                pairs.append(ImagePair(_image(folder, name, first), _image(folder, name, second), same=True))
            case [name, first, other, second] if first.isdecimal() and second.isdecimal():
                pairs.append(ImagePair(_image(folder, name, first), _image(folder, other, second), same=False))
            case counts if number == 1 and all(count.strip().isdecimal() for count in counts):
                pass  # folds, and pairs in each
            case []:
                pass
            case _:
                raise UserError(
                    f"--pairs {path}:{number}: got {excerpt(repr(line))}, expected NAME 1 2 or NAME 1 OTHER 3, as in "
                    "LFW's pairs.txt"
                )
    return pairs


def _image(folder: Path, name: str, number: str) -> str:
    return str(folder / name / f"{name}_{int(number):04d}.jpg")
