"""Labels that a person checks: proposals for images, questions, answers, and how many labels may be wrong."""

import csv
import os
from collections.abc import Mapping
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import BaseModel

from dmlkit.embedding.gallery.images import UNKNOWN, LabelledImage, check_images
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.questions.identify import identify
from dmlkit.errors import UserError
from dmlkit.files.document import Document
from dmlkit.files.escape import excerpt, spreadsheet
from dmlkit.files.lock import sole_writer
from dmlkit.files.outputs import check_place, write_table
from dmlkit.metrics.audit import LabelAudit
from dmlkit.metrics.reliability import Share

STATE, QUESTIONS, LABELS = "review.json", "questions.csv", "labels.csv"
COLUMNS = ("path", "label", "answer")
SAME, UNSURE = "same", "?"
"""Answers that are not a label: the label is right, and a person cannot tell."""


class ProposedLabel(BaseModel, frozen=True, extra="forbid"):
    """Label that the gallery gives to an image."""

    path: str
    label: str
    probability: Share
    """Probability that the label is right."""


class LabelQuestion(BaseModel, frozen=True, extra="forbid"):
    """A label to check."""

    row: int
    """Position of the proposal."""
    is_draw: bool
    """Whether the label was drawn uniformly from all unchecked ones; otherwise it was the most doubtful one."""


class Reply(BaseModel, frozen=True, extra="forbid"):
    """Answer of a person to a question."""

    question: LabelQuestion
    label: str | None
    """The correct label; null if the person could not tell, which counts as a wrong label."""


class Statement(NamedTuple):
    """How many labels may be wrong."""

    labels: int
    checked: int
    corrected: int
    most_wrong: int
    """Largest number of wrong labels, with confidence 1 - error at any time."""
    more_draws: int
    """Estimated number of draws until the wrong labels are as few as wanted; at most all that were not checked."""


class Review(Document, frozen=True):
    """State of a review: the proposals and the answers so far."""

    kind: ClassVar[str] = "state of a review"

    gallery: str
    images: str
    wrong: Share
    """Share of wrong labels to reach."""
    audit: Share
    """Share of the questions that are drawn uniformly."""
    error: Share = 0.05
    proposals: tuple[ProposedLabel, ...]
    unknown: int
    """Number of images that the gallery gives no label."""
    asked: tuple[LabelQuestion, ...] = ()
    """Questions that wait for an answer."""
    replies: tuple[Reply, ...] = ()

    @cached_property
    def labels(self) -> dict[int, str | None]:
        """Label of each checked proposal; None where a person could not tell."""
        return {reply.question.row: reply.label for reply in self.replies}

    def labeled(self) -> list[tuple[str, str]]:
        """Return the images with a label: checked ones as the person said, the others as proposed."""
        labels = ((one.path, self.labels.get(row, one.label)) for row, one in enumerate(self.proposals))
        return [(path, label) for path, label in labels if label is not None]

    def to_add(self) -> list[LabelledImage]:
        """Return the same images for a gallery."""
        return [LabelledImage(os.path.abspath(path), label) for path, label in self.labeled()]  # noqa: PTH100 - links

    def evidence(self) -> LabelAudit:
        """Return the bound after all answers."""
        found = LabelAudit([proposal.probability for proposal in self.proposals], self.error)
        for reply in self.replies:
            question = reply.question
            is_wrong = reply.label != self.proposals[question.row].label
            found.add(question.row, is_wrong=is_wrong, is_draw=question.is_draw)
        return found

    def statement(self) -> Statement:
        """Return how many labels may be wrong, and how many answers are missing."""
        found, labels, left = self.evidence(), len(self.proposals), len(self.proposals) - len(self.replies)
        expected = min(wrong_share(found) * found.expected * left, left)
        draws = (
            found.draws_until(int(self.wrong * labels), np.array([expected]), np.array([float(left)]))
            if left
            else [0.0]
        )
        return Statement(labels, len(self.replies), found.found, found.most_wrong(), ceil(draws[0]))

    def ask(self, count: int) -> "Review":
        """Return the review with the next questions: doubtful labels and, in between, labels drawn at random.

        Questions without an answer stay.
        """
        found, asked = self.evidence(), list(self.asked)
        random = np.random.default_rng([len(self.replies), len(asked), len(self.proposals)])
        left = found.left.copy()
        left[[question.row for question in asked]] = False
        while left.any() and len(asked) < count:
            question = next_question(found, left, self.wrong, self.audit, random)
            left[question.row] = False
            asked.append(question)
        return self.model_copy(update={"asked": tuple(asked)})

    def reply(self, answers: Mapping[str, str]) -> "Review":
        """Return the review with the answers to its questions, in their order, up to the first one without an answer.

        Args:
            answers: what a person wrote, by the path of the image.
        """
        replies = list(self.replies)
        for question in self.asked:
            proposal = self.proposals[question.row]
            answer = answers.get(proposal.path)
            if not answer:
                break
            label = proposal.label if answer == SAME else None if answer == UNSURE else answer
            replies.append(Reply(question=question, label=label))
        rest = self.asked[len(replies) - len(self.replies) :]
        return self.model_copy(update={"asked": rest, "replies": tuple(replies)})


def next_question(
    found: LabelAudit, left: np.ndarray, wrong: float, audit: float, random: np.random.Generator
) -> LabelQuestion:
    """Choose the label to check next: the most doubtful one, or one drawn uniformly.

    Doubtful labels are checked if this is expected to save more draws than it costs answers.

    Args:
        found: the answers so far.
        left: (N,) bool, labels that were not asked about; at least one.
        wrong: share of wrong labels to reach.
        audit: share of draws while doubtful labels are checked.
        random: random numbers.
    """
    rows = np.flatnonzero(left)
    if random.random() < audit or best_doubtful(found, found.probabilities[rows], int(wrong * len(left))) == 0:
        return LabelQuestion(row=int(random.choice(rows)), is_draw=True)
    return LabelQuestion(row=int(rows[found.probabilities[rows].argmin()]), is_draw=False)


