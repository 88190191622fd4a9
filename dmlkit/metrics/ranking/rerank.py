"""Re-ranking by the neighbors of neighbors: k-reciprocal encoding, and query expansion with database augmentation.

Both look at the gallery as a whole, and k-reciprocal encoding also at the other queries: their metrics are not those of
queries that come one by one. Memory holds a block of rows and the sparse sets of neighbors.
"""

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold

BLOCK_ENTRIES = 2**23  # similarities at once: 32 MB in float32


class KReciprocal(NamedTuple):
    """Options of `k_reciprocal`, with the defaults of the paper."""

    k1: int = 20
    """Neighbors of each image."""
    k2: int = 6
    """Nearest images, itself included, over which its set is averaged."""
    weight: float = 0.3
    """Weight of the original distance, in (0, 1]."""


class Expansion(NamedTuple):
    """Options of `expand`."""

    n: int = 5
    """Nearest images with which each one is averaged."""
    alpha: float = 3.0
    """Power of the similarity that weights them."""


Rerank = KReciprocal | Expansion
METHODS: dict[str, type[KReciprocal] | type[Expansion]] = {"k_reciprocal": KReciprocal, "expansion": Expansion}


def parse_rerank(text: str) -> Rerank:
    """Read a method with its options.

    Raises:
        ValueError: the method or an option is unknown, or a value is not a number.

    Example:
        >>> parse_rerank("k_reciprocal"), parse_rerank("expansion:n=3,alpha=2")
        (KReciprocal(k1=20, k2=6, weight=0.3), Expansion(n=3, alpha=2.0))
    """
    name, _, given = text.partition(":")
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; expected {' or '.join(METHODS)}")
    method, values = METHODS[name], dict[str, Any]()
    for option in given.split(",") if given else ():
        key, _, value = option.partition("=")
        if key not in method._fields:
            near = "".join(f"; did you mean {one!r}?" for one in get_close_matches(key, method._fields, n=1))
            raise ValueError(f"{name} has no option {key!r}{near}; its options: {', '.join(method._fields)}")
        try:
            values[key] = type(method._field_defaults[key])(value)
        except ValueError:
            kind = "a whole number" if isinstance(method._field_defaults[key], int) else "a number"
            raise ValueError(f"{key}: expected {kind}, got {value!r}") from None
    return method(**values)


def check_rerank(rerank: Rerank, images: int) -> None:
    """Check options against the number of images.

    Raises:
        ValueError: an option is out of its range.

    Example:
        >>> check_rerank(KReciprocal(k1=20), 15)
        Traceback (most recent call last):
        ...
        ValueError: k1: expected 1 to 14, since there are 15 images to search in; got 20
    """
    largest = images - 1
    name, count = ("k1", rerank.k1) if isinstance(rerank, KReciprocal) else ("n", rerank.n)
    if not 1 <= count <= largest:
        raise ValueError(f"{name}: expected 1 to {largest}, since there are {images} images to search in; got {count}")
    if isinstance(rerank, Expansion):
        if not rerank.alpha >= 0:
            raise ValueError(f"alpha: expected at least 0, got {rerank.alpha:g}")
        return
    if not 1 <= rerank.k2 <= rerank.k1 + 1:
        raise ValueError(f"k2: expected 1 to {rerank.k1 + 1}, k1 neighbors and the image itself; got {rerank.k2}")
    if not 0 < rerank.weight <= 1:
        raise ValueError(f"weight: expected more than 0 and at most 1, got {rerank.weight:g}")


