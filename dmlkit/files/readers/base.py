"""Interface of a reader: it recognizes a format and returns its rows; the columns get their meaning later."""

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ValidationError

from dmlkit.errors import UserError, counted, some_of
from dmlkit.files.csv_table import USUAL, csv_start, key_of
from dmlkit.files.escape import quoted
from dmlkit.files.outputs import BOX
from dmlkit.files.regular import read_start, read_text

MODULES = ("exports", "camtrap", "spreadsheets", "coco", "detections", "voc", "market", "image_folder", "yolo")
"""Modules of readers, in the order in which they are asked."""
BUILT_IN = "dmlkit.files.readers"


@dataclass
class ImageTable:
    """Images that a file or folder lists, one per row, whatever its format.

    Args:
        table: pyarrow table. A reader leaves the names of the file; `dmlkit.files.image_table.read_images` gives those
            of dmlkit to the columns that it knows: ``path``, ``label``, `BOX` and others.
        file: what was read, for messages.
        root: folder that the paths are relative to.
        places: where each row stands, for messages. Default: its number.
        lines: line of each row, if rows are lines.
        confidences: confidence of the box of each row, for a file that a detector wrote.
        is_share: whether boxes are shares of the image's width and height, instead of pixels.
        faults: entries that are wrong, one line each.
        notes: what is left out, with its number.
    """

    table: Any
    file: Path
    root: Path
    places: Sequence[str] = ()
    lines: Sequence[int] | None = None
    confidences: Sequence[float] | None = None
    is_share: bool = False
    faults: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    def __len__(self) -> int:
        return len(self.table)

    def place(self, row: int) -> str:
        """Return the place of a row, for messages."""
        if self.places:
            return self.places[row]
        return f"{self.file}: row {row + 1}" if self.lines is None else f"{self.file}:{self.lines[row]}"

    def kept(self, rows: Sequence[int]) -> "ImageTable":
        """Return the table of some rows, in their order."""
        import pyarrow as pa

        sure = self.confidences
        return replace(
            self,
            table=self.table.take(pa.array(rows, pa.int64())),
            places=[self.place(row) for row in rows],
            confidences=None if sure is None else [sure[row] for row in rows],
        )


class Reader(ABC):
    """Reader of a format. A plug-in adds one by defining a subclass, which is asked before those of dmlkit."""

    known: ClassVar[list["Reader"]] = []
    title: ClassVar[str]
    """What such a file is called, in messages."""
    suffixes: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of its files, in lower case, if they alone tell the format."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Reader.known.insert(len(Reader.known) if cls.__module__.startswith(f"{BUILT_IN}.") else 0, cls())

    def recognizes(self, path: Path) -> bool:
        """Return whether a path has this format, by its name and, for a folder, by the names in it."""
        return path.suffix.lower() in self.suffixes and not path.is_dir()

    @abstractmethod
    def read(self, path: Path) -> ImageTable:
        """Return the rows.

        Raises:
            UserError: the file cannot be read.
        """


def reader_of(path: Path) -> Reader | None:
    """Return the reader of a file or folder that lists images; None for images, class folders and anything else.

    Example:
        >>> [reader.title if (reader := reader_of(Path(name))) else None for name in ("a.csv", "a.parquet", "a.jpg")]
        ['CSV', 'Parquet', None]
    """
    for module in MODULES:
        import_module(f"{BUILT_IN}.{module}")
    return next((reader for reader in Reader.known if reader.recognizes(path)), None)


def start_of(path: Path) -> bytes:
    """Return the first bytes of a file, without a byte order mark of UTF-8.

    There are none of one that cannot be read, which is reported where it is read whole.
    """
    try:
        return read_start(path, 4_000).removeprefix(b"\xef\xbb\xbf")
    except OSError:
        return b""


def has_paths(file: Path) -> bool:
    """Return whether a table has a column of paths, by the first line of a CSV file; others may have one."""
    names = list[str]()
    with suppress(UnicodeDecodeError):
        if file.suffix.lower() in (".csv", ".tsv") and start_of(file).partition(b"\n")[0].decode():
            names = csv_start(file)[0]
    return not names or any(key_of(name) in ("path", *USUAL["path"]) for name in names)


LISTS = re.compile(rb'"(images|annotations|predictions|shapes)"\s*:')
"""What is near the start of a JSON file that lists images."""


