"""Re-ranking by the neighbors of neighbors: k-reciprocal encoding, and query expansion with database augmentation.

Both look at the gallery as a whole, and at no other query. Memory holds a block of rows and the sparse sets of
neighbors.
"""

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from dmlkit.manifolds.base import Manifold
from dmlkit.nearest.search import Gallery, Neighbors

BLOCK_ENTRIES = 2**24  # similarities at once: 64 MB in float32


class KReciprocal(NamedTuple):
    """Options of `k_reciprocal`, with the defaults of the paper."""

    name = "k_reciprocal"
    k1: int = 20
    """Neighbors of each image."""
    k2: int = 6
    """Nearest images, itself included, over which its set is averaged."""
    weight: float = 0.3
    """Weight of the original distance, in (0, 1]."""


class Expansion(NamedTuple):
    """Options of the expansion of queries."""

    name = "expansion"
    n: int = 5
    """Nearest images with which each one is averaged."""
    alpha: float = 3.0
    """Power of the similarity that weights them."""


Rerank = KReciprocal | Expansion
METHODS: dict[str, type[KReciprocal] | type[Expansion]] = {method.name: method for method in (KReciprocal, Expansion)}


def parse_rerank(text: str) -> Rerank:
    """Read a method with its options.

    Example:
        >>> parse_rerank("k_reciprocal"), parse_rerank("expansion:n=3,alpha=2")
        (KReciprocal(k1=20, k2=6, weight=0.3), Expansion(n=3, alpha=2.0))
    """
    name, _, options = text.partition(":")
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; expected {' or '.join(METHODS)}")
    method, values = METHODS[name], dict[str, Any]()
    for option in options.split(",") if options else ():
        key, _, value = option.partition("=")
        if key not in method._fields:
            suggestion = "".join(f"; did you mean {match!r}?" for match in get_close_matches(key, method._fields, n=1))
            raise ValueError(f"{name} has no option {key!r}{suggestion}; its options: {', '.join(method._fields)}")
        if key in values:
            raise ValueError(f"{key}: given twice; give it once")
        try:
            values[key] = type(method._field_defaults[key])(value)
        except ValueError:
            kind = "a whole number" if isinstance(method._field_defaults[key], int) else "a number"
            raise ValueError(f"{key}: expected {kind}, got {value!r}") from None
    return method(**values)


def check_rerank(rerank: Rerank, images: int) -> None:
    """Check options against the number of images."""
    largest = images - 1
    name, count = ("k1", rerank.k1) if isinstance(rerank, KReciprocal) else ("n", rerank.n)
    if not 1 <= count <= largest:
        raise ValueError(f"{name}: expected 1 to {largest}, since there are {images} images to search in; got {count}")
    if isinstance(rerank, Expansion):
        if not 0 <= rerank.alpha < inf:
            raise ValueError(f"alpha: expected a number of at least 0, got {rerank.alpha:g}")
        return
    if not 1 <= rerank.k2 <= rerank.k1 + 1:
        raise ValueError(f"k2: expected 1 to {rerank.k1 + 1}, k1 neighbors and the image itself; got {rerank.k2}")
    if not 0 < rerank.weight <= 1:
        raise ValueError(f"weight: expected more than 0 and at most 1, got {rerank.weight:g}")