def k_reciprocal(
    manifold: Manifold, queries: Tensor, gallery: Tensor | None, options: KReciprocal
) -> Callable[[Tensor], Any]:
    r"""Prepare re-ranking by k-reciprocal encoding (Zhong et al. 2017, arXiv:1701.08398).

    Each of the P images, queries and gallery, is described by weights on all of them: :math:`V_{ij} = e^{-d(i, j)}` for
    the images of the expanded k-reciprocal set :math:`R^*(i, k_1)` (eq. 3-5), which contains i itself, averaged over
    the :math:`k_2` nearest images (eq. 11). The final distance (eq. 10, 12) is

    .. math:: (1 - \lambda) \left( 1 - \frac{\sum_j \min(V_{qj}, V_{gj})}{\sum_j \max(V_{qj}, V_{gj})} \right)
              + \lambda d(q, g).

    As in the authors' code, distances are in units of an image's largest, so that they fit any manifold:
    d(i, j) = (max s_i - s_ij) / (max s_i - min s_i), with the similarities s_i of image i to all P.

    Args:
        manifold: the geometry.
        queries: (Q, D) points.
        gallery: (N, D) points; None: the queries, among each other.
        options: see `KReciprocal`.

    Returns:
        A function of rows (n,) of the queries, which returns minus their final distances, (n, N).

    Raises:
        ValueError: see `check_rerank`.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> points = torch.tensor([[0.0], [1.0], [3.0], [4.0], [7.0]])
        >>> rows = k_reciprocal(Euclidean(1), points, None, KReciprocal(k1=2, k2=1))
        >>> rows(torch.tensor([0])).abs().round(decimals=3)
        tensor([[0.0000, 0.3010, 0.7120, 0.8710, 1.0000]])
    """
    from scipy.sparse import csr_array

    pool = queries if gallery is None else torch.cat([queries, gallery])
    size = len(queries if gallery is None else gallery)
    check_rerank(options, size)
    lists, largest, smallest = _neighbors(manifold, pool, options.k1)
    sets = _encoded(manifold, pool, lists, largest, smallest)
    if options.k2 > 1:
        places = torch.arange(0, options.k2 * len(pool) + 1, options.k2).numpy()
        nearest = lists[:, : options.k2].flatten().numpy()
        averages = csr_array(
            (torch.full((len(nearest),), 1 / options.k2).double().numpy(), nearest, places), sets.shape
        )
        sets = csr_array(averages @ sets)
    first = len(pool) - size  # of the gallery in the pool
    targets = sets[first:].tocsc()
    sums = sets.sum(1)

    def rows(block: Tensor) -> Tensor:
        found = queries.new_empty(len(block), size)
        for start, similarity in _similarities(manifold, queries[block], pool[first:]):
            part = block[start : start + len(similarity)]
            scale = options.weight / (largest - smallest)[part, None]
            similarity.mul_(scale).sub_(largest[part, None] * scale + 1 - options.weight)
            for values, row in zip(similarity.numpy(), part.tolist(), strict=True):
                shared = _shared(sets, targets, row)
                near = shared.nonzero()[0]
                total = sums[row] + sums[first + near] - shared[near]
                values[near] += (1 - options.weight) * shared[near] / total
            found[start : start + len(part)] = similarity
        return found

    return rows


def expand(
    manifold: Manifold, queries: Tensor, gallery: Tensor | None, options: Expansion
) -> tuple[Tensor, Tensor | None]:
    """Average each query and each image of the gallery with its nearest images of the gallery.

    Query expansion with the weights of Radenović et al. (2018, arXiv:1711.02512, section 3.3), and the same for the
    images of the gallery, database augmentation (Arandjelović & Zisserman 2012): an image counts 1, and each of its n
    nearest others s^alpha, with s the cosine, at least 0, or e^-d on manifolds with distances. The average is taken of
    features, see `Manifold.to_features`, which on the sphere gives the direction of the weighted sum.

    Args:
        manifold: the geometry.
        queries: (Q, D) points.
        gallery: (N, D) points; None: the queries, among each other.
        options: see `Expansion`.

    Returns:
        The new queries and gallery, on the manifold.

    Raises:
        ValueError: see `check_rerank`.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> points = torch.tensor([[1.0, 0.0], [0.8, 0.6], [-1.0, 0.0]])
        >>> expand(Sphere(2), points[:1], points[1:], Expansion(n=1, alpha=0))[0]
        tensor([[0.9487, 0.3162]])
    """
    items = queries if gallery is None else gallery
    check_rerank(options, len(items))

    def averaged(points: Tensor, *, own: bool) -> Tensor:
        found: list[Tensor] = []
        for start, similarity in _similarities(manifold, points, items):
            rows = torch.arange(start, start + len(similarity))
            if own:
                similarity[torch.arange(len(rows)), rows] = -torch.inf
            values, nearest = similarity.topk(options.n, 1)
            kernel = values.exp() if manifold.similarity_name.startswith("negative") else values.clamp(min=0)
            weights = torch.cat([torch.ones_like(values[:, :1]), kernel**options.alpha], 1)
            features = manifold.to_features(torch.cat([points[rows, None], items[nearest]], 1))
            mean = (weights[..., None] * features).sum(1) / weights.sum(1, keepdim=True)
            found.append(manifold.from_features(mean))
        return torch.cat(found)

    new = averaged(items, own=True)
    return (new, None) if gallery is None else (averaged(queries, own=False), new)


