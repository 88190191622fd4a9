"""Hierarchical clustering against geodesics of geoopt, loops in Klein's disk, and the best tree of all."""

from functools import cache
from itertools import combinations

import geoopt
import pytest
import torch
from torch import Tensor

from dmlkit.manifolds import Euclidean, Lorentz, Poincare, Product, Sphere
from dmlkit.manifolds.hyperbolic import Hyperbolic
from dmlkit.recipe.file import parse_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.regularizers import HierarchicalClustering
from dmlkit.regularizers.hierarchical_clustering import ancestor_depths, triplet_costs
from dmlkit.training.experiment import assemble, draw_proxies
from tests.conftest import ONE_EPOCH, refuses

FACTORS = (Sphere.Config(), Poincare.Config(curvature=-0.5), Lorentz.Config(curvature=-1.7))


def drawn(rows: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64).requires_grad_()


def klein_depth(curvature: float, x: Tensor, y: Tensor) -> Tensor:
    """Compute a depth in Klein's model, where geodesics are straight, also those at right angles to a radius."""
    root = (-curvature) ** 0.5
    p, q = (v * (root * v.norm()).tanh() / v.norm() for v in (x, y))
    return (p + ((p @ (p - q)) / ((p - q) @ (p - q))).clamp(0, 1) * (q - p)).norm().atanh() / root


def naive(depth: list[list[Tensor]], similarity: Tensor, temperature: float) -> Tensor:
    """Sum the equation triplet by triplet."""
    costs: list[Tensor] = []
    for i, j, k in combinations(range(len(similarity)), 3):
        powers = [(depth[a][b] / temperature).exp() for a, b in ((i, j), (i, k), (j, k))]
        w = [similarity[a, b] for a, b in ((i, j), (i, k), (j, k))]
        chosen = (
            torch.stack([one * power for one, power in zip(w, powers, strict=True)]).sum() / torch.stack(powers).sum()
        )
        costs.append(torch.stack(w).sum() - chosen)
    return torch.stack(costs).mean()


