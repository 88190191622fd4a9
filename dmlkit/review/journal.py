"""Questions of a review, which label to ask about next, and answers, in a file to which lines are only ever added."""

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ValidationError

from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt
from dmlkit.metrics.audit import LabelAudit

JOURNAL = "answers.jsonl"


class LabelQuestion(BaseModel, frozen=True, extra="forbid"):
    """A label to check."""

    row: int
    """Position of the proposal."""
    is_draw: bool
    """Whether the label was drawn uniformly from all unchecked ones; otherwise it was the most doubtful one."""


class LabelAnswer(BaseModel, frozen=True, extra="forbid"):
    """Answer of a person about an image."""

    row: int
    """Position of the proposal."""
    id: str
    """Hash of the contents of the image."""
    label: str | None
    """The correct label; null if the person could not tell, which counts as a wrong label."""
    reviewer: str
    time: datetime


class Entry(BaseModel, frozen=True, extra="forbid"):
    """Line of the file: a question about a label that was chosen, an answer, or labels that begin another audit."""

    question: LabelQuestion | None = None
    answer: LabelAnswer | None = None
    copied: dict[int, str] | None = None
    """Labels, by the position of the proposal, that unknown images had from answers on near-duplicates."""


class Journal:
    """The file of a review. A line counts once it has its end: what a killed process began to write is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read, self._file = 0, None

    def new(self) -> tuple[bool, list[Entry]]:
        """Return the entries since the last call, and whether they are all, as at first or if the file was replaced."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                is_whole = self._file != status.st_ino or status.st_size < self._read
                start = 0 if is_whole else self._read
                file.seek(start)
                content = file.read()
        except FileNotFoundError:
            self._read, self._file = 0, None
            return True, []
        except OSError as error:
            raise UserError(f"{self.path}: cannot read this file: {error.strerror or error}") from error
        whole = content[: content.rfind(b"\n") + 1]
        entries: list[Entry] = []
        for line in whole.splitlines():
            try:
                entries.append(Entry.model_validate_json(line))
            except ValidationError:
                text = excerpt(line.decode(errors="replace"))
                raise UserError(f"{self.path}: expected a question or an answer, got the damaged line {text}") from None
        self._read, self._file = start + len(whole), status.st_ino
        return is_whole, entries

    def append(self, entries: Sequence[Entry]) -> None:
        """Add entries, and return when the disk has them. The caller is the only writer, and has called `new`."""
        content = b"".join(entry.model_dump_json(exclude_defaults=True).encode() + b"\n" for entry in entries)
        try:
            with self.path.open("r+b" if self._file is not None else "xb", buffering=0) as file:
                file.truncate(self._read)  # what a killed process began to write
                file.seek(self._read)
                try:
                    written = 0
                    while written < len(content):
                        written += file.write(content[written:])
                    os.fsync(file.fileno())
                except OSError:
                    with suppress(OSError):
                        file.truncate(self._read)
                    raise
            if self._file is None:
                with suppress(OSError):  # write its name to the disk; not on Windows
                    folder = os.open(self.path.parent, os.O_RDONLY)
                    try:
                        os.fsync(folder)
                    finally:
                        os.close(folder)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(
                f"{self.path}: cannot keep the answer: {reason}; free some space and answer again"
            ) from None


def next_question(
    state: LabelAudit,
    left: np.ndarray,
    wrong: float,
    audit: float,
    random: np.random.Generator,
    *,
    repeated: np.ndarray | None = None,
) -> LabelQuestion:
    """Choose the label to check next: the most doubtful one, or one drawn uniformly.

    Doubtful labels are checked if this is expected to save more draws than it costs answers.

    Args:
        left: (N,) bool, labels that were not asked about; at least one.
        audit: share of draws while doubtful labels are checked.
        repeated: (N,) bool, labels of near-duplicates of images that were asked about; only a draw asks about these.
    """
    rows = np.flatnonzero(left)
    doubtful = rows if repeated is None else rows[~repeated[rows]]
    is_draw = random.random() < audit or not len(doubtful)
    if not is_draw:  # after how many of the most doubtful labels only draws should follow, for the fewest answers
        doubts = np.sort(state.optimism * (1 - state.probabilities[rows]))[::-1].clip(max=1)
        checked = np.arange(len(doubts))
        expected = doubts.sum() - np.concatenate([[0.0], doubts.cumsum()[:-1]])
        draws = state.draws_until(int(wrong * len(left)), expected, doubts.size - checked.astype(np.float64))
        is_draw = int((checked + draws).argmin()) == 0
    if is_draw:
        return LabelQuestion(row=int(random.choice(rows)), is_draw=True)
    return LabelQuestion(row=int(doubtful[state.probabilities[doubtful].argmin()]), is_draw=False)