class ReciprocalGallery:
    r"""Gallery that re-ranks its images for each query by k-reciprocal encoding (Zhong et al. 2017, arXiv:1701.08398).

    Each of the N images is described by weights on all of them: :math:`V_{ij} = e^{-d(i, j)}` for the images of the
    expanded k-reciprocal set :math:`R^*(i, k_1)` (eq. 3-5), which contains i itself, averaged over the :math:`k_2`
    nearest images (eq. 11). The final distance (eq. 10, 12) is

    .. math:: (1 - \lambda) \left( 1 - \frac{\sum_j \min(V_{qj}, V_{gj})}{\sum_j \max(V_{qj}, V_{gj})} \right)
              + \lambda d(q, g).

    As in the authors' code, distances are in units of an image's largest, so that they fit any manifold:
    d(i, j) = (max s_i - s_ij) / (max s_i - min s_i), with the similarities s_i of image i to all.

    The weights of the gallery's images are those of the gallery alone, so that they are computed once, and no query
    affects another. A query q has an image g in its set :math:`R(q, k_1)` if g is among its :math:`k_1` nearest, and q
    is at least as similar to g as the :math:`k_1`-th nearest image of the gallery is.
    """

    def __init__(
        self, manifold: Manifold, gallery: Tensor, options: KReciprocal, advance: Callable[[int], None] = lambda _: None
    ) -> None:
        check_rerank(options, len(gallery))
        self.manifold, self.points, self.options = manifold, gallery, options
        self.neighbors = _Neighbors(manifold, gallery, options.k1, advance)
        self.sets = self.neighbors.sets()
        self.similarity_name = "k_reciprocal_similarity"  # one minus the final distance, from 0 to 1
        lists, k2 = self.neighbors.lists, options.k2  # an image's own set and those of its nearest
        self.averaged = self.sets if k2 == 1 else _selection(lists[:, :k2], len(lists)) @ self.sets / k2
        self.targets = _Targets(self.averaged)

    def own_scores(self, rows: Tensor) -> Tensor:
        """Return minus the final distances (n, N) in [-1, 0] of the gallery's own images, given their rows (n,)."""
        similarity = self.manifold.exact_similarity(self.points[rows], self.points)
        scale = self.neighbors.largest[rows], self.neighbors.smallest[rows]
        return self.targets.scores(similarity, self.averaged[rows.numpy()], *scale, self.options.weight)

    @torch.no_grad()
    def search(self, queries: Tensor, k: int) -> Neighbors:
        """Return the k most similar points of each query (Q, D); of equally similar ones the lower index first."""
        blocks: list[Neighbors] = []
        for part in queries.split(max(1, BLOCK_ENTRIES // len(self.points))):
            scores, rows = self.scores(part).sort(dim=1, descending=True, stable=True)
            blocks.append(Neighbors(1 + scores[:, :k], rows[:, :k]))
        return Neighbors.joined(blocks, k)

    def scores(self, queries: Tensor) -> Tensor:
        """Return minus the final distances (Q, N) in [-1, 0] of queries (Q, D)."""
        scores = queries.new_empty(len(queries), len(self.points))
        k1, k2, weight = self.options
        for start, similarity in _similarities(self.manifold, queries, self.points):
            part = queries[start : start + len(similarity)]
            values, nearest = similarity.topk(k1, 1)
            largest = torch.maximum(values[:, 0], self.manifold.paired_similarity(part, part))
            smallest = similarity.amin(1)
            in_set = self.neighbors.expanded(nearest, values >= self.neighbors.limits[nearest])
            sets = _weighted(self.manifold, part, self.points, in_set, largest, smallest)
            if k2 > 1:  # the query itself and its k2 - 1 nearest
                sets = (sets + _selection(nearest[:, : k2 - 1], len(self.points)) @ self.sets) / k2
            scores[start : start + len(part)] = self.targets.scores(similarity, sets.tocsr(), largest, smallest, weight)
        return scores


class ExpandedGallery:
    """Gallery whose images are averaged with their nearest ones, as are the queries.

    Query expansion with the weights of Radenović et al. (2018, arXiv:1711.02512, section 3.3), and the same for the
    images of the gallery, database augmentation (Arandjelović & Zisserman 2012): an image counts 1, and each of its n
    nearest others of the gallery s^alpha, with s the cosine, at least 0, or e^-d on manifolds with distances. The
    average is taken of features, see `Manifold.to_features`, which on the sphere gives the direction of the weighted
    sum.
    """

    def __init__(self, manifold: Manifold, gallery: Tensor, options: Expansion) -> None:
        check_rerank(options, len(gallery))
        self.manifold, self.original, self.options = manifold, gallery, options
        self.points = _with_nearest(manifold, gallery, gallery, options, own=True)
        self.similarity_name = manifold.similarity_name

    @cached_property
    def _searched(self) -> Gallery:
        return Gallery(self.manifold, self.points)

    @torch.no_grad()
    def search(self, queries: Tensor, k: int) -> Neighbors:
        """Return the k most similar new points of each query (Q, D), by the similarity of its new point."""
        return self._searched.search(self.expanded(queries), k)

    def expanded(self, queries: Tensor) -> Tensor:
        """Return the new points (Q, D) of queries (Q, D), to be compared with ``points``."""
        return _with_nearest(self.manifold, queries, self.original, self.options)


RerankedGallery = ReciprocalGallery | ExpandedGallery


def _with_nearest(
    manifold: Manifold, points: Tensor, items: Tensor, options: Expansion, *, own: bool = False
) -> Tensor:
    """Average points with their nearest items; ``own`` if they are the items, each of which is not its own nearest."""
    new_points = [points[:0]]
    for start, similarity in _similarities(manifold, points, items):
        rows = torch.arange(start, start + len(similarity))
        if own:
            similarity[torch.arange(len(rows)), rows] = -torch.inf
        values, nearest = similarity.topk(options.n, 1)
        kernel = _kernel(manifold, points[rows, None], items[nearest], values)
        weights = torch.cat([torch.ones_like(values[:, :1]), kernel**options.alpha], 1)
        features = manifold.to_features(torch.cat([points[rows, None], items[nearest]], 1))
        mean = (weights[..., None] * features).sum(1) / weights.sum(1, keepdim=True)
        new_points.append(manifold.from_features(mean))
    return torch.cat(new_points)


def _kernel(manifold: Manifold, points: Tensor, items: Tensor, similarity: Tensor) -> Tensor:
    """Return e^-d, or the cosine, at least 0, of points (n, 1, D) and items (n, k, D), given their similarity."""
    match manifold.similarity_name:
        case "negative_distance":
            return similarity.exp()
        case "dot":
            return cosine_similarity(points, items, dim=2).clamp(0, 1)
        case name if name.startswith("negative"):  # of a square or a chord
            return (-manifold.paired_distance(points, items)).exp()
        case _:
            return similarity.clamp(0, 1)  # that of copies may round to more, whose high powers are infinite


def _similarities(manifold: Manifold, points: Tensor, items: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield blocks of the similarities (n, N) of points to items, each with its first row."""
    rows = max(1, BLOCK_ENTRIES // len(items))
    for start in range(0, len(points), rows):
        yield start, manifold.exact_similarity(points[start : start + rows], items)


class _Neighbors:
    """The nearest images of each of P images, ``lists`` (P, k1 + 1) of itself and its k1 nearest.

    ``limits`` (P,) are the similarities of the k1-th nearest, ``largest`` and ``smallest`` the extremes over all
    images, itself included.
    """

    def __init__(
        self, manifold: Manifold, pool: Tensor, k1: int, advance: Callable[[int], None] = lambda _: None
    ) -> None:
        self.manifold, self.pool = manifold, pool
        self.lists = torch.empty(len(pool), k1 + 1, dtype=torch.int64)
        self.limits, self.largest, self.smallest = (pool.new_empty(len(pool)) for _ in range(3))
        for start, similarity in _similarities(manifold, pool, pool):
            rows = torch.arange(start, start + len(similarity))
            diagonal = torch.arange(len(rows)), rows
            self_similarity, self.smallest[rows] = similarity[diagonal], similarity.amin(1)
            similarity[diagonal] = torch.inf  # itself first, also among copies
            values, self.lists[rows] = similarity.topk(k1 + 1, 1)
            self.largest[rows], self.limits[rows] = torch.maximum(self_similarity, values[:, 1]), values[:, -1]
            advance(len(rows))
        self.half = self.lists[:, : (k1 + 1) // 2 + 1]  # k1 / 2, rounded up, and the image itself
        self.half_mutual = self._mutual(self.half)

    def _mutual(self, lists: Tensor) -> Tensor:
        """Return whether an image is in the list of each image of its own list, (P, k)."""
        blocks = torch.arange(len(lists)).split(max(1, BLOCK_ENTRIES // len(lists)))
        return torch.cat([(lists[lists[block]] == block[:, None, None]).any(2) for block in blocks])

    def expanded(self, nearest: Tensor, mutual: Tensor) -> Tensor:
        """Return the expanded k-reciprocal sets (n, P) bool of images from their nearest, and which are mutual."""
        in_set = torch.zeros(len(nearest), len(self.pool), dtype=torch.bool)
        in_set[mutual.nonzero()[:, 0], nearest[mutual]] = True
        members, present = self.half[nearest], self.half_mutual[nearest]  # (n, k1, k1 / 2 + 1)
        row = torch.arange(len(nearest))[:, None, None].expand_as(members)
        shared = (in_set[row, members] & present).sum(2)
        joins = mutual & (3 * shared >= 2 * present.sum(2))
        added = joins[:, :, None] & present
        in_set[row[added], members[added]] = True
        return in_set

    def sets(self) -> Any:
        """Return the weights V of every image on those of its expanded k-reciprocal set, sparse (P, P), float64."""
        from scipy.sparse import csr_array, vstack

        mutual, parts = self._mutual(self.lists), list[Any]()
        for block in torch.arange(len(self.pool)).split(max(1, BLOCK_ENTRIES // len(self.pool))):
            in_set = self.expanded(self.lists[block], mutual[block])
            scale = self.largest[block], self.smallest[block]
            parts.append(_weighted(self.manifold, self.pool[block], self.pool, in_set, *scale))
        return csr_array(vstack(parts))


def _weighted(
    manifold: Manifold, points: Tensor, pool: Tensor, in_set: Tensor, largest: Tensor, smallest: Tensor
) -> Any:
    """Return the weights e^-d of points (n, D) on their sets (n, P) bool, sparse (n, P), float64."""
    from scipy.sparse import csr_array

    # NumPy finds the ones of a flat array in a tenth of torch's time, which is a tenth of a search
    row, column = map(torch.from_numpy, divmod(in_set.numpy().ravel().nonzero()[0], in_set.shape[1]))
    weights = [torch.empty(0, dtype=torch.float64)]
    for part in torch.arange(len(row)).split(2**13):  # 32 MB of float64 coordinates at 512 dimensions
        first, second = row[part], column[part]
        similarity = manifold.paired_similarity(points[first], pool[second])
        apart = (largest[first] - similarity) / _spread(largest[first], smallest[first])  # in units of the largest
        weights.append((-apart.clamp(0, 1)).exp().double())
    return csr_array((torch.cat(weights).numpy(), (row.numpy(), column.numpy())), tuple(in_set.shape))


def _spread(largest: Tensor, smallest: Tensor) -> Tensor:
    """Return by how much similarities differ at most; the smallest positive number where all are equal."""
    return (largest - smallest).clamp(min=torch.finfo(largest.dtype).tiny)


def _selection(rows: Tensor, size: int) -> Any:
    """Return the matrix (n, size), sparse, with a one in each of the columns (n, k) of a row."""
    from scipy.sparse import csr_array

    ones = torch.ones(rows.numel(), dtype=torch.float64).numpy()
    return csr_array(
        (ones, rows.flatten().numpy(), torch.arange(len(rows) + 1).mul(rows.shape[1]).numpy()), (len(rows), size)
    )


class _Targets:
    """Weights (N, P) of the images of a gallery, by column, to be compared with those of queries."""

    def __init__(self, sets: Any) -> None:
        columns = sets.tocsc()
        self.starts, self.rows, self.weights = columns.indptr, columns.indices.astype(np.intp), columns.data
        self.sums = sets.sum(1)

    def scores(self, similarity: Tensor, sets: Any, largest: Tensor, smallest: Tensor, weight: float) -> Tensor:
        """Return minus the final distances (n, N) of queries, from their similarities and weights (n, P).

        The similarities are overwritten, row by row: a row of 60 000 stays in the cache, where the passes over it take
        a tenth of the time of passes over a block of rows.
        """
        slopes = weight / _spread(largest, smallest)
        offsets = largest + (1 - weight) / slopes
        columns = (similarity.numpy(), offsets.tolist(), slopes.tolist(), sets.sum(1).tolist())
        sums = self.sums.astype(columns[0].dtype)
        for row, (values, offset, slope, total) in enumerate(zip(*columns, strict=True)):
            values -= offset
            values *= slope
            np.clip(values, -1, weight - 1, out=values)
            entries = slice(sets.indptr[row], sets.indptr[row + 1])
            intersection = self._shared(sets.indices[entries], sets.data[entries]).astype(values.dtype)
            union = sums - intersection  # of all images, also those that share nothing: to find the others takes longer
            union += total
            intersection *= 1 - weight
            intersection /= union
            values += intersection
        return similarity

    def _shared(self, columns: Any, weights: Any) -> Any:
        """Compute the sum of the minima of weights on columns and of those of each image, (N,)."""
        starts = self.starts.take(columns)
        counts = self.starts.take(columns + 1) - starts
        entries = np.repeat(starts + counts - counts.cumsum(), counts) + np.arange(counts.sum())
        minima = np.minimum(self.weights.take(entries), np.repeat(weights, counts))  # take: half the time of []
        return np.bincount(self.rows.take(entries), minima, minlength=len(self.sums))
