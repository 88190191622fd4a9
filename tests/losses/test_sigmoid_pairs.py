import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from dmlkit.losses import SigmoidPairs
from dmlkit.manifolds import Sphere


def naive(x, labels, t, b):
    total = 0
    for i in range(len(x)):
        for j in range(len(x)):
            if i != j:
                sign = 1 if labels[i] == labels[j] else -1
                total = total + (1 + (-sign * (t * (x[i] @ x[j]) + b)).exp()).log()
    return total / len(x)


@pytest.mark.parametrize(("t", "b"), [(10.0, -10.0), (2.0, 0.5)])
def test_equals_the_double_loop(pair_batch, assert_equals, t, b):
    x, labels = pair_batch
    loss = SigmoidPairs(Sphere(4), scale=t, bias=b).double()
    assert_equals(lambda x: loss(x, labels), lambda x: naive(x, labels, loss.log_scale.detach().exp(), b), x)


def test_learns_scale_and_bias_by_the_gradient_of_a_logistic_regression(pair_batch):
    x, labels = pair_batch
    loss = SigmoidPairs(Sphere(4), scale=3.0, bias=-1.0).double()
    scale, bias = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (3.0, -1.0))
    pairs = ~torch.eye(12, dtype=torch.bool)
    same = (labels[:, None] == labels)[pairs].double()
    expected = binary_cross_entropy_with_logits(scale * (x @ x.T)[pairs] + bias, same, reduction="sum") / 12
    of_scale, of_bias = torch.autograd.grad(expected, (scale, bias))
    value = loss(x, labels)
    of_log_scale, of_own_bias = torch.autograd.grad(value, (loss.log_scale, loss.bias))
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)  # log_scale started in float32
    torch.testing.assert_close((of_log_scale, of_own_bias), (3 * of_scale, of_bias), rtol=1e-6, atol=0)


def test_a_single_image_has_no_loss_and_one_class_has_one():
    loss = SigmoidPairs(Sphere(4))
    points = normalize(torch.randn(5, 4), dim=1).requires_grad_()
    assert loss(points[:1], torch.tensor([0])).item() == 0
    (gradient,) = torch.autograd.grad(loss(points, torch.zeros(5, dtype=torch.int64)), points)
    assert gradient.abs().sum() > 0
