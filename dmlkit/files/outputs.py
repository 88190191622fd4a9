"""Output paths that a user names: which are refused, how errors of writing are reported, and CSV tables."""

import csv
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryFile

from dmlkit.errors import UserError, first_line
from dmlkit.files.atomic import atomic_write, write_text
from dmlkit.files.escape import spreadsheet, unambiguous

GALLERY_MARK, RUN_MARKS = "gallery.json", ("recipe.yaml", "environment.json")  # files that identify a folder
PLACES_OF_RUN = ("embeddings", "evaluations", "exports", "plots")
"""Folders of a run into which commands may write."""
EMBEDDING_FILES = ("embeddings.npy", "items.parquet", "manifest.json")  # in the order in which they are written
EMBEDDING_MARKS = ("manifest.json", ".lock", "vectors/*/model.json")
"""What a folder of embeddings has, the last two after a kill."""
BOX = ("x1", "y1", "x2", "y2")
"""Columns of a box in tables."""
OTHER_BOX = tuple(f"other_{side}" for side in BOX)
"""Columns of the box of the second image of a row."""


def check_file(path: Path, suffixes: Sequence[str] = (), *, sources: Iterable[Path] = ()) -> None:
    """Check that a file may be written; one that exists is replaced.

    Args:
        suffixes: ends that its name may have, in lower case; any if there are none.
        sources: paths that the command reads: files, which are never replaced, and folders of images, into which
            nothing is written.
    """
    if suffixes and path.suffix.lower() not in suffixes:
        names = " or ".join(", ".join(suffixes).rsplit(", ", 1))
        raise UserError(f"--output {path}: expected a name that ends in {names}")
    if path.is_dir():
        raise UserError(f"--output {path}: this is a folder; expected the name of a file")
    # a rename would put a file in the place of a device, for root also of /dev/stdout, which may lead to a file
    if (path.exists() and not path.is_file()) or path.absolute().parent == Path("/dev"):
        raise UserError(f"--output {path}: this is no regular file; expected the name of a file")
    sources = [source for source in sources if source.exists()]
    if path.exists() and any(path.samefile(source) for source in sources):
        raise UserError(f"--output {path}: this command reads this file; choose another --output")
    check_place(path, filter(is_plain_folder, sources))


def check_folder(path: Path, what: str, *marks: str, sources: Iterable[Path] = ()) -> None:
    """Check that a folder may be written: it is new or empty, or has what dmlkit wrote there.

    Args:
        what: what dmlkit writes there, e.g. "a review".
        marks: patterns of the files by which it is known.
        sources: paths that the command reads; nothing is written into the folders of images among them.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"--output {path}: this is a file; expected the name of a folder")
    check_place(path, filter(is_plain_folder, sources))
    others = sorted(entry.name for entry in _visible(path) if not entry.is_dir() or _visible(entry))
    if others and not any(True for mark in marks for _ in path.glob(mark)):
        raise UserError(f"--output {path}: has {others[0]} but not {what}; choose another --output")


def _visible(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if not entry.name.startswith(".")] if folder.is_dir() else []


def check_place(output: Path, data: Iterable[Path | None], *, option: str = "--output", is_run: bool = False) -> None:
    """Check that an output can be written, and is not in a file, data, a gallery, or a run but not its `PLACES_OF_RUN`.

    Args:
        data: folders of images that the command, or its run, reads.
        is_run: whether the output is itself a run, which may exist already.
    """
    place = output.resolve()
    if file := next((parent for parent in output.parents if parent.is_file()), None):
        raise UserError(f"{option} {output}: {file} is a file; expected a folder")
    if root := next((root for root in data if root and root.is_dir() and place.is_relative_to(root.resolve())), None):
        raise UserError(
            f"{option} {output}: this is inside {root}, where every file is read as data; choose a path outside "
            "that folder"
        )
    for folder in (place, *place.parents):
        if (folder / GALLERY_MARK).is_file():
            reason = "this is a gallery already" if folder == place else f"this is inside a gallery ({folder})"
            raise UserError(f"{option} {output}: {reason}; choose a path outside it")
        is_own = place == folder and is_run
        inside = place.relative_to(folder).parts[:1]
        if all((folder / name).is_file() for name in RUN_MARKS) and not (is_own or {*inside} & {*PLACES_OF_RUN}):
            raise UserError(
                f"{option} {output}: this is inside a run ({folder}); choose a path outside it, or in its "
                + ", ".join(f"{name}/" for name in PLACES_OF_RUN)
            )
    if place.name in EMBEDDING_FILES and all((place.parent / name).is_file() for name in EMBEDDING_FILES):
        raise UserError(f"{option} {output}: this belongs to the embeddings in {place.parent}; choose another {option}")
    check_writable(next(folder for folder in (place, *place.parents) if folder.is_dir()))


def is_plain_folder(path: Path) -> bool:
    """Return whether a path is a folder that dmlkit did not write, such as one of images."""
    marks = (*RUN_MARKS, GALLERY_MARK, "manifest.json", "study.json")
    return path.is_dir() and not any((path / name).exists() for name in marks)


@contextmanager
def writing(path: Path, *errors: type[Exception]) -> Generator[None]:
    """Create the folder of a file, and turn errors of a failed write into a `UserError` that names the file.

    ``errors`` are those other than OSError that a library raises for a full disk.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, *errors) as error:
        reason = (isinstance(error, OSError) and error.strerror) or first_line(error)
        raise UserError(f"{path}: cannot write this file: {reason}") from error


def write_output(path: Path, text: str) -> None:
    """Write a text as UTF-8, atomically, into a folder that is created, see `writing`."""
    with writing(path):
        write_text(path, text)


def check_writable(folder: Path) -> None:
    """Create a folder, or raise a `UserError` if no file can be written into it, before work that writes there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{folder}: cannot write into this folder: {error.strerror or error}") from error


def write_table(
    path: Path,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *boxes: Sequence[Sequence[float] | None],
    is_data: bool = False,
    keeps_old: bool = False,
) -> None:
    """Write a CSV table atomically; text that a spreadsheet would compute gets an apostrophe, which readers remove.

    Args:
        boxes: for each of the one or two images of a row, the boxes of all rows; None for a full image. They are the
            last columns, if some image has one.
        is_data: whether the table is one of images and labels, for dmlkit and other programs, and gets none.
        keeps_old: whether a table of other content that is replaced, perhaps edited by hand, is kept as ``NAME.old``.
    """
    if any(any(of_image) for of_image in boxes):
        sides = ([side for box in row for side in (box[:4] if box else [""] * 4)] for row in zip(*boxes, strict=True))
        rows = ([*row, *row_sides] for row, row_sides in zip(rows, sides, strict=True))
        columns = (*columns, *(*BOX, *OTHER_BOX)[: 4 * len(boxes)])
    with writing(path), atomic_write(path) as partial:
        with partial.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            escape = unambiguous if is_data else spreadsheet
            writer.writerows([escape(str(cell)) for cell in row] for row in rows)
        if keeps_old and path.is_file() and path.read_bytes() != partial.read_bytes():
            copyfile(path, path.with_name(f"{path.name}.old"))
