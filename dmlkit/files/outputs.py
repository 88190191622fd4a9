"""Outputs at places that a user names: what dmlkit did not write it does not replace."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from dmlkit.errors import UserError

HEAD_BYTES = 4096
GALLERY_MARK, RUN_MARKS = "gallery.json", ("recipe.yaml", "environment.json")  # files that say what a folder is
PLACES_OF_RUN = (("embeddings",), ("evaluations",), ("exports",), ("plots",))
"""Where commands write into a run."""
PICTURES = {
    ".png": ("Software", b"Software\0dmlkit"),
    ".svg": ("Creator", b"<dc:title>dmlkit</dc:title>"),
    ".pdf": ("Creator", b"/Creator (dmlkit)"),
}
"""By suffix, the key of a picture's metadata that says who drew it, and how that stands in the file."""


def check_output(
    path: Path, is_ours: Callable[[Path], bool], *, sources: Iterable[Path] = (), option: str = "--output"
) -> None:
    """Make sure that a file may be written: it is new, or the same command has written it before.

    Args:
        path: the file that the user names.
        is_ours: whether what is there is such an output of dmlkit, by a mark that it bears.
        sources: files that the command reads, which are never replaced.
        option: that names the file, for errors.

    Raises:
        UserError: it is a folder, a source, or somebody else's.
    """
    if path.is_dir():
        raise UserError(f"{option} {path}: is a folder; expected the name of a file")
    if not path.exists():
        return
    if any(source.exists() and path.samefile(source) for source in sources):
        raise UserError(f"{option} {path}: is read by this command; choose another {option}")
    if not path.is_file() or not is_ours(path):
        raise UserError(
            f"{option} {path}: is there already, and nothing tells that this command has written it; remove it, or "
            f"choose another {option}"
        )


def check_outside_data(output: Path, data: Iterable[Path | None], *, option: str = "--output") -> None:
    """Make sure that an output is not inside a folder of data, which would be read as images or classes from then on.

    Raises:
        UserError: it is.
    """
    for root in data:
        if root is not None and root.is_dir() and output.resolve().is_relative_to(root.resolve()):
            raise UserError(
                f"{option} {output}: is inside {root}, all of which is read as data; choose a place outside of it"
            )


def check_place(output: Path, data: Iterable[Path | None], *, option: str = "--output", is_run: bool = False) -> None:
    """Make sure that an output is inside no folder of data, no gallery, and no run but for `PLACES_OF_RUN`.

    Args:
        output: the file or folder that the user names.
        data: folders that the command, or the run that it is about, reads.
        option: that names the output, for errors.
        is_run: the output is a run, which may be there already.

    Raises:
        UserError: it is inside one of them.
    """
    check_outside_data(output, data, option=option)
    place = output.resolve()
    for folder in (place, *place.parents):
        if (folder / GALLERY_MARK).is_file():
            raise UserError(f"{option} {output}: is inside a gallery ({folder}); choose a place outside of it")
        inside = place.relative_to(folder).parts[:1]
        if all((folder / name).is_file() for name in RUN_MARKS) and inside not in (*PLACES_OF_RUN, *[()] * is_run):
            raise UserError(
                f"{option} {output}: is inside a run ({folder}); choose a place outside of it, or in its "
                + ", ".join(f"{place}/" for (place,) in PLACES_OF_RUN)
            )


def head_of(path: Path) -> bytes:
    """The beginning of a file, where marks stand."""
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


def is_our_picture(path: Path) -> bool:
    """Whether dmlkit drew a picture; see `picture_metadata`."""
    suffix = path.suffix.lower()
    if suffix not in PICTURES:
        return False
    return PICTURES[suffix][1] in (path.read_bytes() if suffix == ".pdf" else head_of(path))  # a PDF ends with it


def picture_metadata(path: Path) -> dict[str, str]:
    """The metadata that matplotlib writes into a picture, so that it is known again."""
    return {PICTURES[path.suffix.lower()][0]: "dmlkit"}


@contextmanager
def writing(path: Path, *errors: type[Exception]) -> Generator[None]:
    """Tell a write that fails in one line with its file.

    Args:
        path: what is being written.
        errors: what a library raises for a full disk, beside OSError.

    Raises:
        UserError: the block fails with one of them.
    """
    try:
        yield
    except (OSError, *errors) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        told = (reason.splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: cannot write this file: {told}") from error