def best_doubtful(found: LabelAudit, probabilities: np.ndarray, most: int) -> int:
    """Return after how many of the most doubtful labels only draws should follow, for the fewest answers in all.

    Args:
        found: the answers so far.
        probabilities: (R,), of the labels that were not asked about.
        most: largest number of wrong labels to reach.
    """
    doubts = np.sort(wrong_share(found) * (1 - probabilities))[::-1].clip(max=1)
    checked = np.arange(len(doubts))
    expected = doubts.sum() - np.concatenate([[0.0], doubts.cumsum()[:-1]])
    return int((checked + found.draws_until(most, expected, doubts.size - checked.astype(np.float64))).argmin())


def wrong_share(found: LabelAudit) -> float:
    """Return how many wrong labels were found, relative to those that their probabilities expected."""
    return (found.found + 1) / (float((1 - found.probabilities[~found.left]).sum()) + 1)


def review(
    gallery: Path,
    images: Path,
    folder: Path,
    *,
    ask: int = 20,
    wrong: float = 0.01,
    audit: float = 0.25,
    run: Path | None = None,
    device: str = "auto",
    bar: Bar = no_bar,
) -> Review:
    """Begin a review of the labels that a gallery gives to images, or continue it with the answers in its folder.

    The folder has ``questions.csv``, in whose column ``answer`` a person writes ``same``, another label, or ``?`` for
    "cannot tell", and ``labels.csv``, a table of the images with their labels: checked ones as the person said, the
    others as proposed. Its paths are relative to the folder of images, as with a recipe's ``dataset.root``. Answers are
    read in the order of the questions up to the first empty one, because labels that a person leaves out would not be
    missing at random. The bound is on the proposals as they were when the review began; a gallery that has changed
    since needs a new review.

    Args:
        gallery: calibrated gallery, or other labeled points, see `identify`.
        images: image, folder or table of images.
        folder: folder of the review.
        ask: number of questions.
        wrong: share of wrong labels to reach.
        audit: share of the questions that are drawn uniformly from all labels that were not checked.
        run, device, bar: see `identify`.

    Raises:
        UserError: no image gets a label with a probability, an answer cannot be read, or the folder is another review.
    """
    check_place(folder, [images])
    with sole_writer(folder, what="a review"):
        state = folder / STATE
        found, given = Review.read(state) if state.exists() else None, dict[str, str]()
        if found is None:
            if others := sorted(one.name for one in folder.iterdir() if not one.name.startswith(".")):
                raise UserError(f"--output {folder}: has {others[0]} but no review; choose another folder")
            found = _begin(gallery, images, wrong, audit, run, device, bar)
        elif (found.gallery, found.images) != (str(gallery), str(images)):
            raise UserError(
                f"--output {folder}: this is a review of {found.images} in {found.gallery}; choose another folder"
            )
        else:
            given = _answers(folder / QUESTIONS, found)
            found = found.reply(given)
        found = found.model_copy(update={"wrong": wrong, "audit": audit}).ask(ask)
        found.write(state)
        _write_tables(folder, found, given)
    return found


def _begin(gallery: Path, images: Path, wrong: float, audit: float, run: Path | None, device: str, bar: Bar) -> Review:
    found = identify(gallery, images, run=run, device=device, bar=bar)
    proposals = [
        ProposedLabel(path=path, label=answer.label, probability=answer.probability)
        for path, answer in found.labeled()
        if answer.label != UNKNOWN and answer.probability is not None
    ]
    if not proposals:
        raise UserError(
            f"{images}: no image gets a label with a probability from {gallery}; expected at least 10 labeled images "
            f"whose label others have, and a threshold that some of these images reach; see dmlkit calibrate {gallery}"
        )
    unknown = sum(answer.label == UNKNOWN for answer in found.answers)
    return Review(
        gallery=str(gallery), images=str(images), wrong=wrong, audit=audit, proposals=tuple(proposals), unknown=unknown
    )


def _answers(path: Path, found: Review) -> dict[str, str]:
    """Read what a person wrote, by the path of the image; a table without answers is that of an interrupted command."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, strict=True))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot read this table: {error}") from error
    paths = {spreadsheet(proposal.path): proposal.path for proposal in found.proposals}
    answers: dict[str, str] = {}
    for line, row in enumerate(rows, start=2):
        name, answer = row.get("path"), row.get("answer")
        if name not in paths or answer is None:
            raise UserError(
                f"{path}:{line}: expected the columns {', '.join(COLUMNS)} and the path of an image of this review, "
                f"got {excerpt(str(name))}; write only into the column answer"
            )
        if answer.strip():
            check_images([LabelledImage(paths[name], answer.strip())])
            answers[paths[name]] = answer.strip()
    return answers


def _write_tables(folder: Path, found: Review, given: Mapping[str, str]) -> None:
    """Write the questions, with answers that come after one without an answer, and all labels."""
    asked = [found.proposals[question.row] for question in found.asked]
    write_table(folder / QUESTIONS, COLUMNS, ([one.path, one.label, given.get(one.path, "")] for one in asked))
    images = Path(found.images)
    root = images if images.is_dir() else images.parent
    named = ((str(Path(path).relative_to(root)), label) for path, label in found.labeled())
    write_table(folder / LABELS, COLUMNS[:2], named)
