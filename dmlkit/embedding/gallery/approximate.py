"""Search a gallery through an approximate index: it names candidates, which the exact similarity orders."""

from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmlkit.embedding.bounded_vectors import CACHED_ELEMENTS
from dmlkit.embedding.gallery.damage import reading
from dmlkit.embedding.gallery.folder import GalleryFolder
from dmlkit.embedding.gallery.manifest import ApproximateIndex, GalleryManifest
from dmlkit.embedding.search import MARGIN, Neighbors, StoredGallery
from dmlkit.errors import UserError

ELEMENTS = 2**22  # float64 coordinates of candidates at once: 32 MB
AT_ONCE = 96  # queries, a fifth faster than 64; of 320 LanceDB 0.40 took 4 times as long, and twice did not come back


class ApproximateGallery:
    """A gallery with an approximate index.

    Args:
        folder: of the gallery.
        index: how to search it.
    """

    def __init__(self, folder: GalleryFolder, index: ApproximateIndex) -> None:
        self.folder, self.index = folder, index
        self.manifold = folder.manifold()
        self.exact = StoredGallery(self.manifold, folder)
        self.column, self.metric = column_and_metric(folder.manifest)
        self.advice = f"build it again with dmlkit gallery index {folder.path}, or search with --exact"
        addresses = folder.row_addresses()
        self.order = np.argsort(addresses)  # compacting may put later rows before earlier ones
        self.addresses = addresses[self.order]

    def search(self, queries: Tensor, k: int) -> Neighbors:
        """About the k most similar points of each query (Q, D), in their exact order.

        All are searched exactly where k is so large that every point would be a candidate.
        """
        length = ceil(self.index.candidates * (k + MARGIN))
        if length >= len(self.folder):
            return self.exact.search(queries, k)
        rows = max(1, ELEMENTS // (length * queries.shape[1]))
        found = [self._search(block, k, length) for block in queries.split(rows)]
        return Neighbors(*(torch.cat(one) for one in zip(*found, strict=True)))

    def _search(self, queries: Tensor, k: int, length: int) -> Neighbors:
        candidates = _side_by_side([self._candidates(block, length) for block in queries.split(AT_ONCE)])
        once, places = candidates.clamp(min=0).unique(return_inverse=True)
        points, similarity = self.folder.points_at(once), torch.empty(candidates.shape, dtype=torch.float64)
        rows = max(1, CACHED_ELEMENTS // (candidates.shape[1] * queries.shape[1]))
        for own in torch.arange(len(queries)).split(rows):
            similarity[own] = self.manifold.paired_similarity(queries[own, None].double(), points[places[own]].double())
        similarity[candidates < 0] = -torch.inf
        order = similarity.argsort(dim=1, descending=True, stable=True)[:, :k]
        found = Neighbors(similarity.gather(1, order).to(queries.dtype), candidates.gather(1, order))
        few = (found.indices < 0).any(dim=1)  # the parts of the index that were looked at hold fewer than k
        if few.any():
            exact = self.exact.search(queries[few], k)
            found.similarities[few], found.indices[few] = exact.similarities, exact.indices
        return found

    def _candidates(self, queries: Tensor, length: int) -> Tensor:
        """Rows (Q, length) in ascending order, after -1 where there are fewer."""
        vectors = queries if self.column == "point" else self.manifold.index_vectors(queries.double(), "query")
        search: Any = self.folder.table.search(vectors.float().numpy(), vector_column_name=self.column)
        search = search.distance_type(self.metric).nprobes(self.index.nprobes).limit(length).with_row_id(True)
        with reading(self.folder.path, "search the index of", self.advice):
            table = search.select(["_distance"]).to_arrow()
            addresses = table["_rowid"].to_numpy()
            places = np.searchsorted(self.addresses, addresses).clip(max=len(self.addresses) - 1)
            if (self.addresses[places] != addresses).any():
                raise ValueError("it names rows that are not there")
            # a search with one query does not number it
            asked = table["query_index"].to_numpy() if len(queries) > 1 else np.zeros(len(table), np.int64)
        rows = self.order[places]
        order = np.lexsort((rows, asked))
        rows, asked = rows[order], asked[order]
        counts = np.bincount(asked, minlength=len(queries))
        candidates = np.full((len(queries), max(length, counts.max(initial=0))), -1)
        places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        candidates[asked, candidates.shape[1] - counts[asked] + places] = rows
        return torch.from_numpy(candidates)


def _side_by_side(blocks: list[Tensor]) -> Tensor:
    """Candidates of all blocks of queries: the widest block's width, with -1 before those that are fewer."""
    width = max(block.shape[1] for block in blocks)
    return torch.cat([torch.nn.functional.pad(block, (width - block.shape[1], 0), value=-1) for block in blocks])


def column_and_metric(manifest: GalleryManifest) -> tuple[str, str]:
    """The column that an index is of, and LanceDB's distance, which orders it as the similarity does.

    Straight distances where there are any: by products LanceDB leaves parts of an index empty, and others too full.
    """
    match manifest.index.form:
        case "unit" | "unit_space":
            return "vector", "l2"
        case "euclidean_lift":
            return "point", "l2"
        case "as_is" if manifest.similarity != "dot":  # unit vectors
            return "vector", "l2"
        case _:
            return "vector", "dot"


def check_recall(recall: float) -> None:
    """Make sure that a recall can be asked for.

    Raises:
        UserError: it is not above 0 and at most 1.
    """
    if not 0 < recall <= 1:
        raise UserError(f"--recall {recall}: expected a share of the nearest, above 0 and at most 1")
