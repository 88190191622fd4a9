import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.regularizers import GraphConsistency

LABELS = torch.tensor([5, 5, 0, 0, 2, 2] * 2)  # two draws, class-aligned


def naive(x, sigma):
    """Eq. 3 element by element, X' and X'' being the halves of the batch."""
    propagated = []
    for draw in x.chunk(2):
        rows = [sum((-(a - b).square().sum() / sigma).exp() * b for b in draw) for a in draw]
        propagated.append(torch.stack(rows))
    difference = propagated[0] - propagated[1]
    return sum(entry**2 for entry in difference.flatten()) ** 0.5


@pytest.mark.parametrize("sigma", [1.0, 0.3, 5.0])
@pytest.mark.parametrize("manifold", [Sphere(4), Euclidean(4)])
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


def graphs_of(x, sigma):
    return [[[(-(a - b).square().sum() / sigma).exp().item() for b in draw] for a in draw] for draw in x.chunk(2)]


@pytest.mark.parametrize("sigma", [1.0, 0.3])
def test_equations_1_and_2_by_numpy(sigma):
    x = torch.randn(
        12, 8, dtype=torch.float64
    )  # more dimensions than places: X' has a right inverse, as the proof asks
    first, second = np.array(graphs_of(x, sigma))
    equation_1 = ((first - second) ** 2).sum()
    one, two = x.chunk(2)
    inverse, residual = np.linalg.norm(np.linalg.pinv(one.numpy())), np.linalg.norm((two - one).numpy())
    equation_2 = (naive(x, sigma).item() + np.linalg.norm(second) * residual) * inverse
    graphs, bound = (GraphConsistency(Euclidean(8), bandwidth=sigma, form=form) for form in ("graphs", "bound"))
    assert graphs(x, LABELS).item() == pytest.approx(equation_1, rel=1e-9)
    assert bound(x, LABELS).item() == pytest.approx(equation_2, rel=1e-9)
    assert equation_2 >= equation_1**0.5
    for term in (graphs, bound):
        assert torch.autograd.gradcheck(lambda x, term=term: term(x, LABELS), x.clone().requires_grad_())


@pytest.mark.parametrize("form", ["graphs", "bound"])
def test_a_place_without_counterpart_is_left_out_of_every_form(form):
    x, labels = torch.randn(5, 8, dtype=torch.float64), torch.tensor([7, 3, 7, 3, 3])
    term = GraphConsistency(Euclidean(8), form=form, relative_bandwidth=True)
    kept = torch.tensor([0, 1, 2, 3])  # the last image of class 3 has none
    torch.testing.assert_close(term(x, labels), term(x[kept], labels[kept]))


def test_a_relative_bandwidth_is_that_of_features_of_any_length():
    x = torch.randn(12, 4, dtype=torch.float64)
    within = [torch.pdist(draw).square() for draw in x.chunk(2)]
    median = torch.cat([torch.cat([pairs, pairs]) for pairs in within]).median().item()
    relative = GraphConsistency(Euclidean(4), bandwidth=0.5, relative_bandwidth=True)
    torch.testing.assert_close(relative(x, LABELS), naive(x, 0.5 * median), rtol=1e-9, atol=0)
    torch.testing.assert_close(relative(30 * x, LABELS), 30 * relative(x, LABELS), rtol=1e-9, atol=0)


@pytest.mark.parametrize("form", ["propagated", "graphs", "bound"])
@pytest.mark.parametrize("x", [torch.zeros(12, 4), torch.ones(12, 4), torch.randn(6, 4).repeat(2, 1)])
def test_degenerate_batches_have_finite_gradients_in_every_form(form, x):
    x = x.clone().requires_grad_()
    value = GraphConsistency(Euclidean(4), form=form, relative_bandwidth=True)(x, LABELS)
    value.backward()
    assert value.isfinite() and x.grad.isfinite().all()


def test_equal_draws_give_zero_with_a_zero_gradient():
    for x in (torch.zeros(12, 4), torch.ones(12, 4), torch.randn(6, 4).repeat(2, 1)):
        x.requires_grad_()
        value = GraphConsistency(Euclidean(4))(x, LABELS)
        value.backward()
        assert value == 0
        assert x.grad.abs().max() == 0


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


def test_images_without_a_counterpart_are_left_out():
    torch.manual_seed(0)
    x = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([9, 9, 0, 0, 2, 9, 9, 0, 0, 9, 4])  # of 9 the last, of 2 and 4 the only ones
    term = GraphConsistency(Euclidean(4))
    draws = [0, 1, 2, 3, 5, 6, 7, 8]
    value, expected = term(x, labels), naive(x[draws], 1.0)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, x), torch.autograd.grad(expected, x))
    assert term(x[:1], labels[:1]) == 0
