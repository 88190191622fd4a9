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
from dmlkit.gallery.folder import KEPT, gallery_of
from dmlkit.gallery.sources import open_points, open_queries
from dmlkit.identify.answers import Answers
from dmlkit.identify.second import LocalMatches
from dmlkit.metrics.ranking.rerank import (
    ExpandedGallery,
    Expansion,
    ReciprocalGallery,
    Rerank,
    RerankedGallery,
    check_rerank,
)
from dmlkit.nearest.rescore import RescoredSearch
from dmlkit.nearest.search import QUERY_ROWS, Neighbors, StoredGallery
from dmlkit.vectors.fusion import OWN_MODEL, ModelChoice
from dmlkit.vectors.points import PointItem, PointSet, PointsInMemory, in_memory
from dmlkit.vectors.progress_bar import Bar, no_bar

if TYPE_CHECKING:
    from dmlkit.gallery.index import ApproximateGallery

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
    asked = open_queries(queries, searched, boxes=boxes, local=isinstance(method, str), model=model, bar=bar)
    reranked = reranked_gallery(searched, method, bar) if isinstance(method, Rerank) else None
    exact, rescored, numbers = method == "exact", None, None
    if second is not None:
        numbers = second.ask(asked, model, bar=bar)
        base, own = searcher_of(searched, exact=exact), torch.arange(len(searched))
        rescored = RescoredSearch(base, searched.manifold, second.rescorer, own)
    return nearest(searched, asked, k, exact=exact, reranked=reranked, rescored=rescored, numbers=numbers, bar=bar)


def open_searched(source: Path, model: ModelChoice, bar: Bar, **options: Any) -> PointSet:
    """Open what to search in, see `open_points`; the second model and the device apply to a run."""
    own = ModelChoice(fusion=model.fusion, device=model.device) if kind_of(source) == "run" else OWN_MODEL
    return open_points(source, model=own, bar=bar, **options)


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
        asked.skipped,
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
        places = map(int, rows)
        return [PointItem(self.ids[row], self.labels[row], self.paths[row], box=self.boxes[row]) for row in places]

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
