"""Consistency of graphs and of thresholds against their equations."""

import numpy as np
import pytest
import torch
from pytorch_metric_learning.losses import ThresholdConsistentMarginLoss
from torch.nn.functional import normalize

from dmlkit.manifolds import Euclidean, Lorentz, Sphere
from dmlkit.recipe.schema import Recipe
from dmlkit.regularizers import GraphConsistency, ThresholdConsistency

LABELS = torch.tensor([5, 5, 0, 0, 2, 2] * 2)  # two draws, class-aligned


def naive(x, sigma):
    """Eq. 3 element by element, X' and X'' being the halves of the batch."""
    propagated = []
    for draw in x.chunk(2):
        rows = [sum((-(a - b).square().sum() / sigma).exp() * b for b in draw) for a in draw]
        propagated.append(torch.stack(rows))
    difference = propagated[0] - propagated[1]
    return sum(entry**2 for entry in difference.flatten()) ** 0.5


@pytest.mark.parametrize(("manifold", "sigma"), [(Sphere(4), 0.3), (Euclidean(4), 5.0)])
def test_equals_the_double_loop(manifold, sigma):
    features = torch.randn(12, 4, dtype=torch.float64).requires_grad_()
    x = normalize(features, dim=1)
    term = GraphConsistency(manifold, bandwidth=sigma)
    value, expected = term(x, LABELS), naive(x, sigma)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(value, features, retain_graph=True),
        torch.autograd.grad(expected, features),
        rtol=1e-9,
        atol=1e-12,
    )
    assert torch.autograd.gradcheck(lambda features: term(normalize(features, dim=1), LABELS), features)


def test_equations_1_and_2_by_numpy():
    x, sigma = torch.randn(12, 8, dtype=torch.float64), 0.3  # more dimensions than places, as the paper's proof asks
    first, second = np.array(
        [[[(-(a - b).square().sum() / sigma).exp().item() for b in draw] for a in draw] for draw in x.chunk(2)]
    )
    equation_1 = ((first - second) ** 2).sum()
    one, two = x.chunk(2)
    inverse, residual = np.linalg.norm(np.linalg.pinv(one.numpy())), np.linalg.norm((two - one).numpy())
    equation_2 = (naive(x, sigma).item() + np.linalg.norm(second) * residual) * inverse
    graphs, bound = (GraphConsistency(Euclidean(8), bandwidth=sigma, form=form) for form in ("graphs", "bound"))
    assert graphs(x, LABELS).item() == pytest.approx(equation_1, rel=1e-9)
    assert bound(x, LABELS).item() == pytest.approx(equation_2, rel=1e-9)
    for term in (graphs, bound):
        assert torch.autograd.gradcheck(lambda x, term=term: term(x, LABELS), x.clone().requires_grad_())


@pytest.mark.parametrize("form", ["propagated", "graphs", "bound"])
def test_images_without_a_counterpart_are_left_out_of_every_form(form):
    x = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([9, 9, 0, 0, 2, 9, 9, 0, 0, 9, 4])  # of 9 the last, of 2 and 4 the only ones
    kept = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8])
    term = GraphConsistency(Euclidean(8), form=form, relative_bandwidth=True)
    value, expected = term(x, labels), term(x[kept], labels[kept])
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, x), torch.autograd.grad(expected, x))
    assert term(x[:1], labels[:1]) == 0


def test_a_relative_bandwidth_is_that_of_features_of_any_length():
    x = torch.randn(12, 4, dtype=torch.float64)
    within = [torch.pdist(draw).square() for draw in x.chunk(2)]
    median = torch.cat([torch.cat([pairs, pairs]) for pairs in within]).median().item()
    relative = GraphConsistency(Euclidean(4), bandwidth=0.5, relative_bandwidth=True)
    torch.testing.assert_close(relative(x, LABELS), naive(x, 0.5 * median), rtol=1e-9, atol=0)
    torch.testing.assert_close(relative(30 * x, LABELS), 30 * relative(x, LABELS), rtol=1e-9, atol=0)


@pytest.mark.parametrize("x", [torch.zeros(12, 4), torch.ones(12, 4), torch.randn(6, 4).repeat(2, 1)])
def test_equal_draws_have_finite_gradients_in_every_form_and_0_in_the_first(x):
    x = x.clone().requires_grad_()
    for form in ("propagated", "graphs", "bound"):
        value = GraphConsistency(Euclidean(4), form=form, relative_bandwidth=True)(x, LABELS)
        (gradient,) = torch.autograd.grad(value, x)
        assert value.isfinite() and gradient.isfinite().all()
    value = GraphConsistency(Euclidean(4))(x, LABELS)
    (gradient,) = torch.autograd.grad(value, x)
    assert value == 0 and not gradient.any()


