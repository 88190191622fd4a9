"""Output paths that a user names, which dmlkit replaces only if it wrote them, and CSV tables."""

import csv
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import spreadsheet

HEAD_BYTES = 4096
GALLERY_MARK, RUN_MARKS = "gallery.json", ("recipe.yaml", "environment.json")  # files that identify a folder
PLACES_OF_RUN = (("embeddings",), ("evaluations",), ("exports",), ("plots",))
"""Folders of a run into which commands may write."""
PICTURES = {
    ".png": ("Software", b"Software\0dmlkit"),
    ".svg": ("Creator", b"<dc:title>dmlkit</dc:title>"),
    ".pdf": ("Creator", b"/Creator (dmlkit)"),
}
"""By suffix, the metadata key that names the program that drew a picture, and the bytes of it in the file."""


def check_output(
    path: Path, is_ours: Callable[[Path], bool], *, sources: Iterable[Path] = (), option: str = "--output"
) -> None:
    """Check that a file may be written: it does not exist, or the same command wrote it before.

    Args:
        is_ours: returns whether an existing file is such an output of dmlkit, known by a mark in it.
        sources: files that the command reads, which are never replaced.

    Raises:
        UserError: the path is a folder, a source, or a file that this command did not write.
    """
    if path.is_dir():
        raise UserError(f"{option} {path}: this is a folder; expected the name of a file")
    if not path.exists():
        return
    if any(source.exists() and path.samefile(source) for source in sources):
        raise UserError(f"{option} {path}: this command reads this file; choose another {option}")
    if not path.is_file() or not is_ours(path):
        raise UserError(
            f"{option} {path}: this file exists already and was not written by this command; remove it, or choose "
            f"another {option}"
        )


def check_outside_data(output: Path, data: Iterable[Path | None], *, option: str = "--output") -> None:
    """Check that an output is not inside a folder of data, where it would be read as an image or a class.

    Raises:
        UserError: the output is inside one of the folders.
    """
    for root in data:
        if root is not None and root.is_dir() and output.resolve().is_relative_to(root.resolve()):
            raise UserError(
                f"{option} {output}: this is inside {root}, where every file is read as data; choose a path outside "
                "that folder"
            )


def check_place(output: Path, data: Iterable[Path | None], *, option: str = "--output", is_run: bool = False) -> None:
    """Check that an output is not inside a folder of data, a gallery, or a run (except in its `PLACES_OF_RUN`).

    Args:
        data: folders that the command, or its run, reads.
        is_run: whether the output is itself a run, which may exist already.

    Raises:
        UserError: the output is inside one of them.
    """
    check_outside_data(output, data, option=option)
    place = output.resolve()
    for folder in (place, *place.parents):
        if (folder / GALLERY_MARK).is_file():
            raise UserError(f"{option} {output}: this is inside a gallery ({folder}); choose a path outside it")
        inside = place.relative_to(folder).parts[:1]
        if all((folder / name).is_file() for name in RUN_MARKS) and inside not in (*PLACES_OF_RUN, *[()] * is_run):
            raise UserError(
                f"{option} {output}: this is inside a run ({folder}); choose a path outside it, or in its "
                + ", ".join(f"{place}/" for (place,) in PLACES_OF_RUN)
            )


def head_of(path: Path) -> bytes:
    """Read the first `HEAD_BYTES` of a file, which contain the mark of the program that wrote it."""
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


def is_our_picture(path: Path) -> bool:
    """Return whether dmlkit drew a picture; see `picture_metadata`."""
    suffix = path.suffix.lower()
    if suffix not in PICTURES:
        return False
    return PICTURES[suffix][1] in (path.read_bytes() if suffix == ".pdf" else head_of(path))  # a PDF has it at the end


def picture_metadata(path: Path) -> dict[str, str]:
    """Return the metadata that matplotlib writes into a picture, so that `is_our_picture` recognizes it."""
    return {PICTURES[path.suffix.lower()][0]: "dmlkit"}


@contextmanager
def writing(path: Path, *errors: type[Exception]) -> Generator[None]:
    """Turn errors of a failed write into a `UserError` of one line that names the file.

    Args:
        errors: exceptions other than OSError that a library raises for a full disk.

    Raises:
        UserError: the block fails with one of these errors.
    """
    try:
        yield
    except (OSError, *errors) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        first_line = (reason.splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: cannot write this file: {first_line}") from error


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV table atomically; text that a spreadsheet would compute gets an apostrophe.

    Raises:
        UserError: the table cannot be written.
    """
    with writing(path), atomic_write(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([spreadsheet(str(cell)) for cell in row] for row in rows)


def check_table(path: Path, columns: Sequence[str], *, sources: Iterable[Path] = (), option: str) -> None:
    """Raise an error unless a CSV table of these columns may be written; see `check_output`.

    Raises:
        UserError: the file exists and is something else.
    """
    header = ",".join(columns).encode()
    check_output(path, lambda file: head_of(file).splitlines()[:1] == [header], sources=sources, option=option)
