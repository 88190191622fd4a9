"""Outputs at places that a user names: what dmlkit did not write it does not replace."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from dmlkit.errors import UserError

HEAD_BYTES = 4096
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
