import pytest
import torch
from pytorch_metric_learning.losses import ThresholdConsistentMarginLoss
from torch.nn.functional import normalize

from dmlkit.manifolds import Lorentz, Sphere
from dmlkit.recipe.schema import Recipe
from dmlkit.regularizers import ThresholdConsistency

LABELS = torch.tensor([5, 5, 0, 0, 0, 2, 2, 7])


@pytest.fixture
def features():
    return torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def naive(similarity, above, below, ratio):
    """L_TCM pair by pair."""
    pulls, pushes = [], []
    for i in range(len(LABELS)):
        for j in range(len(LABELS)):
            s = similarity(i, j)
            if i != j and LABELS[i] == LABELS[j] and s <= above:
                pulls.append(above - s)
            if LABELS[i] != LABELS[j] and s >= below:
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
    assert_same(term(x, LABELS), naive(lambda i, j: x[i] @ x[j], above, below, ratio), features)
    peer = ThresholdConsistentMarginLoss(margin_plus=above, margin_minus=below, lambda_minus=ratio)
    assert_same(term(x, LABELS), peer(x, LABELS), features)
    assert torch.autograd.gradcheck(lambda features: term(normalize(features, dim=1), LABELS), features)


def test_a_distance_is_counted_in_units_of_a_cosine(features):
    sheet = Lorentz(3, curvature=-0.5).double()
    points = sheet.from_features(features)
    unrelated = sheet.unrelated_distance()
    found = ThresholdConsistency(sheet)(points, LABELS)
    expected = naive(lambda i, j: 1 - sheet.paired_distance(points[i], points[j]) / unrelated, 0.9, 0.5, 1.0)
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
