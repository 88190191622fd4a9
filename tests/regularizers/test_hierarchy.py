import pytest
import torch

from dmlkit.manifolds import Euclidean, Poincare, Sphere
from dmlkit.regularizers import Hierarchy
from dmlkit.regularizers.hierarchy import DrawnTriplets, draw_triplets, triplet_values
from tests.conftest import refuses

LABELS = torch.arange(8) // 2


def gumbel(shape):
    """Draw Gumbel noise as `gumbel_softmax` does: minus the logarithm of an exponential variate."""
    return -torch.empty(shape, dtype=torch.float64).exponential_().log()


def ancestor(farther, noise, temperature):
    """Draw one ancestor: its one-hot vector, with the gradient of the softmax."""
    logits = [-far / temperature + more for far, more in zip(farther, noise, strict=True)]
    total = sum(logit.exp() for logit in logits)
    soft = torch.stack([logit.exp() / total for logit in logits])
    chosen = int(soft.argmax())
    hard = torch.zeros(len(logits), dtype=torch.float64)
    hard[chosen] = 1
    return chosen, hard - soft.detach() + soft


def naive(distance, triplets, margin, temperature):
    """The terms of HIER triplet by triplet, from the same noise."""
    size, count = triplets.related.shape
    noise = [gumbel((size, count, distance.shape[1])) for _ in range(2)]
    values = torch.zeros(size, count, dtype=torch.float64)
    for i in range(size):
        for t in range(count):
            j, k = triplets.related[i, t], triplets.unrelated[i, t]
            pair = [max(a, b) for a, b in zip(distance[i], distance[j], strict=True)]
            triple = [max(a, b) for a, b in zip(pair, distance[k], strict=True)]
            (a, lower), (b, upper) = (
                ancestor(far, noise[level][i, t], temperature) for level, far in enumerate((pair, triple))
            )
            to_a, to_b = ([distance[x] @ hot for x in (i, j, k)] for hot in (lower, upper))
            hinges = (to_a[0] - to_b[0] + margin, to_a[1] - to_b[1] + margin, to_b[2] - to_a[2] + margin)
            values[i, t] = sum(max(hinge, 0 * hinge) for hinge in hinges) if a != b else 0
    return values