@pytest.mark.parametrize("space", [Poincare(3, curvature=-1.0), Lorentz(3, curvature=-0.3)])
def test_depth_is_that_of_the_nearest_point_of_the_geodesic(space: Hyperbolic):
    features = drawn(6, 3).detach()
    curvature = float(space.curvature)
    ball, points = geoopt.Stereographic(k=curvature).double(), Poincare(3, curvature=curvature).from_features(features)
    found = ancestor_depths(space.double(), space.from_features(features))
    i, j = torch.combinations(torch.arange(6)).T
    low, high = torch.zeros(15, 1, dtype=torch.float64), torch.ones(15, 1, dtype=torch.float64)

    def distance(along: Tensor) -> Tensor:
        return ball.dist0(ball.geodesic(along, points[i], points[j]), keepdim=True)

    for _ in range(80):  # the distance from the origin is convex along a geodesic
        thirds = low + (high - low) / 3, high - (high - low) / 3
        in_first = distance(thirds[0]) < distance(thirds[1])
        low, high = torch.where(in_first, low, thirds[0]), torch.where(in_first, thirds[1], high)
    torch.testing.assert_close(found[i, j], distance(low)[:, 0], rtol=0, atol=1e-7)
    assert torch.equal(found, found.T)
    assert 0 < ((low < 1e-9) | (high > 1 - 1e-9)).sum() < 15  # some ancestors are one of the two points


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_equals_the_loops_on_a_product_of_a_sphere_and_hyperbolic_spaces(temperature: float):
    space = Product(9, factors=FACTORS).double()
    features = drawn(6, 9)
    term, labels = HierarchicalClustering(space, temperature=temperature), torch.arange(6)
    sphere, ball, sheet = space.every
    points = space.from_features(features)
    on_sphere, in_ball, on_sheet = points.split(space.point_widths, 1)
    similar = [
        part.relative_similarity(own, own).detach()
        for part, own in ((sphere, on_sphere), (ball, in_ball), (sheet, on_sheet))
    ]
    expected = torch.zeros((), dtype=torch.float64)
    for part, column, others in ((ball, 3, (0, 2)), (sheet, 6, (0, 1))):
        own = features[:, column : column + 3]
        clipped = own * (2.3 / own.norm(dim=1, keepdim=True)).clamp(max=1)
        depth = [[klein_depth(part.curvature.item(), x, y) for y in clipped] for x in clipped]
        expected = expected + naive(depth, (similar[others[0]] + similar[others[1]]) / 2, temperature)
    value = term(points, labels)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
    gradients = [torch.autograd.grad(one, features, retain_graph=True)[0] for one in (value, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-10)
    assert not gradients[0][:, :3].any()  # the sphere says what is similar, and is left alone
    torch.testing.assert_close(term(points[torch.tensor([3, 0, 5, 1, 4, 2])], labels), value)


def test_similarities_of_one_space_are_its_own_and_those_of_levels_are_shares():
    sheet = Lorentz(4).double()
    features, labels = drawn(5, 4), torch.tensor([0, 1, 1, 2, 3])
    points, term = sheet.from_features(features), HierarchicalClustering(sheet)
    depth = ancestor_depths(sheet, points)
    own = sheet.relative_similarity(points, points).detach()
    torch.testing.assert_close(term(points, labels), triplet_costs(depth, own, 0.1).mean())

    def costs(features: Tensor) -> Tensor:
        return triplet_costs(ancestor_depths(sheet, sheet.from_features(features)), own, 0.1)

    assert torch.autograd.gradcheck(costs, features)
    known = HierarchicalClustering(sheet, levels=True)
    levels = {"genus": torch.tensor([0, 0, 1, 1]), "species": torch.arange(4)}
    known.use_levels(levels)
    shared = [[sum(int(of[a] == of[b]) for of in levels.values()) / 2 for b in labels] for a in labels]
    torch.testing.assert_close(
        known(points, labels), naive([list(row) for row in depth], torch.tensor(shared).double(), 0.1)
    )
    refuses(r"hierarchical_clustering.levels needs a dataset with levels", known.use_levels, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("space", [Poincare(2, clip_distance=None), Lorentz(2, clip_distance=None)])
def test_origin_border_and_neighbors_have_depths_with_bounded_gradients(space: Hyperbolic, dtype: torch.dtype):
    """A depth is 1-Lipschitz in the points, and moving a feature by 1 moves its point by at most sinh(r) / r."""
    rows = [
        [0, 0],
        [1e-30, 0],
        [1e-5, 2e-5],
        [1, 0],
        [1, 1e-7],
        [1 + 1e-6, 0],
        [-1, 0],
        [2, 1],
        [2, 1],
        [50, 1],
        [-9, 40],
    ]
    features = torch.tensor(rows, dtype=dtype).requires_grad_()
    radius = features.detach().norm(dim=1).clamp(1e-3, 12.3 if dtype == torch.float64 else 6.3)
    space = space.to(dtype)
    depth = ancestor_depths(space, space.from_features(features))
    assert depth.isfinite().all() and (depth >= 0).all()
    assert (depth <= torch.minimum(depth.diagonal()[:, None], depth.diagonal()) * (1 + 1e-5)).all()
    for one in depth.flatten():
        (gradient,) = torch.autograd.grad(one, features, retain_graph=True)
        assert gradient.isfinite().all() and (gradient.norm(dim=1) < 1.01 * radius.sinh() / radius).all()
    for count in (0, 1, 2):  # no triplet
        points = features[:count]
        value = HierarchicalClustering(space)(space.from_features(points), torch.arange(count))
        assert value.item() == 0 and not torch.autograd.grad(value, features)[0].any()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"manifold": {"name": "sphere"}}, "needs manifold.name lorentz or poincare, got sphere, because the"),
        (
            {"manifold": {"name": "product", "factors": ({"name": "sphere"}, {"name": "euclidean"})}},
            "got product, because the ancestors of a tree lie in hyperbolic space; a product needs a hyperbolic factor",
        ),
        ({"loss": {"name": "triplet"}}, "needs loss.name arcface or .* soft_triple, got triplet, because the proxies"),
        ({"training": {"shard_proxies": True}}, "needs training.shard_proxies False, got True"),
    ],
)
def test_what_does_not_fit_is_refused(part: dict[str, object], message: str):
    fitting = {"dataset": {"name": "glyphs"}, "loss": {"name": "soft_triple"}, "manifold": {"name": "lorentz"}}
    with pytest.raises(ValueError, match=message):
        Recipe.model_validate({**fitting, "regularizers": ({"name": "hierarchical_clustering"},), **part})
    with pytest.raises(ValueError, match="expected a manifold with a hyperbolic factor, got Euclidean"):
        HierarchicalClustering(Euclidean(2))