def _similarities(manifold: Manifold, points: Tensor, items: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield blocks of the similarities (n, N) of points to items, each with its first row."""
    rows = max(1, BLOCK_ENTRIES // len(items))
    for start in range(0, len(points), rows):
        yield start, manifold.similarity(points[start : start + rows], items)


def _neighbors(manifold: Manifold, pool: Tensor, k1: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each image and its k1 nearest, (P, k1 + 1), and its largest and smallest similarity, both (P,)."""
    lists = torch.empty(len(pool), k1 + 1, dtype=torch.int64)
    largest, smallest = pool.new_empty(len(pool)), pool.new_empty(len(pool))
    for start, similarity in _similarities(manifold, pool, pool):
        rows = torch.arange(start, start + len(similarity))
        largest[rows], smallest[rows] = similarity.amax(1), similarity.amin(1)
        similarity[torch.arange(len(rows)), rows] = torch.inf  # itself first, also among copies
        lists[rows] = similarity.topk(k1 + 1, 1).indices
    return lists, largest, smallest


def _encoded(manifold: Manifold, pool: Tensor, lists: Tensor, largest: Tensor, smallest: Tensor) -> Any:
    """Return the weights V of every image on the images of its expanded k-reciprocal set, sparse (P, P), float64."""
    from scipy.sparse import csr_array

    half = lists[:, : lists.shape[1] // 2 + 1]  # k1 / 2, rounded up, and the image itself
    size, rows = len(pool), max(1, BLOCK_ENTRIES // len(pool))
    blocks = torch.arange(size).split(rows)
    full_mutual, half_mutual = (torch.cat([_mutual(one, block) for block in blocks]) for one in (lists, half))
    entries: list[tuple[Tensor, Tensor, Tensor]] = []
    for block in blocks:
        mutual, near = full_mutual[block], lists[block]
        own = torch.zeros(len(block), size, dtype=torch.bool)
        own[mutual.nonzero()[:, 0], near[mutual]] = True
        members, present = half[near], half_mutual[near]  # (n, k1 + 1, k1 / 2 + 1)
        row = torch.arange(len(block))[:, None, None].expand_as(members)
        shared = (own[row, members] & present).sum(2)
        joins = mutual & (3 * shared >= 2 * present.sum(2))
        added = joins[:, :, None] & present
        own[row[added], members[added]] = True
        place, column = own.nonzero().T
        for part in torch.arange(len(place)).split(2**13):  # 32 MB of float64 coordinates at 512 dimensions
            first, second = block[place[part]], column[part]
            similarity = manifold.paired_similarity(pool[first], pool[second])
            distance = (largest[first] - similarity) / (largest[first] - smallest[first])
            entries.append((first, second, (-distance).exp()))
    first, second, weights = (torch.cat(column).numpy() for column in zip(*entries, strict=True))
    return csr_array((weights.astype("float64"), (first, second)), (size, size))


def _mutual(lists: Tensor, block: Tensor) -> Tensor:
    """Return whether an image is in the list of each image of its own list, (n, k)."""
    return (lists[lists[block]] == block[:, None, None]).any(2)


def _shared(sets: Any, targets: Any, row: int) -> Any:
    """Compute the sum of the minima of the weights of an image and of each target, (N,).

    Args:
        sets: weights (P, P), by row.
        targets: weights (N, P), by column.
        row: the image.
    """
    import numpy as np

    own = slice(sets.indptr[row], sets.indptr[row + 1])
    columns = sets.indices[own]
    starts, counts = targets.indptr[columns], targets.indptr[columns + 1] - targets.indptr[columns]
    entries = np.repeat(starts - np.append(0, counts[:-1].cumsum()), counts) + np.arange(counts.sum())
    minima = np.minimum(targets.data[entries], np.repeat(sets.data[own], counts))
    return np.bincount(targets.indices[entries], minima, minlength=targets.shape[0])