@pytest.mark.parametrize(("margin", "temperature"), [(0.1, 0.5), (0.5, 2.0)])
def test_equals_the_loops(margin, temperature):
    ball = Poincare(5).double()
    points = torch.randn(8, 5, dtype=torch.float64).requires_grad_()
    proxies = torch.randn(5, 5, dtype=torch.float64).requires_grad_()
    distance = ball.distance(ball.from_features(points), ball.from_features(proxies))
    triplets = draw_triplets((LABELS[:, None] - LABELS).abs().double(), 4, 4)
    torch.manual_seed(3)
    losses = triplet_values(distance, triplets, margin, temperature)
    torch.manual_seed(3)
    expected = naive(distance, triplets, margin, temperature)
    assert (expected == 0).any() and (expected > 0).any()
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-12)
    gradients = (torch.autograd.grad(one.sum(), (points, proxies), retain_graph=True) for one in (losses, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_where_the_choice_is_certain_the_gradient_equals_finite_differences():
    sphere = Sphere(3)
    term = Hierarchy(sphere, num_proxies=6, neighbors=3, triplets_per_anchor=4, temperature=1e-5).double()
    features = torch.randn(8, 3, dtype=torch.float64).requires_grad_()

    def value(features, proxies):
        torch.manual_seed(5)
        points = sphere.from_features(features)
        return torch.func.functional_call(term, {"proxies": proxies}, (points, LABELS))

    assert value(features, term.proxies) > 0
    assert torch.autograd.gradcheck(value, (features, term.proxies))


LINE, NODES = Euclidean(1).double(), torch.tensor([[0.0], [1.0], [2.0], [3.0], [9.0]]).double()


def test_a_line_by_hand():
    """The ancestor of 0 and 2 is 1; that of 0, 2 and 6 is 3, which is 3 from both ends."""
    distance = LINE.distance(torch.tensor([[0.0], [2.0], [6.0]]).double(), NODES)
    triplets = DrawnTriplets(torch.tensor([[1], [0], [1]]), torch.tensor([[2], [2], [0]]), torch.ones(3, 1).bool())
    values = triplet_values(distance, triplets, margin=0.5, temperature=1e-6)
    # i = 0: 1 - 3 + m < 0; j = 2: 1 - 1 + m = 0.5; k = 6: 3 - 5 + m < 0. In the third row a = b.
    torch.testing.assert_close(values, torch.tensor([[0.5], [0.5], [0.0]]).double())


def test_value_is_the_mean_over_triplets_of_images_plus_that_over_triplets_of_proxies():
    term = Hierarchy(LINE, num_proxies=5, neighbors=2, triplets_per_anchor=9, temperature=1e-6, margin=0.5).double()
    term.proxies.data = NODES
    points = torch.tensor([[0.0], [2.0], [6.0], [7.5]]).double()
    torch.manual_seed(0)
    both = term(points, torch.tensor([0, 0, 1, 1]))
    torch.manual_seed(0)
    means = []
    for rows in (points, NODES):  # classes are clusters, so the distances alone give the same neighbors
        triplets, distance = draw_triplets(LINE.distance(rows, rows), 2, 9), LINE.distance(rows, NODES)
        values = triplet_values(distance, triplets, 0.5, 1e-6)
        means.append(sum(values[i].sum() for i in range(len(rows)) if triplets.exist[i]) / 9 / triplets.exist.sum())
    assert all(mean > 0 for mean in means)
    torch.testing.assert_close(both, sum(means))


def test_triplets_are_reciprocal_neighbors_and_others_drawn_uniformly():
    position = torch.randn(40, 2)
    rank = torch.cdist(position, position)
    torch.manual_seed(0)
    triplets = draw_triplets(rank, 8, 400)
    near = [set(row.argsort()[:8].tolist()) for row in rank]
    for i in range(40):
        related = {j for j in near[i] if i in near[j]} - {i}
        others = set(range(40)) - related - {i}
        assert triplets.exist[i].item() == bool(related)
        if related:
            assert set(triplets.related[i].tolist()) == related  # 400 draws of at most 7 miss one with odds below 1e-26
            assert set(triplets.unrelated[i].tolist()) <= others
            counts = torch.bincount(triplets.related[i], minlength=40)[list(related)]
            assert (counts - 400 / len(related)).abs().max() < 6 * (400 / len(related)) ** 0.5


def test_images_of_a_class_are_nearer_than_all_others():
    """Rows 0 and 1 are of one class and far apart, with rows of other classes between."""
    term = Hierarchy(Euclidean(1), num_proxies=8, neighbors=2, triplets_per_anchor=3)
    points, labels = torch.tensor([[0.0], [9.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1])
    seen = []
    term._mean_over_triplets = lambda rank, distance: seen.append(draw_triplets(rank, 2, 3)) or rank.sum()
    term(points, labels)
    assert seen[0].related[:, 0].tolist() == [1, 0, 3, 2]


def test_images_that_share_more_levels_are_nearer():
    levels = {"family": torch.tensor([0, 0, 0, 1]), "genus": torch.tensor([0, 0, 1, 2]), "species": torch.arange(4)}
    term = Hierarchy(Euclidean(2), num_proxies=8, levels=True)
    term.use_levels(levels)
    points, labels = torch.randn(24, 2), torch.arange(24) % 4
    seen = []
    term._mean_over_triplets = lambda rank, distance: seen.append(rank) or rank.sum()
    term(points, labels)
    for row in range(24):
        shared = [
            sum(int(codes[labels[row]] == codes[labels[other]]) for codes in levels.values()) for other in range(24)
        ]
        apart = [float((points[row] - points[other]).norm()) for other in range(24)]
        expected = sorted(range(24), key=lambda other: (-shared[other], apart[other]))
        assert seen[0][row].argsort().tolist() == expected
    plain = Hierarchy(Euclidean(2), num_proxies=8)
    plain.use_levels(levels)
    assert plain.levels is None
    refuses(r"hierarchy.levels needs a dataset with levels", term.use_levels, {})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_without_triplets_of_images_only_the_proxies_learn(size):
    term = Hierarchy(Sphere(3), num_proxies=8, neighbors=4)
    points = torch.eye(3)[:size].requires_grad_()
    value = term(points, torch.arange(size))
    of_points, of_proxies = torch.autograd.grad(value, (points, term.proxies))
    assert not of_points.any()
    assert value > 0 and of_proxies.any()
