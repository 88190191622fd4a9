"""The file that ``dmlkit identify`` writes. This module imports no torch, so that a wrong path is refused at once."""

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel

from dmlkit.errors import UserError
from dmlkit.files.document import Document
from dmlkit.files.outputs import ANSWER_COLUMNS, check_file, check_table


class Accuracy(BaseModel, frozen=True, extra="forbid"):
    """Counts of the images whose correct label is known."""

    images: int
    right: int
    """Images with the correct label."""
    unknown: int
    """Images without a label, because their score is below the threshold."""
    guessed: int
    """Images whose guess is correct, also below the threshold."""


class AnswersFile(Document, frozen=True):
    """JSON file that ``dmlkit identify`` writes."""

    kind: ClassVar[str] = "file of answers of dmlkit identify"
    version: ClassVar[int] = 2  # 1 had no boxes
    older: ClassVar[dict[int, tuple[str, ...]]] = {1: ()}

    similarity: str
    threshold: float | None
    """Score below which an image is unknown."""
    least_probability: float | None
    """Probability below which an image is unknown, in a calibrated gallery."""
    accuracy: Accuracy | None
    """Counts over images whose correct label is known; null if there are none."""
    images: tuple[dict[str, str | float | list[float] | list[dict[str, str | float | int | None]] | None], ...]
    """Path, box, label, guess, probability, score, margin, known, number of images and nearest images of each answer.
    A box is x1, y1, x2, y2 in pixels, without its margin; null for a full image or a group."""
    skipped: tuple[str, ...]
    """One message per image that could not be read."""


def check_answers_file(path: Path, *, sources: Iterable[Path] = (), option: str) -> None:
    """Raise an error unless answers may be written to a file.

    Raises:
        UserError: it does not end in .csv or .json, or exists and is something else.
    """
    match path.suffix.lower():
        case ".csv":
            check_table(path, ANSWER_COLUMNS, sources=sources, option=option)
        case ".json":
            check_file(path, AnswersFile.is_at, sources=sources, option=option)
        case _:
            raise UserError(f"{option} {path}: expected a name that ends in .csv or .json")
