"""Output paths that a user names, which dmlkit replaces only if it wrote them, and CSV tables."""

import csv
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from dmlkit.errors import UserError, first_line
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import spreadsheet

HEAD_BYTES = 4096
GALLERY_MARK, RUN_MARKS = "gallery.json", ("recipe.yaml", "environment.json")  # files that identify a folder
PLACES_OF_RUN = (("embeddings",), ("evaluations",), ("exports",), ("plots",))
"""Folders of a run into which commands may write."""
EMBEDDING_FILES = ("embeddings.npy", "items.parquet")  # written before the manifest
EMBEDDING_JOB, COMPLETE_PARTS = "parts/job.json", "parts/part-*.safetensors"  # of a computation that may be resumed
PICTURES = {
    ".png": ("Software", b"Software\0dmlkit"),
    ".svg": ("Creator", b"<dc:title>dmlkit</dc:title>"),
    ".pdf": ("Creator", b"/Creator (dmlkit)"),
}
"""By suffix, the metadata key that names the program that drew a picture, and the bytes of it in the file."""
PAGE_MARK = '<meta name="generator" content="dmlkit">'
BOX = ("x1", "y1", "x2", "y2")
NEAREST = 3  # images listed per answer
ANSWER_COLUMNS = (
    *("path", "label", "guess", "probability", "score", "margin", "known", "images", *BOX),
    *(f"{name}_{rank}" for rank in range(1, NEAREST + 1) for name in ("nearest", "label", "similarity")),
)
NEAREST_BOXES = tuple(f"nearest_{side}_{rank}" for rank in range(1, NEAREST + 1) for side in BOX)
"""Boxes of the nearest images, which follow `ANSWER_COLUMNS`; blank for a full image."""
NEIGHBOR_COLUMNS = ("query", "rank", "similarity", "id", "label", "path")
"""The box of the query follows as `BOX` and that of the neighbor as `OTHER_BOX`, blank for a full image."""
OTHER_BOX = tuple(f"other_{side}" for side in BOX)
GROUP_COLUMNS = ("group", "path", "label", "least_similarity")
MATCH_COLUMNS = ("path", "label", "other_path", "other_label", "similarity")
CLUSTER_COLUMNS = ("cluster", "path", "label", "is_medoid")
PAIR_COLUMNS = ("a", "b", "score", "threshold", "verdict", "known", "probability")
SELECTION_COLUMNS = ("path", "label", "guess", "similarity", "margin", "score")
CLASS_COLUMNS = b"class,queries"  # and metrics
"""Columns of the CSV tables of identify, search, duplicates, cluster, verify, select and eval: their marks."""


def check_output(
    path: Path, is_ours: Callable[[Path], bool], *, sources: Iterable[Path] = (), option: str = "--output"
) -> None:
    """Check that a file may be written: it does not exist, or the same command wrote it before.

    Args:
        is_ours: returns whether an existing file is such an output of dmlkit, known by a mark in it.
        sources: files that the command reads, which are never replaced.

    Raises:
        UserError: the path is a folder, inside a file, a source, or a file that this command did not write.
    """
    if path.is_dir():
        raise UserError(f"{option} {path}: this is a folder; expected the name of a file")
    refuse_inside_file(path, option)
    if not path.exists():
        return
    if any(source.exists() and path.samefile(source) for source in sources):
        raise UserError(f"{option} {path}: this command reads this file; choose another {option}")
    if not path.is_file() or not is_ours(path):
        raise UserError(
            f"{option} {path}: this file exists already and was not written by this command; remove it, or choose "
            f"another {option}"
        )


def refuse_inside_file(path: Path, option: str) -> None:
    """Raise a `UserError` if one of the folders of an output is a file."""
    if file := next((one for one in path.parents if one.is_file()), None):
        raise UserError(f"{option} {path}: {file} is a file; expected a folder")


def check_outside_data(output: Path, data: Iterable[Path | None], *, option: str = "--output") -> None:
    """Raise a `UserError` if an output is inside a folder of data, where it would be read as an image or a class."""
    for root in data:
        if root is not None and root.is_dir() and output.resolve().is_relative_to(root.resolve()):
            raise UserError(
                f"{option} {output}: this is inside {root}, where every file is read as data; choose a path outside "
                "that folder"
            )


