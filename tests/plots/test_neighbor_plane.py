import pytest
import torch
from sklearn.manifold import TSNE, trustworthiness

from dmlkit.manifolds import Euclidean, Lorentz, Poincare
from dmlkit.plots.planes import neighbor_plane, principal_plane


def clusters(count: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(8, width, generator=generator)
    return centres[torch.arange(count) % 8] + 0.3 * torch.randn(count, width, generator=generator)


def kl_divergence(distances: torch.Tensor, plane: torch.Tensor, perplexity: float) -> float:
    """Of the similarities in the plane from those of the distances, by the definition (van der Maaten & Hinton)."""
    count = len(distances)
    squares, joint = distances.double().square(), torch.zeros(count, count, dtype=torch.float64)
    for row in range(count):
        others = torch.arange(count) != row
        low, high, shares = -30.0, 30.0, torch.empty(0)
        for _ in range(60):  # bisection of the logarithm of the precision
            middle = (low + high) / 2
            shares = torch.softmax(-squares[row, others] * torch.exp(torch.tensor(middle)), 0)
            entropy = -(shares * shares.clamp(min=1e-300).log()).sum()
            low, high = (middle, high) if entropy.exp() > perplexity else (low, middle)
        joint[row, others] = shares
    joint = (joint + joint.T) / (2 * count)
    near = 1 / (1 + torch.cdist(plane, plane).square())
    near.fill_diagonal_(0)
    kept = joint > 1e-15
    return float((joint[kept] * (joint[kept] / (near / near.sum())[kept]).log()).sum())


def test_it_is_as_good_as_scikit_learns():
    points = clusters(160, 6)
    advanced: list[int] = []
    plane = neighbor_plane(Euclidean(6), points, advance=advanced.append)
    assert sum(advanced) == len(points) and len(advanced) > 10
    assert torch.equal(plane, neighbor_plane(Euclidean(6), points))
    theirs = torch.from_numpy(TSNE(random_state=0).fit_transform(points.numpy())).double()
    distances = torch.cdist(points, points)
    ours, best = (kl_divergence(distances, place, 30) for place in (plane, theirs))
    assert ours < 1.1 * best < 0.2 * kl_divergence(distances, principal_plane(Euclidean(6), points), 30)


@pytest.mark.parametrize("kind", [Poincare, Lorentz])
def test_near_on_a_curved_space_is_near_in_the_plane(kind: type[Poincare | Lorentz]):
    manifold = kind(4)
    points = manifold.from_features(clusters(120, 4))
    distances = manifold.distance(points, points).detach().fill_diagonal_(0)
    plane = neighbor_plane(manifold, points)
    assert trustworthiness(distances.numpy(), plane.numpy(), n_neighbors=10, metric="precomputed") > 0.93


def test_few_and_equal_points_have_places():
    for points in (torch.randn(3, 2), torch.ones(12, 2), torch.arange(5.0)[:, None]):
        plane = neighbor_plane(Euclidean(points.shape[1]), points)
        assert plane.shape == (len(points), 2) and plane.isfinite().all()
