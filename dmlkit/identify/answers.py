"""Answers of ``dmlkit search`` and ``dmlkit identify``, and their files.

A search finds neighbors. Identification decides on a label by the nearest ones, with the probability that it is right.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import BaseModel

from dmlkit import __version__
from dmlkit.files.atomic import json_text
from dmlkit.files.labels import UNKNOWN, label_of, path_label
from dmlkit.files.outputs import BOX, OTHER_BOX, write_output, write_table
from dmlkit.gallery.files import ApproximateIndex

if TYPE_CHECKING:
    from torch import Tensor

    from dmlkit.files.image_file import Box
    from dmlkit.metrics.ranking.rerank import Rerank
    from dmlkit.vectors.points import PointItem, PointSet

NEAREST = 3  # images listed per answer
ANSWER_COLUMNS = (
    *("path", "label", "guess", "probability", "score", "margin", "known", "images", *BOX),
    *(f"{name}_{rank}" for rank in range(1, NEAREST + 1) for name in ("nearest", "label", "similarity")),
)
NEAREST_BOXES = tuple(f"nearest_{side}_{rank}" for rank in range(1, NEAREST + 1) for side in BOX)
"""Boxes of the nearest images, which follow `ANSWER_COLUMNS`; blank for a full image."""


class Neighbor(NamedTuple):
    """One neighbor of a query."""

    rank: int  # from 1
    similarity: float
    item: "PointItem"

    def plain(self) -> dict[str, Any]:
        item = self.item
        named = {"id": item.id, "label": item.label, "path": item.path, "box": item.box and list(item.box[:4])}
        return {"rank": self.rank, "similarity": self.similarity, **named}


@dataclass(frozen=True)
class Answers:
    """Nearest neighbors of each query, nearest first.

    Args:
        queries: Q paths, or names of groups of images.
        rows: (Q, k) rows of what was searched.
        skipped: one message per query, or image of what was searched, that could not be read.
        pictures: Q paths of the images that show the queries.
        boxes: Q boxes of the queries in these images; None for a full image.
        index: index that found them, if the search was approximate.
        rerank: how the gallery was re-ranked for each query, if it was.
    """

    searched: "PointSet"
    queries: Sequence[str]
    similarities: "Tensor"
    rows: "Tensor"
    skipped: Sequence[str]
    pictures: Sequence[str]
    boxes: "Sequence[Box | None]"
    similarity_name: str
    index: ApproximateIndex | None = None
    rerank: "Rerank | None" = None

    @property
    def k(self) -> int:
        """Number of neighbors per query."""
        return self.rows.shape[1]

    def neighbors(self) -> Iterator[tuple[str, list[Neighbor]]]:
        """Yield each query's path with its neighbors."""
        for path, similarities, rows in zip(self.queries, self.similarities, self.rows, strict=True):
            items = self.searched.items_at(rows)
            pairs = zip((similarities + 0.0).tolist(), items, strict=True)  # a distance of 0 is no -0
            yield path, [Neighbor(rank, similarity, item) for rank, (similarity, item) in enumerate(pairs, start=1)]

    def plain(self) -> dict[str, Any]:
        return {
            "similarity": self.similarity_name,
            "rerank": None if self.rerank is None else {"method": self.rerank.name, **self.rerank._asdict()},
            "k": self.k,
            "recall": self.index.recall if self.index else 1.0,
            "queries": [
                {
                    "path": path,
                    "box": None if box is None else list(box[:4]),
                    "neighbors": [neighbor.plain() for neighbor in neighbors],
                }
                for box, (path, neighbors) in zip(self.boxes, self.neighbors(), strict=True)
            ],
            "skipped": list(self.skipped),
        }


def write_neighbors(answers: Answers, path: Path) -> None:
    """Write a CSV table, one row per query and neighbor, with the boxes of both; blank for a full image."""
    rows = (
        (
            *(query, rank, f"{similarity:.9g}", item.id, item.label or "", item.path),
            *(side for region in (box, item.box) for side in (region[:4] if region else [""] * 4)),
        )
        for box, (query, neighbors) in zip(answers.boxes, answers.neighbors(), strict=True)
        for rank, similarity, item in neighbors
    )
    write_table(path, ("query", "rank", "similarity", "id", "label", "path", *BOX, *OTHER_BOX), rows)


