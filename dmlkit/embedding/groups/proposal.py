"""The most similar pairs of images, and a threshold for near-duplicates that they suggest."""

from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.embedding.groups.duplicates import Matches
from dmlkit.embedding.groups.neighbors import QUERIES, neighbors_of
from dmlkit.embedding.near_pairs import NearPairs
from dmlkit.embedding.points import PointsInMemory
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.search import Gallery, Neighbors
from dmlkit.embedding.sources import check_same_model
from dmlkit.errors import UserError

LEAST_GAP = 1e-6  # relative; float32 similarities of equal images differ by less


class Proposal(NamedTuple):
    """Threshold in the middle of a gap between similarities."""

    threshold: float
    above: float  # similarity at the upper end of the gap
    below: float  # similarity at its lower end
    images: int  # that reach the threshold


def propose_threshold(nearest: Tensor) -> Proposal | None:
    """Return the middle of the largest gap among the upper half of similarities; None if there is no gap.

    Near-duplicates are far more similar to each other than other images to their nearest one. Gaps in the lower half
    are left out: images that resemble no other make the largest ones.

    Args:
        nearest: (N,) similarity of each image to the nearest other.

    Example:
        >>> propose_threshold(torch.tensor([0.5, 1.0, 0.25, 0.9375, 0.625, 0.0]))
        Proposal(threshold=0.78125, above=0.9375, below=0.625, images=2)
    """
    ordered = nearest.double().sort(descending=True).values
    gaps = -ordered.diff()[: max(1, len(ordered) // 2)]
    if not len(gaps) or float(gaps.max()) <= LEAST_GAP * max(1.0, float(ordered.abs().max())):
        return None
    place = int(gaps.argmax())
    above, below = ordered[place : place + 2].tolist()
    return Proposal((above + below) / 2, above, below, place + 1)


def most_similar_pairs(
    one: PointsInMemory, other: PointsInMemory | None, count: int, *, bar: Bar = no_bar
) -> tuple[Matches, Proposal | None]:
    """Return the most similar pairs within a source or between two, the most similar first, and a threshold.

    A pair among the ``count`` most similar ones is among the ``count`` nearest neighbors of both of its images.

    Args:
        one, other: the sources; None: pairs within the first.
        count: number of pairs.
        bar: shows the progress.

    Raises:
        UserError: the sources have two models, or there is no pair.
    """
    if other is not None:
        check_same_model(other, one)
    most = len(one) - 1 if other is None else len(other)
    if most < 1:
        raise UserError(f"{one.source}: has a single image; expected at least two")
    with bar("comparing", len(one)) as advance:
        if other is None:
            found = neighbors_of(one.manifold, one.points, min(count, most), advance=advance)
        else:
            gallery, blocks = Gallery(one.manifold, other.points), list[Neighbors]()
            for queries in one.points.split(QUERIES):
                blocks.append(gallery.search(queries, min(count, most)))
                advance(len(queries))
            found = Neighbors(*(torch.cat(column) for column in zip(*blocks, strict=True)))
    first = torch.arange(len(one)).repeat_interleave(found.indices.shape[1])
    second, similarities = found.indices.flatten(), found.similarities.flatten().double()
    if other is None:  # both images of a pair may have found it
        pairs, places = torch.stack([first.minimum(second), first.maximum(second)], 1).unique(
            dim=0, return_inverse=True
        )
        first, second = pairs.unbind(1)
        similarities = torch.full((len(pairs),), -torch.inf).double().scatter_reduce(0, places, similarities, "amax")
    best = similarities.argsort(descending=True, stable=True)[:count]
    chosen = NearPairs(first[best], second[best], similarities[best])
    return Matches(one, other or one, chosen), propose_threshold(found.similarities[:, 0])
