"""Labels of images among labeled images, or none of them: ``dmlkit identify``."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from dmlkit.embedding.gallery.folder import GalleryFolder
from dmlkit.embedding.gallery.images import UNKNOWN
from dmlkit.embedding.gallery.index import ApproximateGallery
from dmlkit.embedding.gallery.manifest import check_threshold
from dmlkit.embedding.points import PointSet
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.questions.answers import Answers, Neighbor, write_table
from dmlkit.embedding.questions.search import QUERY_ROWS, nearest, searcher_of
from dmlkit.embedding.search import Gallery, StoredGallery
from dmlkit.embedding.sources import open_points, open_queries
from dmlkit.errors import UserError
from dmlkit.files.source import kind_of
from dmlkit.manifolds.numerics.frechet import frechet_mean
from dmlkit.run_folder.folder import RunFolder
from dmlkit.run_folder.threshold import threshold_of

Decision = Literal["nearest", "vote", "mean"]
VOTERS = 5  # by default
NEAREST = 3  # images listed per answer
FIRST = 16  # neighbors in which another label is looked for at first
ANSWER_COLUMNS = ("path", "label", "score", "margin", *(f"nearest_{rank}" for rank in range(1, NEAREST + 1)))


class Answer(NamedTuple):
    """Answer for one image."""

    label: str  # UNKNOWN where the score is below the threshold
    score: float  # similarity of the label's nearest picture, or of its mean
    margin: float | None  # the score less that of the best other label; None where there is no other


@dataclass(frozen=True)
class Identified:
    """Answers with the nearest images."""

    answers: list[Answer]
    neighbors: Answers
    threshold: float | None

    def write(self, path: Path) -> None:
        """Write the answers as a CSV table."""
        rows = zip(self.answers, self.neighbors.neighbors(), strict=True)
        write_table(path, ANSWER_COLUMNS, (_cells(answer, *found) for answer, found in rows))


def identify(
    source: Path,
    images: Path,
    *,
    by: Decision = "nearest",
    k: int | None = None,
    threshold: float | None = None,
    run: Path | None = None,
    labels: Path | None = None,
    manifold: str | None = None,
    device: str = "auto",
    bar: Bar = no_bar,
) -> Identified:
    """Find the label of each image among labeled images, or report it as unknown.

    Args:
        source: a gallery, or other labeled points, see `open_points`.
        images: what to identify, see `open_queries`.
        by: ``nearest`` takes the label of the nearest image; ``vote`` the most frequent one of the k nearest, if tied
            that of the nearest; ``mean`` that of the nearest Fréchet mean of a label's images.
        k: number of images that vote. Default: 5.
        threshold: a lower score makes an image `UNKNOWN`. Default: that of the gallery, or of its calibrated run.
        run: run that embeds images. Default: that of ``source``.
        labels, manifold: of an array, see `open_points`.
        device: see `start_fabric`.
        bar: shows each step.

    Raises:
        UserError: the source is empty or has an image without a label, or the queries come from another model.
    """
    if k is not None and (k < 1 or by != "vote"):
        raise UserError(f"-k {k}: expected at least 1 neighbor, with --by vote")
    check_threshold(threshold)
    kind = kind_of(source)
    searched = open_points(source, device=device if kind == "run" else None, labels=labels, manifold=manifold, bar=bar)
    known = list(searched.labels)
    if None in known:
        advice = "remove them, and add them with --label" if kind == "gallery" else "give every image a label"
        raise UserError(f"{source}: {known.count(None)} of {len(known)} images have no label; {advice}")
    names, codes = np.unique(np.array(known, dtype=object), return_inverse=True)
    asked = open_queries(images, searched, run=run, device=device, bar=bar)
    searcher = searcher_of(searched)
    voters = VOTERS if by == "vote" and k is None else k or 1
    decided = _by_mean(searched, codes, asked) if by == "mean" else _by_pictures(searcher, codes, asked, voters)
    floor = _threshold_of(searched) if threshold is None else threshold
    answers = [
        Answer(UNKNOWN if floor is not None and score < floor else str(names[code]), score, margin)
        for code, score, margin in decided
    ]
    return Identified(answers, nearest(searched, asked, NEAREST), floor)


def _threshold_of(searched: PointSet) -> float | None:
    """Return the threshold that was given for a gallery, else that of the calibrated run, now or at the creation."""
    stored = searched.manifest.threshold if isinstance(searched, GalleryFolder) else None
    if isinstance(searched, GalleryFolder) and searched.manifest.threshold_is_own and stored is not None:
        return stored
    if searched.run is None or searched.manifest is None:
        return stored
    calibrated = threshold_of(RunFolder(searched.run), searched.manifest.model.fingerprint)
    return calibrated.threshold if calibrated else stored


Decided = tuple[int, float, float | None]
"""Code of a label, its score and its margin."""


def _by_pictures(
    searcher: StoredGallery | ApproximateGallery, codes: np.ndarray, asked: PointSet, voters: int
) -> Iterator[Decided]:
    """Search among more and more neighbors, until there is one with another label."""
    labels = len(np.unique(codes))
    for block in asked.blocks(QUERY_ROWS):
        decided: dict[int, Decided] = {}
        remaining, length = list(range(len(block))), min(max(FIRST, voters), len(codes))
        while remaining:
            found = searcher.search(block[remaining], length)
            for query, similarities, rows in zip(remaining, found.similarities, found.indices, strict=True):
                near = codes[rows.numpy()]
                if len(np.unique(near)) > 1 or labels == 1 or length == len(codes):
                    decided[query] = _vote(near.tolist(), (similarities + 0.0).tolist(), voters)
            remaining = [query for query in remaining if query not in decided]
            length = min(2 * length, len(codes))
        yield from (decided[query] for query in range(len(block)))


def _vote(near: list[int], similarities: list[float], voters: int) -> Decided:
    """Return the label of most voters, if tied that of the nearest, with its score and margin."""
    winner = Counter(near[:voters]).most_common(1)[0][0]  # in the order in which they come first
    others = [similarity for code, similarity in zip(near, similarities, strict=True) if code != winner]
    score = similarities[near.index(winner)]
    return winner, score, score - others[0] if others else None


def _by_mean(searched: PointSet, codes: np.ndarray, asked: PointSet) -> Iterator[Decided]:
    manifold = searched.manifold
    order = torch.from_numpy(np.argsort(codes, kind="stable"))
    groups = order.split(np.bincount(codes).tolist())
    means = torch.stack([frechet_mean(manifold, searched.points_at(rows)) for rows in groups])
    gallery = Gallery(manifold, means.float())
    for block in asked.blocks(QUERY_ROWS):
        found = gallery.search(block, min(2, len(means)))
        for scores, best in zip((found.similarities + 0.0).tolist(), found.indices.tolist(), strict=True):
            yield best[0], scores[0], scores[0] - scores[1] if len(scores) > 1 else None


def _cells(answer: Answer, path: str, neighbors: list[Neighbor]) -> list[str]:
    near = [neighbor.item.path for neighbor in neighbors]
    margin = "" if answer.margin is None else f"{answer.margin:.9g}"
    return [path, answer.label, f"{answer.score:.9g}", margin, *near, *[""] * (NEAREST - len(near))]