def other_lists(folder: Path) -> str:
    """Return that files in a folder of images list images too, as far as their first bytes show; empty without any."""
    files = list[Path]()
    for directory in (folder, folder / "annotations"):
        with suppress(OSError):  # there is none; or it is reported where its images are listed
            names = (entry.name for entry in os.scandir(directory))
            found = sorted(name for name in names if name.lower().endswith((".csv", ".tsv", ".json")))
            files += [directory / name for name in found]
    lists = [
        str(file.relative_to(folder))
        for file in files
        if (start := start_of(file)) and (LISTS.search(start) if file.suffix.lower() == ".json" else has_paths(file))
    ]
    return f"{folder}: {some_of(lists)} may list these images: give it instead" if lists else ""


def table_of(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a pyarrow table of text, with the sides of boxes as numbers; null where a row has no value.

    Example:
        >>> table_of([{"path": "a.jpg", "x1": 4.0}, {"path": "b.jpg", "note": 7}]).to_pydict()
        {'path': ['a.jpg', 'b.jpg'], 'x1': [4.0, None], 'note': [None, '7']}
    """
    import pyarrow as pa

    names = list(dict.fromkeys(["path", *(name for row in rows for name in row)]))
    return pa.table(
        {
            name: pa.array((row.get(name) for row in rows), pa.float64())
            if name in BOX
            else pa.array((as_text(row.get(name)) for row in rows), pa.string())
            for name in names
        }
    )


def as_text(value: Any) -> str | None:
    """Return a value of JSON as the text of a cell; None for an empty one, which Python writes as NaN."""
    if isinstance(value, str):
        return value
    return None if value is None or value != value else json.dumps(value)


def box_of(left: float, top: float, width: float, height: float) -> dict[str, float]:
    """Return the cells of a box by its left, its top and its size."""
    return dict(zip(BOX, (left, top, left + width, top + height), strict=True))


@lru_cache(maxsize=1)  # an annotation file may take a gigabyte
def _json(path: Path, _state: tuple[int, int]) -> Any:
    try:
        return json.loads(read_text(path).lstrip())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot read this JSON file: {error}") from error


def json_at(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, parsed once, although several readers look at it; empty for anything else."""
    state = path.stat()
    content = _json(path, (state.st_size, state.st_mtime_ns))
    return content if isinstance(content, dict) else {}


Content = TypeVar("Content", bound=BaseModel)
Numbers = dict[str, list[int]]
"""Numbers of the entries of each list that are left."""


def validated(kind: type[Content], file: Path, faults: list[str]) -> tuple[Content, Numbers]:
    """Return the content of a JSON file without the entries of its lists that are wrong; these are ``faults``."""
    data = json_at(file)
    wrong = dict[tuple[str, int], str]()
    try:
        content = kind.model_validate(data)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=False):
            location = ".".join(str(part) for part in detail["loc"] if part not in ("int", "str"))
            fault = f"{file}: {location}: {detail['msg'].lower()}, got {quoted(detail['input'])}"
            match detail["loc"]:
                case (str(name), int(number), *_):
                    wrong.setdefault((name, number), fault)
                case _:
                    raise UserError(fault) from None
        faults += wrong.values()
        lists = {name for name, _ in wrong}
        valid = {
            name: [entry for number, entry in enumerate(data[name]) if (name, number) not in wrong] for name in lists
        }
        content = kind.model_validate(data | valid)
    numbers = {
        name: [number for number in range(len(entries)) if (name, number) not in wrong]
        for name, entries in data.items()
        if isinstance(entries, list)
    }
    return content, numbers


def files_below(folder: Path, suffixes: Collection[str], notes: list[str]) -> list[Path]:
    """Return the files with some suffixes below a folder, sorted; hidden ones, as macOS adds to archives, are noted."""
    files = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in suffixes]
    shown = [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    notes += counted_out(folder, [(len(files) - len(shown), "hidden file", "hidden files")])
    return shown


def unlisted(images: Iterable[str], listed: Iterable[str], by: str) -> tuple[int, str, str]:
    """Return the entry for `counted_out` of the images of a folder that are not listed.

    It is 0 if no listed path is an image there: such paths lack a suffix or are of another machine, see `with_paths`.

    Example:
        >>> unlisted(["x/a.jpg", "x/b.jpg"], ["x/./a.jpg"], "no table lists")
        (1, 'image that no table lists', 'images that no table lists')
    """
    present, named = ({*map(os.path.normpath, paths)} for paths in (images, listed))
    count = len(present - named) if present & named else 0
    return count, f"image that {by}", f"images that {by}"


def counted_out(file: Path, counts: Iterable[tuple[int, str, str]]) -> list[str]:
    """Return a line on the entries of a file that are left out: number, what one is, and what several are.

    Example:
        >>> counted_out(Path("md.json"), [(2, "video", "videos"), (0, "failure", "failures")])
        ['md.json: left out: 2 videos']
    """
    parts = [counted(*entries) for entries in counts if entries[0]]
    return [f"{file}: left out: {', '.join(parts)}"] if parts else []