def test_small_differences_keep_their_gradient():
    x = torch.randn(6, 4, dtype=torch.float64).repeat(2, 1)
    x[0, 0] += 1e-6
    x.requires_grad_()
    GraphConsistency(Euclidean(4))(x, LABELS).backward()
    assert 0.1 < x.grad.norm() < 100


def test_the_order_of_the_batch_matters_only_within_a_class():
    """The batches of two processes, joined: X'_0 X''_0 X'_1 X''_1."""
    torch.manual_seed(0)
    x = torch.randn(24, 4, dtype=torch.float64)
    labels = torch.cat([LABELS, LABELS + 10])
    first = torch.cat([torch.arange(6), torch.arange(12, 18)])
    in_halves = torch.cat([first, first + 6])
    torch.testing.assert_close(GraphConsistency(Euclidean(4))(x, labels), naive(x[in_halves], 1.0))


LABELS_THRESHOLD = torch.tensor([5, 5, 0, 0, 0, 2, 2, 7])


@pytest.fixture
def features():
    return torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def naive_threshold(similarity, above, below, ratio):
    """L_TCM pair by pair."""
    pulls, pushes = [], []
    for i in range(len(LABELS_THRESHOLD)):
        for j in range(len(LABELS_THRESHOLD)):
            s = similarity(i, j)
            if i != j and LABELS_THRESHOLD[i] == LABELS_THRESHOLD[j] and s <= above:
                pulls.append(above - s)
            if LABELS_THRESHOLD[i] != LABELS_THRESHOLD[j] and s >= below:
                pushes.append(s - below)
    return sum(pulls) / max(len(pulls), 1) + ratio * sum(pushes) / max(len(pushes), 1)


def assert_same(value, expected, features):
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
    gradients = (torch.autograd.grad(one, features, retain_graph=True)[0] for one in (value, expected))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("above", "below", "ratio"), [(0.9, 0.5, 1.0), (0.3, 0.4, 2.5), (0.9, 1.0, 1.0)])
def test_equals_the_double_loop_and_pytorch_metric_learning(features, above, below, ratio):
    options = {"positive_margin": above, "negative_margin": below, "negative_weight": ratio}
    term, x = ThresholdConsistency(Sphere(3), **options), normalize(features, dim=1)
    assert_same(term(x, LABELS_THRESHOLD), naive_threshold(lambda i, j: x[i] @ x[j], above, below, ratio), features)
    peer = ThresholdConsistentMarginLoss(margin_plus=above, margin_minus=below, lambda_minus=ratio)
    assert_same(term(x, LABELS_THRESHOLD), peer(x, LABELS_THRESHOLD), features)
    assert torch.autograd.gradcheck(lambda features: term(normalize(features, dim=1), LABELS_THRESHOLD), features)


def test_a_distance_is_counted_in_units_of_a_cosine(features):
    sheet = Lorentz(3, curvature=-0.5).double()
    points = sheet.from_features(features)
    unrelated = sheet.unrelated_distance()
    found = ThresholdConsistency(sheet)(points, LABELS_THRESHOLD)
    expected = naive_threshold(lambda i, j: 1 - sheet.paired_distance(points[i], points[j]) / unrelated, 0.9, 0.5, 1.0)
    assert_same(found, expected, features)


@pytest.mark.parametrize(
    ("x", "labels"),
    [
        (torch.eye(3), [0, 1, 2]),  # no positive pair, and no negative above m-
        (torch.ones(3, 3) / 3**0.5, [4, 4, 4]),  # one class, and no positive below m+
        (torch.eye(3)[:1], [0]),  # no pair
    ],
)
def test_without_hard_pairs_it_is_0_with_gradient_0(x, labels):
    x = x.clone().requires_grad_()
    value = ThresholdConsistency(Sphere(3))(x, torch.tensor(labels))
    (gradient,) = torch.autograd.grad(value, x)
    assert value == 0
    assert not gradient.any()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"manifold": {"name": "euclidean", "similarity": "dot"}}, "needs manifold.similarity"),
        ({"manifold": {"name": "lorentz", "curvature": -16.0}}, "got -16, expected"),
        ({"sampler": {"name": "class_balanced", "classes_per_batch": 8, "images_per_class": 1}}, "needs sampler.pairs"),
    ],
)
def test_what_does_not_fit_is_refused(part, message):
    fitting = {"dataset": {"name": "glyphs"}, "backbone": {"name": "small_cnn"}, "loss": {"name": "norm_softmax"}}
    with pytest.raises(ValueError, match=message):
        Recipe.model_validate({**fitting, "regularizers": ({"name": "threshold_consistency"},), **part})