def check_place(output: Path, data: Iterable[Path | None], *, option: str = "--output", is_run: bool = False) -> None:
    """Raise a `UserError` if an output is inside a folder of data, a gallery, or a run but not its `PLACES_OF_RUN`.

    Args:
        data: folders that the command, or its run, reads.
        is_run: whether the output is itself a run, which may exist already.
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


def is_our_page(path: Path) -> bool:
    """Return whether dmlkit wrote a page."""
    return PAGE_MARK.encode() in head_of(path)


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
def writing(path: Path, *errors: type[Exception], advice: str = "") -> Generator[None]:
    """Turn errors of a failed write into a `UserError` of one line that names the file.

    Args:
        errors: exceptions other than OSError that a library raises for a full disk.
        advice: what to do, after the error.
    """
    try:
        yield
    except (OSError, *errors) as error:
        reason = (isinstance(error, OSError) and error.strerror) or first_line(error)
        after = f"; {advice}" if advice else ""
        raise UserError(f"{path}: cannot write this file: {reason}{after}") from error


def check_writable(folder: Path) -> None:
    """Raise a `UserError` if no file can be written into a folder, before work whose result is written there."""
    try:
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{folder}: cannot write into this folder: {error.strerror or error}") from error


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV table atomically; text that a spreadsheet would compute gets an apostrophe.

    Raises:
        UserError: the table cannot be written.
    """
    with writing(path), atomic_write(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([spreadsheet(str(cell)) for cell in row] for row in rows)


def write_boxed_table(
    path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]], *boxes: Sequence[Sequence[float] | None]
) -> None:
    """Write a CSV table, whose last columns are the boxes of the images of each row, if some have one.

    Args:
        path, columns, rows: see `write_table`.
        boxes: for each of the one or two images of a row, the boxes of all rows; None for a full image.

    Raises:
        UserError: the table cannot be written.
    """
    if any(any(of_image) for of_image in boxes):
        sides = ([side for box in row for side in (box[:4] if box else [""] * 4)] for row in zip(*boxes, strict=True))
        rows = ([*row, *own] for row, own in zip(rows, sides, strict=True))
        columns = (*columns, *(*BOX, *OTHER_BOX)[: 4 * len(boxes)])
    write_table(path, columns, rows)


def check_file(path: Path, is_ours: Callable[[Path], bool], *, sources: Iterable[Path] = (), option: str) -> None:
    """Raise a `UserError` unless a file may be written into a folder that exists; see `check_output`."""
    check_output(path, is_ours, sources=sources, option=option)
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: the folder {path.parent} does not exist; create it first")


def is_table(*tables: Sequence[str]) -> Callable[[Path], bool]:
    """Return a function that says whether a file is a CSV table with the columns of one of ``tables``.

    Boxes may follow the columns, see `write_boxed_table`.
    """
    boxes = ((), BOX, (*BOX, *OTHER_BOX))
    headers = [[",".join((*columns, *more)).encode()] for columns in tables for more in boxes]
    return lambda file: head_of(file).splitlines()[:1] in headers


def has_classes(path: Path) -> bool:
    """Return whether a file is a CSV table with a row per class; its metrics are checked with the source."""
    return head_of(path).startswith(CLASS_COLUMNS)


def is_unlabeled_selection(path: Path) -> bool:
    """Return whether a file is a table of ``dmlkit select`` without labels that somebody wrote."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file, strict=True)
            is_ours = tuple(table.fieldnames or ()) in (SELECTION_COLUMNS, (*SELECTION_COLUMNS, *BOX))
            return is_ours and not any((row["label"] or "").strip() for row in table)
    except (OSError, UnicodeDecodeError, csv.Error):
        return False


def check_folder(
    path: Path, mark: str | None = None, what: str = "", *, sources: Iterable[Path] = (), option: str
) -> None:
    """Raise an error unless a folder may be written.

    Args:
        mark: name of a file of what dmlkit writes there; a folder without it must be new or empty. None: any folder.
        what: what has this file, e.g. "a review".
        sources: paths that the command reads; the folder must not be inside a folder of images among them.

    Raises:
        UserError: it is a file, has other files, or is inside a file, a folder of data, a gallery or a run.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{option} {path}: this is a file; expected the name of a folder")
    refuse_inside_file(path, option)
    check_place(path, [source for source in sources if is_plain_folder(source)], option=option)
    if mark is None or not path.is_dir() or (path / mark).exists():
        return
    if names := sorted(one.name for one in path.iterdir() if not one.name.startswith(".")):
        raise UserError(f"{option} {path}: has {names[0]} but not {what}; choose another {option}")


def check_new_embeddings(path: Path, *, sources: Iterable[Path] = (), option: str = "--output") -> None:
    """Raise a `UserError` unless embeddings may be written to a folder, or their computation resumed."""
    check_folder(path, sources=sources, option=option)
    check_no_embeddings(path)


def check_no_embeddings(path: Path) -> None:
    """Raise a `UserError` for a folder with embeddings, or with files of their names that no computation left there."""
    if (path / "manifest.json").exists():
        raise UserError(f"{path}: this folder already holds embeddings; choose another --output or remove it")
    taken = [name for name in (*map(path.joinpath, EMBEDDING_FILES), *path.glob(COMPLETE_PARTS)) if name.exists()]
    if taken and not (path / EMBEDDING_JOB).exists():
        raise UserError(f"{taken[0]}: dmlkit embed did not write this file; choose another --output or remove it")


def is_plain_folder(path: Path) -> bool:
    """Return whether a path is a folder that dmlkit did not write, such as one of images."""
    return path.is_dir() and not any((path / name).exists() for name in (*RUN_MARKS, GALLERY_MARK, "manifest.json"))