class Decision(NamedTuple):
    """Decision on one image."""

    code: int  # of the label
    score: float  # similarity of the label's nearest picture
    margin: float | None  # the score less that of the best other label; None where there is no other


def vote(near: Sequence[int], similarities: Sequence[float], voters: int = 1) -> Decision:
    """Return the label of most voters, if tied that of the nearest, with its score and margin.

    Args:
        near: labels of images as integers, those of the nearest first; with several labels if there are several.

    Example:
        >>> vote([7, 8, 8], [0.75, 0.5, 0.25], voters=3)
        Decision(code=8, score=0.5, margin=-0.25)
    """
    winner = Counter(near[:voters]).most_common(1)[0][0]  # in the order in which they come first
    others = [similarity for code, similarity in zip(near, similarities, strict=True) if code != winner]
    score = similarities[near.index(winner)]
    return Decision(winner, score, score - others[0] if others else None)


class Sigmoid(NamedTuple):
    """Probability 1 / (1 + exp(-z)) with z = margin_slope * margin + score_slope * score + offset.

    Example:
        >>> Sigmoid(2.0, 1.0, -1.0).at(0.0, 1.0)
        0.5
    """

    margin_slope: float
    score_slope: float
    offset: float

    def at(self, margin: float | None, score: float) -> float:
        """Return the probability of a guess; without another label, whose margin is None, from the score."""
        return float(self.of(np.array([margin or 0.0]), np.array([score]))[0])

    def of(self, margins: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Return the probabilities (N,) of guesses."""
        logits = self.margin_slope * margins + self.score_slope * scores + self.offset
        small = np.exp(-np.abs(logits))  # never overflows
        return np.where(logits < 0, small, 1.0) / (1 + small)


class Accuracy(BaseModel, frozen=True, extra="forbid"):
    """Counts of the images whose correct label is known."""

    images: int
    right: int
    """Images with the correct label."""
    unknown: int
    """Images without a label, because their score is below the threshold."""
    guessed: int
    """Images whose guess is correct, also below the threshold."""


class Answer(NamedTuple):
    """Answer for one image, or for a group of images."""

    label: str  # UNKNOWN where the score is below the threshold
    guess: str  # the label if there were no threshold
    probability: float | None  # that the guess is right, if every second image has none of the labels
    score: float  # similarity of the label's nearest picture
    margin: float | None  # the score less that of the best other label; None where there is no other
    least_probability: float | None = None  # below which it is unknown; None if its score decides
    known: str | None = None  # the correct label, if it is known and one of the labels
    images: int = 1  # of the group

    @property
    def is_right(self) -> bool | None:
        """Whether the label is the correct one; None if that is not known."""
        return None if self.known is None else self.label == self.known


def are_nearest(near: Answers) -> list[bool]:
    """Return of each query whether it is itself, the same box of the same file, the nearest of the labeled images."""
    nearest_items = near.searched.items_at(near.rows[:, 0]) if len(near.rows) else []
    pairs = zip(near.pictures, near.boxes, nearest_items, strict=True)
    return [
        Path(picture).absolute() == Path(item.path).absolute() and (box and box[:4]) == (item.box and item.box[:4])
        for picture, box, item in pairs
    ]


@dataclass(frozen=True)
class Identified:
    """Answers with the nearest images."""

    answers: list[Answer]
    neighbors: Answers
    threshold: float | None
    note: str | None = None
    """Message on the calibration or the threshold."""
    unit: tuple[str, str] = ("image", "images")
    """What each answer is on, singular and plural."""
    in_source: int = 0
    """Number of answers on images of which one is itself the nearest of the labeled images."""
    table_rows: Sequence[Sequence[int]] = ()
    """Images of each answer, by their rows in the table that lists them; empty if none does."""

    def labeled(self) -> Iterator[tuple[str, Answer]]:
        """Yield each query's path with its answer."""
        yield from zip(self.neighbors.queries, self.answers, strict=True)

    @cached_property
    def accuracy(self) -> Accuracy | None:
        """Counts over the images whose correct label is known; None if there are none."""
        checked = [answer for answer in self.answers if answer.known is not None]
        if not checked:
            return None
        return Accuracy(
            images=len(checked),
            right=sum(answer.label == answer.known for answer in checked),
            unknown=sum(answer.label == UNKNOWN for answer in checked),
            guessed=sum(answer.guess == answer.known for answer in checked),
        )

    def most_doubtful_first(self) -> "Identified":
        """Return the answers in another order: unknown ones first, then by probability, margin and score."""

        def doubt(row: int) -> tuple[float, ...]:
            answer = self.answers[row]
            margin = inf if answer.margin is None else answer.margin
            return answer.label != UNKNOWN, answer.probability or 0.0, margin, answer.score

        return self.at(sorted(range(len(self.answers)), key=doubt))

    def at(self, rows: Sequence[int]) -> "Identified":
        """Return some answers, in their order."""
        nearest = self.neighbors
        named = {name: [getattr(nearest, name)[row] for row in rows] for name in ("queries", "pictures", "boxes")}
        nearest = replace(nearest, **named, similarities=nearest.similarities[[*rows]], rows=nearest.rows[[*rows]])
        table_rows = [self.table_rows[row] for row in rows] if self.table_rows else ()
        return replace(self, answers=[self.answers[row] for row in rows], neighbors=nearest, table_rows=table_rows)

    def write(self, path: Path) -> None:
        """Write the answers in the order of the images, as JSON if the name ends in ``.json``, else as a CSV table."""
        boxes = [box and list(box[:4]) for box in self.neighbors.boxes]
        rows = zip(self.answers, self.neighbors.neighbors(), boxes, strict=True)
        if path.suffix.lower() != ".json":
            cells = (_cells(answer, box, *query) for answer, query, box in rows)
            write_table(path, (*ANSWER_COLUMNS, *NEAREST_BOXES), cells)
            return
        document = {
            "format": 1,
            "dmlkit": __version__,
            "similarity": self.neighbors.similarity_name,
            "threshold": self.threshold,
            "accuracy": self.accuracy and self.accuracy.model_dump(),
            "images": [
                {"path": name, "box": box, **answer._asdict(), "nearest": [neighbor.plain() for neighbor in nearest]}
                for answer, (name, nearest), box in rows
            ],
            "skipped": list(self.neighbors.skipped),
        }
        write_output(path, json_text(document))


def known_labels(
    images: Path, paths: Sequence[str], own: Sequence[str | None], names: Sequence[str]
) -> Iterator[str | None]:
    """Yield the correct label of each query: its own, or its outermost folder whose name is one of ``names``."""
    labels, root, is_folder = set(names), images.absolute(), images.is_dir()
    for path, label in zip(paths, own, strict=True):
        if label in labels:
            yield label
            continue
        place = Path(path).absolute()
        folders = place.relative_to(root).parts[:-1] if is_folder and place.is_relative_to(root) else ()
        names_of_folders = map(path_label, ([folder] for folder in folders))
        is_of_folder = not label or label in names_of_folders  # not of a table or a box
        known = (name for name in map(label_of, (root.name, *folders)) if name in labels)
        yield next(known, None) if is_of_folder and is_folder else None


def _cells(answer: Answer, box: list[float] | None, path: str, neighbors: list[Neighbor]) -> list[str]:
    nearest = [text for _, similarity, item in neighbors for text in (item.path, item.label or "", f"{similarity:.9g}")]
    numbers = ["" if value is None else f"{value:.9g}" for value in (answer.probability, answer.score, answer.margin)]
    sides = [""] * len(BOX) if box is None else [f"{side:.9g}" for side in box]
    cells = [path, answer.label, answer.guess, *numbers, answer.known or "", str(answer.images), *sides, *nearest]
    cells += [""] * (len(ANSWER_COLUMNS) - len(cells))
    for _, _, item in neighbors:
        cells += [f"{side:.9g}" for side in item.box[:4]] if item.box else [""] * len(BOX)
    return cells + [""] * (len(ANSWER_COLUMNS) + len(NEAREST_BOXES) - len(cells))
