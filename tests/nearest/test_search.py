"""Search is exact: the neighbours are those of a brute-force search in float64."""

import pytest
import torch
from torch import Tensor

from dmlkit.manifolds import Euclidean, Lorentz, Poincare, Sphere
from dmlkit.manifolds.base import Manifold
from dmlkit.nearest import search
from dmlkit.nearest.search import Gallery, StoredGallery
from dmlkit.nearest.search import _InMemory as Pieces


def brute_force(manifold: Manifold, queries: Tensor, gallery: Tensor, k: int) -> Tensor:
    """By the stable similarity in float64, over twice k of a float64 product, which is off by 1e-11 at most."""
    q, g = queries.double(), gallery.double()
    vectors = manifold.index_vectors(g, "gallery").T
    found: list[Tensor] = []
    for part in q.split(100):
        near = (manifold.index_vectors(part, "query") @ vectors).topk(2 * k).indices.sort(dim=1).values
        order = manifold.paired_similarity(part[:, None], g[near]).argsort(dim=1, descending=True, stable=True)
        found.append(near.gather(1, order[:, :k]))
    return torch.cat(found)


def spread(count: int, dim: int, seed: int) -> Tensor:
    """Clustered directions, lengths evenly from the origin to the boundary of the ball (atanh 0.996 = 3.1)."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(500, dim, generator=torch.Generator().manual_seed(9))
    directions = centers[torch.randint(500, (count,), generator=generator)]
    directions = directions + 0.3 * torch.randn(count, dim, generator=generator)
    lengths = 3.3 * torch.rand(count, 1, generator=generator)
    return torch.nn.functional.normalize(directions, dim=1) * lengths


@pytest.mark.parametrize("model", [Poincare, Lorentz])
def test_recall_at_100_is_1_up_to_the_boundary(model: type[Manifold]):
    dim = 32
    manifold = model(dim, clip_distance=None)
    scale = 2 if model is Lorentz else 1
    gallery = manifold.from_features(scale * spread(10_000, dim, seed=0))
    queries = manifold.from_features(scale * spread(200, dim, seed=1))
    found = Gallery(manifold, gallery).search(queries, k=100).indices
    assert torch.equal(found, brute_force(manifold, queries, gallery, 100))


@pytest.mark.parametrize("space", ["ball", "flat", "dot", "arc"])
def test_near_duplicates_widen_the_short_list(space: str):
    """300 points within rounding of each other: the float32 product cannot order them."""
    ball, flat, dot = Poincare(2, clip_distance=None), Euclidean(2), Euclidean(2, similarity="dot")
    manifold: Manifold = {"ball": ball, "flat": flat, "dot": dot, "arc": Sphere(2)}[space]
    torch.manual_seed(0)
    crowd = torch.tensor([2.6, 0.3]) + 1e-5 * torch.randn(300, 2)
    gallery = manifold.from_features(torch.cat([torch.randn(700, 2), crowd]))
    queries = manifold.from_features(torch.tensor([[2.6, 0.3]]))
    exact = manifold.paired_similarity(queries.double(), gallery.double()).argsort(descending=True, stable=True)[:10]
    for search_in in (Gallery(manifold, gallery), StoredGallery(manifold, Pieces(gallery))):
        assert torch.equal(search_in.search(queries, k=10).indices[0], exact)
    plain = manifold.index_vectors(queries, "query") @ manifold.index_vectors(gallery, "gallery").T
    assert not torch.equal(plain[0].topk(10).indices, exact)


def test_equally_near_points_come_in_the_order_of_the_gallery():
    gallery = torch.zeros(50, 3)
    found = Gallery(Euclidean(3), gallery).search(torch.ones(2, 3), k=5)
    assert found.indices.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert torch.allclose(found.similarities, torch.full((2, 5), -(3**0.5)))


SPACES: dict[str, Manifold] = {
    "ball": Poincare(6, clip_distance=None),
    "sheet": Lorentz(6, clip_distance=None),
    "flat": Euclidean(6),
    "dot": Euclidean(6, similarity="dot"),
    "sphere": Sphere(6),
}


@pytest.mark.parametrize("rows", [7, 300])
@pytest.mark.parametrize("space", SPACES)
def test_a_search_in_blocks_is_the_search_in_memory(space: str, rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search, "BLOCK_ROWS", rows)
    manifold = SPACES[space]
    gallery = manifold.from_features(spread(2_000, 6, seed=0))
    gallery = torch.cat([gallery, gallery[:50]])  # twins in far blocks: the earlier one comes first
    queries = torch.cat([manifold.from_features(spread(40, 6, seed=1)), gallery[:10]])
    found, expected = (
        one.search(queries, k=9) for one in (StoredGallery(manifold, Pieces(gallery)), Gallery(manifold, gallery))
    )
    assert torch.equal(found.indices, expected.indices) and torch.equal(found.similarities, expected.similarities)
    exact = manifold.paired_similarity(queries.double()[:, None], gallery.double())
    assert torch.equal(found.indices, exact.argsort(dim=1, descending=True, stable=True)[:, :9])
    assert len(StoredGallery(manifold, Pieces(gallery[:3])).search(queries, k=3).indices) == 50


def test_a_learned_curvature_is_searched():
    ball = Poincare(3, learnable_curvature=True)
    points = ball.from_features(torch.randn(20, 3))
    assert Gallery(ball, points).search(points, k=1).indices[:, 0].tolist() == list(range(20))


@pytest.mark.parametrize("manifold", [Euclidean(3), Euclidean(3, similarity="dot"), Lorentz(2)])
def test_the_longest_points_are_searched_exactly(manifold: Manifold):
    points = 1e16 * torch.nn.functional.normalize(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))
    if isinstance(manifold, Lorentz):
        points = torch.cat([points[:, 1:].norm(dim=1, keepdim=True), points[:, 1:]], dim=1)
    similarity = manifold.paired_similarity(points.double()[:, None], points.double())
    expected = similarity.argsort(dim=1, descending=True, stable=True)[:, :2]
    for gallery in (Gallery(manifold, points), StoredGallery(manifold, Pieces(points))):
        assert torch.equal(gallery.search(points, 2).indices, expected)


@pytest.mark.parametrize(
    ("points", "queries", "k", "message"),
    [
        (torch.zeros(0, 3), torch.zeros(1, 3), 1, "at least one point, got none"),
        (torch.zeros(4, 2), torch.zeros(1, 3), 1, r"points of shape \(N, 3\), got \(4, 2\)"),
        (torch.zeros(4, 3), torch.zeros(3), 1, r"queries of shape \(N, 3\), got \(3,\)"),
        (torch.zeros(4, 3), torch.zeros(1, 3), 5, "k must be from 1 to 4, the size of the gallery, got 5"),
        (torch.zeros(4, 3), torch.zeros(1, 3), 0, "k must be from 1 to 4"),
        (torch.full((4, 3), torch.nan), torch.zeros(1, 3), 1, "points: row 0: its embedding has nan or inf"),
        (torch.full((4, 3), -2e16), torch.zeros(1, 3), 1, r"row 0: its largest coordinate is 2e\+16, and inner"),
        (torch.zeros(4, 3), torch.full((1, 3), 1e30), 1, "queries: row 0: its largest coordinate is"),
    ],
)
def test_what_cannot_be_searched_is_refused(points: Tensor, queries: Tensor, k: int, message: str):
    with pytest.raises(ValueError, match=message):
        Gallery(Euclidean(3), points).search(queries, k)
