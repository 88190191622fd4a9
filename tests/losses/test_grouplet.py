"""Grouplet and transport weights against loops written from the paper, with scipy's plans."""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from dmlkit.losses import MPA, Grouplet
from dmlkit.losses.proxies.transport_weights import TransportWeights
from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.manifolds.base import Manifold
from dmlkit.transport import Exact, NoTransport, Quadratic, Sinkhorn

CLASSES, DIM = 7, 5
MANIFOLDS = {"sphere": lambda: Sphere(DIM), "negative distance": lambda: Euclidean(DIM, similarity="negative_distance")}


def draw(batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, DIM, generator=generator, dtype=torch.float64)
    return features, torch.randint(CLASSES, (batch,), generator=generator)


def grouplet(manifold: Manifold | None = None, **options: Any) -> Grouplet:
    torch.manual_seed(1)
    return Grouplet(manifold or Sphere(DIM), CLASSES, **options).double()


def groups_of(loss: torch.nn.Module, batch: int) -> list[list[int]]:
    """Which images the next step puts together, as a copy of the loss tells."""
    stacks = deepcopy(loss).transport.regroup(torch.zeros(batch, dtype=torch.int64))
    return [group for images in stacks for group in images.tolist()]


def plan_by_scipy(similarity: Tensor, labels: Tensor, group: list[int]) -> dict[tuple[int, int], float]:
    """x_ij of eq. 1 for the images i of a grouplet and all classes j: one column per unit that a class receives."""
    units = [int(labels[i]) for i in group]
    cost = [[1 - similarity[i, j].item() for j in units] for i in group]
    return {(group[row], units[col]): 1.0 for row, col in zip(*linear_sum_assignment(cost), strict=True)}


def naive_loss(
    similarity: Tensor, labels: Tensor, images: list[int], x: dict[tuple[int, int], float], scale: float, margin: float
) -> Tensor:
    """Eq. 2 over some images: a double loop."""
    pulls, pushes = [], []
    for j in range(CLASSES):
        own = [i for i in images if labels[i] == j]
        if own:
            terms = [(1 + x.get((i, j), 0)) * torch.exp(-scale * (similarity[i, j] - margin)) for i in own]
            pulls.append(torch.log(1 + sum(terms)))
        others = [i for i in images if labels[i] != j]
        terms = [(1 + x.get((i, j), 0)) * torch.exp(scale * (similarity[i, j] + margin)) for i in others]
        pushes.append(torch.log(1 + sum(terms, torch.zeros((), dtype=torch.float64))))
    return torch.stack(pulls).mean() + torch.stack(pushes).mean()


