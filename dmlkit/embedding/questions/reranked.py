"""Search that ranks a gallery once more for each query, by the neighbors of its neighbors."""

from typing import Literal

import torch
from torch import Tensor

from dmlkit.embedding.points import PointSet, all_points
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.search import Gallery, Neighbors
from dmlkit.errors import UserError
from dmlkit.metrics.ranking.rerank import (
    BLOCK_ENTRIES,
    ExpandedGallery,
    KReciprocal,
    ReciprocalGallery,
    Rerank,
    check_rerank,
)

NOTE = "re-ranking looks at the gallery as a whole, and at no other query"


class RerankedGallery:
    """Points that are re-ranked for each query, exactly; no query affects the neighbors of another.

    Similarities are those of the averaged points for `Expansion`, and one minus the final distance, from 0 to 1, for
    `KReciprocal`. All points are in memory.

    Args:
        searched: the points.
        method: how they are re-ranked.
        bar: shows the comparison of the points with each other.

    Raises:
        UserError: there are too few points for the options, or an option is out of its range.
    """

    def __init__(self, searched: PointSet, method: Rerank, bar: Bar = no_bar) -> None:
        self.method, self.size = method, len(searched)
        try:
            check_rerank(method, self.size)
        except ValueError as error:
            raise UserError(f"--rerank: {error}") from None
        manifold, points = searched.manifold, all_points(searched)
        with torch.no_grad():
            if isinstance(method, KReciprocal):
                with bar("comparing the gallery with itself", self.size) as advance:
                    self.reciprocal = ReciprocalGallery(manifold, points, method, advance)
                self.similarity_name = "k_reciprocal_similarity"
            else:
                self.expanded = ExpandedGallery(manifold, points, method)
                self.gallery = Gallery(manifold, self.expanded.points)
                self.similarity_name = manifold.similarity_name

    @property
    def name(self) -> Literal["k_reciprocal", "expansion"]:
        """Name of the method in options and files."""
        return "k_reciprocal" if isinstance(self.method, KReciprocal) else "expansion"

    @torch.no_grad()
    def search(self, queries: Tensor, k: int) -> Neighbors:
        """Return the k most similar points of each query (Q, D); of equally similar ones the lower index first."""
        if not isinstance(self.method, KReciprocal):
            return self.gallery.search(self.expanded.expanded(queries), k)
        found = [Neighbors(torch.empty(0, k), torch.empty(0, k, dtype=torch.int64))]
        for part in queries.split(max(1, BLOCK_ENTRIES // self.size)):
            scores, rows = self.reciprocal.scores(part).sort(dim=1, descending=True, stable=True)
            found.append(Neighbors(1 + scores[:, :k], rows[:, :k]))
        return Neighbors(*(torch.cat(column) for column in zip(*found, strict=True)))
