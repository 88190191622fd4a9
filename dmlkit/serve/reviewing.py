"""A review of labels that several people answer at once on the page of a server."""

import threading
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints
from starlette.exceptions import HTTPException

from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt
from dmlkit.gallery.images import LabelledImage
from dmlkit.review.folder import MOST_REVIEWER, ReviewFolder
from dmlkit.serve.requests import MOST_LABEL
from dmlkit.serve.service import Service

HELD = 120  # seconds for which a question that one reviewer sees is not shown to another
SHOWN = 12  # images of a group
Row = Annotated[int, Field(ge=0, le=2**53)]
Reviewer = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=MOST_REVIEWER)]


class QuestionRequest(BaseModel, extra="forbid"):
    """The question that a reviewer wants next."""

    reviewer: Reviewer
    about: Literal["labels", "unknown"] = "labels"
    row: Row | None = None
    """An image to ask about again; by default the next question."""


class AnswerRequest(BaseModel, extra="forbid"):
    """Answer of a reviewer."""

    reviewer: Reviewer
    row: Row
    id: Annotated[str, Field(max_length=64)]
    label: Annotated[str | None, Field(max_length=MOST_LABEL)]


class ServedReview:
    """A review of labels of a gallery, which several people answer at once."""

    def __init__(self, folder: Path, service: Service) -> None:
        self._service, self._review, self._lock = service, ReviewFolder(folder), threading.Lock()
        self._held = dict[int, tuple[str, float]]()  # by row: who sees the question, and since when
        reviewed, source = self._review.review.gallery, service.source
        if Path(reviewed).resolve() != source.resolve():
            raise UserError(
                f"--review {folder}: is a review of labels of {reviewed}, not of {source}; serve {reviewed}"
            )

    def status(self) -> dict[str, Any]:
        """Return how many labels may be wrong, what is missing, and where reviewers disagree."""
        with self._lock:
            folder = self._review
            folder.refresh()
            return {
                **folder.statement()._asdict(),
                **{name: getattr(folder.review, name) for name in ("error", "wrong", "images")},
                "new_labels": folder.new_labels(),
                "disagree": [{"row": row, "answers": folder.answers(row)} for row in folder.disagreements()[:20]],
            }

    def question(self, wanted: QuestionRequest) -> dict[str, Any]:
        """Return a question, or null if there is none."""
        with self._lock:
            self._review.refresh()
            group = [self._checked(wanted.row)] if wanted.row is not None else self._next(wanted)
            return {"question": self._described(group[0]) if group else None}

    def _described(self, row: int) -> dict[str, Any]:
        image, answers, alike = self._review.review.proposals[row], self._review.answers(row), self._review.alike(row)
        rows, labels = self._service.snapshot.rows, self._service.snapshot.points.labels
        return {
            "row": row,
            "id": image.id,
            "path": image.path,
            "label": image.label if answers else self._review.label(row),
            "probability": image.probability,
            "nearest": [{"id": name, "label": labels[rows[name]] if name in rows else None} for name in image.nearest],
            "alike": [other for other in alike if other != row][:SHOWN],
            "count": len(alike),
            "answers": answers,
        }

    def answer(self, said: AnswerRequest) -> dict[str, Any]:
        """Keep an answer, unless it is on another image than that of its row."""
        with self._lock:
            self._review.refresh()
            if self._review.review.proposals[self._checked(said.row)].id != said.id:
                raise HTTPException(
                    409, f"row {said.row}: {excerpt(said.id)} is not the id of this image; ask again for a question"
                )
            label = None if said.label is None else said.label.strip()
            count = self._review.reply({said.row: label}, said.reviewer)
            self._held.pop(said.row, None)
            return {"kept": count, "answers": self._review.answers(said.row), "label": self._review.label(said.row)}

    def path(self, row: int) -> Path:
        """Return the file of an image."""
        with self._lock:
            return Path(self._review.review.proposals[self._checked(row)].path)

    def to_add(self) -> list[LabelledImage]:
        """Return the images with their labels."""
        with self._lock:
            self._review.refresh()
            return self._review.to_add()

    def _next(self, wanted: QuestionRequest) -> list[int]:
        """Return the first question that no other reviewer sees now.

        If they see all that are left, return the first one about labels, but none about unknown images.
        """
        if wanted.about == "unknown":
            return next((group for group in self._review.ask_unknown() if self._take(group[0], wanted.reviewer)), [])
        others = sum(reviewer != wanted.reviewer for reviewer, _ in self._held.values())
        rows = [question.row for question in self._review.ask(1 + others)]
        return next(([row] for row in rows if self._take(row, wanted.reviewer)), rows[:1])

    def _take(self, row: int, reviewer: str) -> bool:
        other, since = self._held.get(row, (reviewer, 0.0))
        if other != reviewer and monotonic() - since < HELD:
            return False
        self._held[row] = reviewer, monotonic()
        return True

    def _checked(self, row: int) -> int:
        if row >= len(self._review.review.proposals):
            raise HTTPException(404, f"row {row}: there is no such image in this review")
        return row