def test_training_adds_the_term_of_drawn_proxies_to_the_loss():
    term = "{name: hierarchical_clustering, proxies_per_step: 5, weight: 2.0}"
    space = "manifold: {name: product, factors: [{name: sphere}, {name: poincare}]}\n"
    text = ONE_EPOCH.replace("proxy_anchor", "soft_triple, centers_per_class: 3") + f"regularizers: [{term}]\n{space}"
    objective = assemble(parse_recipe(text, "recipe.yaml")).objective
    loss, (clustering,) = objective.loss, objective.regularizers
    assert list(objective.state_dict()) == [f"loss.{key}" for key in loss.state_dict()] + [
        f"regularizers.0.{key}" for key in clustering.state_dict()
    ]
    assert isinstance(loss.proxies, Tensor) and not any("proxies" in key for key in clustering.state_dict())
    points, labels = loss.manifold.from_features(torch.randn(3, 8)), torch.arange(3)
    torch.manual_seed(7)
    value = objective(points, labels)
    torch.manual_seed(7)
    leaves, classes = draw_proxies(loss, 5)
    torch.testing.assert_close(value, loss(points, labels) + 2 * clustering(leaves, classes))
    every = loss.manifold.proxy_points(loss.proxies)
    rows = (every.flatten(0, 1) == leaves[:, None]).all(2).nonzero()[:, 1]
    assert len({*rows.tolist()}) == 5 and torch.equal(rows // 3, classes)
    (gradient,) = torch.autograd.grad(clustering(leaves, classes), loss.proxies)
    assert {*gradient.flatten(0, 1).any(1).nonzero()[:, 0].tolist()} == {*rows.tolist()}


def test_descent_finds_the_tree_of_the_least_cost():
    similarity = torch.tensor([[3.0 - ((a ^ b).bit_length()) for b in range(8)] for a in range(8)]) / 3
    noise = drawn(8, 8, seed=1).detach() / 50
    similarity = (similarity + noise + noise.T).fill_diagonal_(1)

    def across(group: frozenset[int], other: frozenset[int]) -> float:
        return sum(float(similarity[a, b]) for a in group for b in other)

    @cache
    def least_cost(group: frozenset[int]) -> float:
        """Dasgupta's cost of the best of all binary trees."""
        if len(group) == 1:
            return 0.0
        first, *rest = sorted(group)
        halves = (frozenset((first, *some)) for size in range(len(rest)) for some in combinations(rest, size))
        return min(
            len(group) * across(half, group - half) + least_cost(half) + least_cost(group - half) for half in halves
        )

    ball = Poincare(8).double()
    features = (drawn(8, 8).detach() / 8**0.5).requires_grad_()  # as proxies start
    optimizer = torch.optim.Adam([features], lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        triplet_costs(ancestor_depths(ball, ball.from_features(features)), similarity, 0.1).mean().backward()
        optimizer.step()
    depth = ancestor_depths(ball, ball.from_features(features)).detach()
    groups, cost = [frozenset((leaf,)) for leaf in range(8)], 0.0
    while len(groups) > 1:  # merge the groups with the deepest ancestor
        a, b = max(combinations(groups, 2), key=lambda two: max(float(depth[x, y]) for x in two[0] for y in two[1]))
        cost += len(a | b) * across(a, b)
        groups = [*(one for one in groups if one not in (a, b)), a | b]
    assert cost == pytest.approx(least_cost(frozenset(range(8))))