@pytest.mark.parametrize("scope", ["grouplet", "batch"])
@pytest.mark.parametrize(
    ("name", "batch", "group_size"),
    [("sphere", 12, 4), ("negative distance", 10, 4), ("sphere", 3, 4), ("sphere", 9, 1), ("sphere", 13, 8)],
)
def test_equals_the_paper(name: str, scope: str, batch: int, group_size: int):
    manifold = MANIFOLDS[name]()
    loss = grouplet(manifold, scope=scope, group_size=group_size, scale=3.0)
    features, labels = draw(batch)
    groups = groups_of(loss, batch)
    assert sorted(image for group in groups for image in group) == list(range(batch))
    rest = [batch % group_size] if batch % group_size else []
    assert [len(group) for group in groups] == [group_size] * (batch // group_size) + rest
    leaf = features.requires_grad_()
    value = loss(manifold.from_features(leaf), labels)
    similarity = manifold.similarity(manifold.from_features(leaf), manifold.proxy_points(loss.proxies))
    if name == "negative distance":  # 1 at a point itself, 0 at sqrt(8), the distance of unrelated ones
        similarity = 1 + similarity / 8**0.5
    plans = [plan_by_scipy(similarity, labels, group) for group in groups]
    if scope == "grouplet":
        parts = [
            naive_loss(similarity, labels, group, plan, 3.0, 0.1) for group, plan in zip(groups, plans, strict=True)
        ]
        expected = torch.stack(parts).mean()
    else:
        union = {key: mass for plan in plans for key, mass in plan.items()}
        expected = naive_loss(similarity, labels, list(range(batch)), union, 3.0, 0.1)
    torch.testing.assert_close(value, expected)
    learnable = [leaf, loss.proxies]
    torch.testing.assert_close(torch.autograd.grad(value, learnable), torch.autograd.grad(expected, learnable))


@pytest.mark.parametrize("scope", ["grouplet", "batch"])
@pytest.mark.parametrize("solver", [Quadratic(regularization=0.5), Sinkhorn(regularization=0.3)])
def test_gradient_flows_through_the_plan(scope: str, solver: Quadratic | Sinkhorn):
    loss = grouplet(scope=scope, solver=solver, scale=2.0).eval()  # no regrouping between evaluations
    features, labels = draw(10)
    assert torch.autograd.gradcheck(
        lambda x: loss(loss.manifold.from_features(x), labels),
        features.requires_grad_(),
        rtol=1e-3,
        atol=1e-6,
        fast_mode=True,
    )


def test_mpa_with_transport_equals_the_paper():
    features, labels = draw(8)
    torch.manual_seed(1)
    loss = MPA(
        Sphere(DIM), CLASSES, proxies_per_class=3, regularizer_weight=0.0, scale=3.0, transport=TransportWeights()
    ).double()
    groups = groups_of(loss, 8)
    points = loss.manifold.from_features(features)
    to_proxies = loss.manifold.similarity(points, loss.manifold.proxy_points(loss.proxies.flatten(0, 1)))
    to_proxies = to_proxies.view(8, CLASSES, 3)
    similarity = ((to_proxies / 0.1).softmax(2) * to_proxies).sum(2)
    union: dict[tuple[int, int], float] = {}
    for group in groups:
        union |= plan_by_scipy(similarity, labels, group)
    torch.testing.assert_close(loss(points, labels), naive_loss(similarity, labels, list(range(8)), union, 3.0, 0.1))


def test_groups_are_drawn_anew_and_come_back_after_a_resume():
    features, labels = draw(12)
    loss = grouplet()
    points = loss.manifold.from_features(features)
    seen = []
    for _ in range(3):
        seen.append(groups_of(loss, 12))
        loss(points, labels)
    assert seen[0] != seen[1] != seen[2] != seen[0]
    resumed = grouplet()
    resumed.load_state_dict(loss.state_dict())
    assert groups_of(resumed, 12) == groups_of(loss, 12)
    assert groups_of(grouplet(), 12) == seen[0]
    assert groups_of(grouplet(seed=1), 12) not in seen


def test_grouping_leaves_the_global_generator_alone():
    features, labels = draw(12)
    loss = grouplet()
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    loss(loss.manifold.from_features(features), labels)
    assert torch.equal(torch.rand(1), expected)


def test_evaluation_does_not_count_steps():
    features, labels = draw(12)
    loss = grouplet()
    points = loss.manifold.from_features(features)
    with torch.no_grad():
        assert loss(points, labels) == loss(points, labels)
    loss.eval()
    assert loss(points, labels) == loss(points, labels)
    assert loss.transport.step == 0


def test_exact_and_the_papers_programme_agree():
    features, labels = draw(64)
    exact, quadratic = grouplet(), grouplet(solver=Quadratic())
    leaf = features.requires_grad_()
    values = [loss(loss.manifold.from_features(leaf), labels) for loss in (exact, quadratic)]
    torch.testing.assert_close(values[0], values[1])
    gradients = [torch.autograd.grad(value, leaf)[0] for value in values]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_recipe_options():
    config = Grouplet.Config.model_validate({"solver": {"name": "quadratic", "regularization": 0.1}, "group_size": 8})
    loss = config.build(Sphere(DIM), CLASSES)
    assert isinstance(loss.transport.solver, Quadratic) and loss.transport.solver.regularization == 0.1
    assert loss.transport.group_size == 8
    weighted = MPA.Config.model_validate({"transport": {"solver": {"name": "exact"}}}).build(Sphere(DIM), 3)
    assert isinstance(weighted.transport, TransportWeights) and isinstance(weighted.transport.solver, Exact)


@pytest.mark.parametrize("scope", ["grouplet", "batch"])
def test_without_transport_the_groups_stay(scope: str):
    loss = grouplet(scope=scope, group_size=4, scale=3.0, solver=NoTransport())
    features, labels = draw(10)
    groups = groups_of(loss, 10) if scope == "grouplet" else [list(range(10))]
    points = loss.manifold.from_features(features)
    similarity = points @ loss.manifold.proxy_points(loss.proxies).T
    expected = torch.stack([naive_loss(similarity, labels, group, {}, 3.0, 0.1) for group in groups]).mean()
    torch.testing.assert_close(loss(points, labels), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_similarity_that_is_not_finite_costs_nothing_and_the_solver_does_not_fail(value: float):
    """The loss is not finite then, which the trainer reports; the solver itself refuses such costs."""
    similarity = torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cost = 1 - similarity
    similarity[1, 2], cost[1, 2] = value, 0
    found = TransportWeights(solver=Exact(), group_size=4).solve(torch.arange(4)[None], similarity, torch.arange(4))
    expected = torch.zeros(4, 4, dtype=torch.float64)
    expected[linear_sum_assignment(cost)] = 1
    torch.testing.assert_close(found.plan[0], expected)
    assert torch.equal(found.similarity[0].isfinite(), similarity.isfinite())
