"""Labels that a gallery gives to images, and groups of images that are too alike to have two labels."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import BaseModel
from torch import Tensor

from dmlkit.errors import UserError, counted, merged, warn
from dmlkit.files.document import Document
from dmlkit.files.escape import command_word
from dmlkit.files.image_file import BadImageError
from dmlkit.files.labels import UNKNOWN
from dmlkit.gallery.images import ID_LENGTH, LabelledImage
from dmlkit.gallery.sources import open_queries
from dmlkit.identify.identify import Identifier
from dmlkit.identify.search import LocalMatches, open_searched
from dmlkit.metrics.reliability import Share
from dmlkit.nearest.near_pairs import complete_groups, near_pairs
from dmlkit.vectors.fusion import ModelChoice
from dmlkit.vectors.points import PointSet, PointsInMemory, in_memory
from dmlkit.vectors.progress_bar import Bar, no_bar

SAMPLE = 2000  # images of a gallery whose pairs are compared: 4 million similarities, 16 MB
LOOSE = 0.001  # share of pairs of two labels that are as similar as two unknown images of one group


class ProposedLabel(BaseModel, frozen=True, extra="forbid"):
    """Label that the gallery gives to an image."""

    path: str
    label: str | None
    """Null if the image is unknown to the gallery."""
    probability: Share
    """Probability that the label is right; 0 for an unknown image."""
    id: str = ""
    """Hash of the contents of the file."""
    group: int | None = None
    """Number of a group of images that are too alike to have two labels; null for an image that resembles no other."""
    nearest: tuple[str, ...] = ()
    """Ids of the nearest images of the gallery."""


class Review(Document, frozen=True):
    """What a review asks about. Its answers are in the `Journal` next to it."""

    kind: ClassVar[str] = "review"

    gallery: str
    images: str
    wrong: Share
    """Share of wrong labels to reach."""
    audit: Share
    """Share of the questions that are drawn uniformly."""
    error: Share = 0.05
    names: tuple[str, ...]
    """Labels of the gallery when the review began."""
    proposals: tuple[ProposedLabel, ...]
    """Images with a label first, then unknown ones."""

    @cached_property
    def labels(self) -> int:
        """Number of images that the gallery gives a label."""
        return sum(proposal.label is not None for proposal in self.proposals)

    @cached_property
    def members(self) -> dict[int, list[int]]:
        """Rows of each group."""
        rows: defaultdict[int, list[int]] = defaultdict(list)
        for row, proposal in enumerate(self.proposals):
            if proposal.group is not None:
                rows[proposal.group].append(row)
        return dict(rows)


def propose(
    gallery: Path, images: Path, wrong: float, audit: float, *, model: ModelChoice, bar: Bar = no_bar
) -> Review:
    """Label images with a gallery, and group those that are too alike to have two labels.

    Two images with a label, or two with the same contents, are in one group of complete linkage if they are more alike
    than any two images of the gallery with different labels. Two unknown images are in one group if they are as alike
    as one in a thousand of such pairs.
    """
    searched = open_searched(gallery, model, bar)
    matches = LocalMatches.of(searched)
    queries = open_queries(images, searched, local=True, model=model, bar=bar)
    if any(queries.boxes):
        raise UserError(
            f"{images}: has boxes of images, and a review asks about whole images; write each box into a file of its "
            f"own, or label them with dmlkit identify {command_word(gallery)}"
        )
    for path, count in Counter(queries.paths).most_common(1):
        if count > 1:
            raise UserError(f"{images}: has {path} {count} times, and an answer names an image by its path; keep one")
    identifier = Identifier(searched, second=matches)
    numbers = None if matches is None else matches.ask(queries, model, bar=bar)
    identified = identifier.answers(queries, [None] * len(queries), numbers=numbers)
    for line in (*merged(identified.neighbors.skipped), *filter(None, [identified.note])):
        warn(line)
    if identified.in_source:
        themselves = counted(identified.in_source, "of these images is", "of these images are")
        warn(f"{images}: {themselves} in {gallery}, and found there: their labels are its own")
    answers = list(enumerate(identified.answers))
    rows = [row for row, answer in answers if answer.label != UNKNOWN and answer.probability is not None]
    if not rows:
        raise UserError(
            f"{images}: no image gets a label with a probability from {gallery}; expected at least 10 labeled images "
            f"whose label others have, and a threshold that some of these images reach; see dmlkit calibrate "
            f"{command_word(gallery)}"
        )
    unknown = [row for row, answer in answers if answer.label == UNKNOWN]
    closest, close = pair_thresholds(identifier.searched)
    points = in_memory(queries)
    groups = [[rows[position] for position in group] for group in _groups(points, rows, closest)]
    groups += [[unknown[position] for position in group] for group in _groups(points, unknown, close)]
    group_of = {row: number for number, group in enumerate(groups) for row in group}
    labels = {row: identified.answers[row].label for row in rows}
    neighbors = list(identified.neighbors.neighbors())
    proposals = tuple(
        ProposedLabel(
            path=neighbors[row][0],
            label=labels.get(row),
            probability=(identified.answers[row].probability or 0.0) if row in labels else 0.0,
            id=content_id(neighbors[row][0]),
            group=group_of.get(row),
            nearest=tuple(str(neighbor.item.id) for neighbor in neighbors[row][1]),
        )
        for row in rows + unknown
    )
    names = tuple(identifier.names)
    return Review(gallery=str(gallery), images=str(images), wrong=wrong, audit=audit, names=names, proposals=proposals)


def pair_thresholds(searched: PointSet) -> tuple[float, float]:
    """Return the largest similarity of two images of a source with different labels, and that of one in a thousand.

    At most `SAMPLE` images are drawn. Both are infinite if there is one label.
    """
    points = in_memory(searched)
    rows = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:SAMPLE]
    codes, drawn = points.class_codes()[1][rows], points.points[rows]
    similarities: list[Tensor] = []
    for start, block in enumerate(drawn.split(256)):
        others = codes[start * 256 : start * 256 + len(block), None] != codes[None]
        similarities.append(points.manifold.exact_similarity(block, drawn)[others])
    between = torch.cat(similarities).sort(descending=True).values
    if not len(between):
        return float("inf"), float("inf")
    return float(between[0]) + 1e-6, float(between[int(LOOSE * len(between))])


def _groups(points: PointsInMemory, rows: Sequence[int], threshold: float) -> list[list[int]]:
    """Return the groups of at least two of some rows, as positions in these rows."""
    if len(rows) < 2 or threshold == float("inf"):
        return []
    pairs = near_pairs(points.manifold, points.points[torch.tensor(rows)], None, threshold)
    return [group.tolist() for group in complete_groups(pairs, len(rows)) if len(group) > 1]


def content_id(path: str) -> str:
    """Return the id of an image, or of its name if it is no file."""
    try:
        return LabelledImage(path, None).id()
    except BadImageError:
        return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:ID_LENGTH]
