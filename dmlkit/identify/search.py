"""Nearest neighbors of images or points, also re-ranked by the neighbors of their neighbors: ``dmlkit search``."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from dmlkit.datasets.files.boxes import Boxes
from dmlkit.errors import UserError
from dmlkit.files.source import kind_of
from dmlkit.gallery.folder import KEPT, GalleryFolder, gallery_of
from dmlkit.gallery.sources import open_points, open_queries
from dmlkit.identify.answers import Answers
from dmlkit.metrics.ranking.rerank import (
    ExpandedGallery,
    Expansion,
    ReciprocalGallery,
    Rerank,
    RerankedGallery,
    check_rerank,
)
from dmlkit.nearest.rescore import CANDIDATES, RescoredSearch, Rescorer, match_scores
from dmlkit.nearest.search import QUERY_ROWS, Neighbors, StoredGallery
from dmlkit.vectors.fusion import OWN_MODEL, ModelChoice, with_local
from dmlkit.vectors.in_memory import features_of
from dmlkit.vectors.manifest import LocalFusion
from dmlkit.vectors.points import PointItem, PointSet, PointsInMemory, in_memory
from dmlkit.vectors.progress_bar import Bar, no_bar

if TYPE_CHECKING:
    from dmlkit.gallery.index import ApproximateGallery

KEPT_NUMBERS = 2**28  # of a gallery's features in memory, 0.5 GB; those of larger galleries are read for each block


class LocalMatches:
    """Matches of the local features that a gallery keeps, in the share of `LocalFusion`, for the nearest images."""

    def __init__(self, gallery: GalleryFolder, local: LocalFusion) -> None:
        self.gallery, self.local = gallery, local
        self.added = torch.empty(0, *local.shape, dtype=torch.float16)
        count = len(gallery) if len(gallery) * local.shape[0] * local.shape[1] <= KEPT_NUMBERS else 0
        self.kept, self.is_read = torch.empty(count, *local.shape, dtype=torch.float16), torch.zeros(count).bool()
        self.rescorer = Rescorer(match_scores(self.at), local.share, CANDIDATES, "matches")

    @classmethod
    def of(cls, opened: PointSet) -> "LocalMatches | None":
        """Return the matches that a gallery with local features compares; None for other points."""
        gallery = gallery_of(opened)
        return None if gallery is None or gallery.manifest.local is None else cls(gallery, gallery.manifest.local)

    def at(self, numbers: Tensor) -> Tensor:
        """Return the features (M, P, C) float16 of images; those of the gallery are read when they are needed."""
        stored = numbers < len(self.gallery)
        features = torch.empty(len(numbers), *self.local.shape, dtype=torch.float16)
        features[~stored] = self.added[numbers[~stored] - len(self.gallery)]
        rows = numbers[stored]
        if not len(self.kept):
            features[stored] = self.gallery.local_at(rows)
            return features
        missing = rows[~self.is_read[rows]].unique()
        if len(missing):
            self.kept[missing], self.is_read[missing] = self.gallery.local_at(missing), True
        features[stored] = self.kept[rows]
        return features

    def ask(self, asked: PointSet, model: ModelChoice, rows: Tensor | None = None, bar: Bar = no_bar) -> Tensor:
        """Add the images of queries, or those in ``rows`` (M,), and return their numbers."""
        chosen, local = torch.arange(len(asked)) if rows is None else rows, self.local
        if not len(chosen):
            return chosen
        gallery = gallery_of(asked)
        if gallery is not None and gallery.manifest.local == local:
            features = gallery.local_at(chosen)
        elif asked.images is None:
            raise UserError(
                f"{asked.source}: has no patches, which {self.gallery.source} compares; give the images themselves"
            )
        elif asked.images.local is not None:
            features = asked.images.local[chosen]
        else:
            trained = with_local(asked.images.trained, local, self.gallery.source)
            image_rows = asked.images.rows[chosen]
            features = features_of(local, trained, model.start(), asked.images.dataset, image_rows, bar)
        first = len(self.gallery) + len(self.added)
        self.added = torch.cat([self.added, features])
        return torch.arange(first, first + len(features))


RESCORED_ROWS = 256  # searched at once where matches are compared: 4 s, so that the bar moves
Method = Literal["index", "exact"] | Rerank
"""How neighbors are found, see `search`."""


def search(
    source: Path,
    queries: Path | Sequence[Path],
    *,
    k: int = 10,
    method: Method = "index",
    manifold: str | None = None,
    boxes: Boxes | None = None,
    model: ModelChoice = OWN_MODEL,
    bar: Bar = no_bar,
) -> Answers:
    """Find the k nearest neighbors of each query, in bounded memory.

    In a gallery with local features the 100 nearest images are ordered again by their matches, with the methods
    ``index`` and ``exact``.

    Args:
        k: neighbors per query; all points if there are fewer.
        method: ``index``: by the index of a gallery, or exactly if it has none; ``exact``; or a `Rerank`: rank the
            points once more for each query, exactly, see `reranked_gallery`.
        boxes: boxes of the queries, each of which is one, see `images_at`; and conditions on what is searched.
    """
    if k < 1:
        raise UserError(f"-k {k}: expected at least 1 neighbor")
    searched = open_searched(source, model, bar, manifold=manifold, where=boxes and boxes.where)
    second = LocalMatches.of(searched) if isinstance(method, str) else None
    query_points = open_queries(queries, searched, boxes=boxes, local=isinstance(method, str), model=model, bar=bar)
    reranked = reranked_gallery(searched, method, bar) if isinstance(method, Rerank) else None
    exact, rescored, numbers = method == "exact", None, None
    if second is not None:
        numbers = second.ask(query_points, model, bar=bar)
        base, gallery_numbers = searcher_of(searched, exact=exact), torch.arange(len(searched))
        rescored = RescoredSearch(base, searched.manifold, second.rescorer, gallery_numbers)
    return nearest(
        searched, query_points, k, exact=exact, reranked=reranked, rescored=rescored, numbers=numbers, bar=bar
    )


def open_searched(source: Path, model: ModelChoice, bar: Bar, **options: Any) -> PointSet:
    """Open what to search in, see `open_points`; the second model and the device apply to a run."""
    choice = ModelChoice(fusion=model.fusion, device=model.device) if kind_of(source) == "run" else OWN_MODEL
    return open_points(source, model=choice, bar=bar, **options)


@torch.no_grad()  # the curvature of a manifold may be learned
def reranked_gallery(searched: PointSet, method: Rerank, bar: Bar = no_bar) -> RerankedGallery:
    """Return points, all in memory, that are re-ranked for each query, exactly."""
    try:
        check_rerank(method, len(searched))
    except ValueError as error:
        raise UserError(f"--rerank: {error}") from None
    points = in_memory(searched).points
    if isinstance(method, Expansion):
        return ExpandedGallery(searched.manifold, points, method)
    with bar("comparing the gallery with itself", len(points)) as advance:
        return ReciprocalGallery(searched.manifold, points, method, advance)


def nearest(
    searched: PointSet,
    asked: PointSet,
    k: int,
    *,
    exact: bool = False,
    reranked: RerankedGallery | None = None,
    rescored: RescoredSearch | None = None,
    numbers: Tensor | None = None,
    bar: Bar = no_bar,
) -> Answers:
    """Return the k nearest neighbors of each query, see `search`.

    With ``rescored`` the second similarity counts too, for which the queries' images have the ``numbers`` (Q,).
    """
    base = reranked or (rescored.base if rescored else searcher_of(searched, exact=exact))
    k, start, blocks = min(k, len(searched)), 0, list[Neighbors]()
    with bar("searching", len(asked)) as advance:
        for block in asked.blocks(QUERY_ROWS if rescored is None else RESCORED_ROWS):
            own = None if numbers is None else numbers[start : start + len(block)]
            blocks.append(base.search(block, k) if rescored is None or own is None else rescored.search(block, k, own))
            start += len(block)
            advance(len(block))
    neighbors, gallery = Neighbors.joined(blocks, k), gallery_of(searched)
    return Answers(
        searched,
        asked.paths,
        neighbors.similarities,
        neighbors.indices,
        [*dict.fromkeys((*searched.skipped, *asked.skipped))],  # a source may be searched for its own images
        asked.paths,
        asked.boxes,
        (reranked or rescored or searched.manifold).similarity_name,
        None if gallery is None or exact or reranked is not None else gallery.approximate,
        None if reranked is None else reranked.options,
    )


@dataclass(frozen=True)
class SearchedOften(PointsInMemory):
    """Points in memory that keep what a search computes of all of them."""

    ids: Sequence[str | int] = ()

    def items_at(self, rows: Tensor) -> list[PointItem]:
        indices = map(int, rows)
        return [PointItem(self.ids[row], self.labels[row], self.paths[row], box=self.boxes[row]) for row in indices]

    @cached_property
    def searcher(self) -> "StoredGallery | ApproximateGallery":
        """Search of these points, through the index of the gallery that they were read from, if it has one."""
        return _indexed(self, self) or StoredGallery(self.manifold, self, keeps_vectors=True)


def searcher_of(searched: PointSet, *, exact: bool = False) -> "StoredGallery | ApproximateGallery":
    """Return the search: through the index of a gallery that has one, unless it shall be exact."""
    if isinstance(searched, SearchedOften):
        return searched.searcher
    is_small = 4 * len(searched) * searched.manifold.point_dim <= KEPT
    indexed = None if exact else _indexed(searched)
    return indexed or StoredGallery(searched.manifold, searched, keeps_vectors=is_small)


def _indexed(searched: PointSet, points: PointsInMemory | None = None) -> "ApproximateGallery | None":
    gallery = gallery_of(searched)
    if gallery is None or not gallery.approximate:
        return None
    from dmlkit.gallery.index import ApproximateGallery  # with all that changes a gallery

    return ApproximateGallery(gallery, gallery.approximate, points)
