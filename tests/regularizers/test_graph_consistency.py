import pytest
import torch
from torch.nn.functional import normalize

from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.regularizers import GraphConsistency, GraphConsistencyConfig
from dmlkit.regularizers.graph_consistency import aligned_halves

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


def test_is_the_norm_and_not_its_square():
    x = torch.randn(4, 3, dtype=torch.float64) * 100  # so far apart that S is the identity
    labels = torch.tensor([0, 1, 0, 1])
    value = GraphConsistency(Euclidean(3))(x, labels)
    torch.testing.assert_close(value, torch.linalg.matrix_norm(x[:2] - x[2:]))


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


def test_the_batches_of_two_processes_may_be_joined():
    """Their draws interleave: X'_0 X''_0 X'_1 X''_1. The halves by class are still two draws."""
    torch.manual_seed(0)
    x = torch.randn(24, 4, dtype=torch.float64)
    labels = torch.cat([LABELS, LABELS + 10])
    first = torch.cat([torch.arange(6), torch.arange(12, 18)])
    in_halves = torch.cat([first, first + 6])
    term = GraphConsistency(Euclidean(4))
    torch.testing.assert_close(term(x, labels), naive(x[in_halves], 1.0))
    assert sorted(torch.cat(aligned_halves(labels)).tolist()) == list(range(24))


def test_an_odd_class_is_refused():
    with pytest.raises(
        ValueError, match="expected an even number of images of each class in a batch, got 3 of class 7"
    ):
        GraphConsistency(Sphere(4))(torch.randn(5, 4), torch.tensor([1, 7, 7, 1, 7]))


def test_says_that_it_needs_the_paired_sampler():
    (requirement,) = GraphConsistencyConfig().requirements()
    assert requirement.key == "sampler.name"
    assert requirement.allowed == ("paired",)
