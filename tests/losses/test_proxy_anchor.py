from math import exp, log

import pytest
import torch
from pytorch_metric_learning.losses import ProxyAnchorLoss
from torch import Tensor

from dmlkit.losses import ProxyAnchor
from dmlkit.manifolds import Sphere


def naive(x: Tensor, labels: Tensor, proxies: Tensor, alpha: float, delta: float) -> Tensor:
    """Kim et al., eq. 4, term by term."""
    pull = push = torch.zeros((), dtype=x.dtype)
    present = set(labels.tolist())
    for c in range(len(proxies)):
        own = others = torch.zeros((), dtype=x.dtype)
        for i in range(len(x)):
            s = x[i] @ proxies[c]
            if labels[i] == c:
                own = own + torch.exp(-alpha * (s - delta))
            else:
                others = others + torch.exp(alpha * (s + delta))
        pull = pull + torch.log(1 + own)
        push = push + torch.log(1 + others)
    return pull / len(present) + push / len(proxies)


@pytest.mark.parametrize(("alpha", "delta"), [(32.0, 0.1), (4.0, 0.0), (1.0, 0.5)])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_equation(agree, alpha: float, delta: float, chunk_size: int | None):
    loss = ProxyAnchor(Sphere(5), 6, scale=alpha, margin=delta, chunk_size=chunk_size).double()
    agree(loss, lambda x, y, p: naive(x, y, p, alpha, delta))


def test_peer(agree_with_peer):
    loss, peer = ProxyAnchor(Sphere(5), 6).double(), ProxyAnchorLoss(6, 5).double()
    agree_with_peer(loss, peer, peer.proxies, lambda proxies: proxies)


def test_closed_form_of_one_image_on_its_proxy():
    loss = ProxyAnchor(Sphere(2), 2, scale=2.0, margin=0.25).double()
    loss.proxies.data.copy_(torch.eye(2))
    value = loss(torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([0]))
    assert value.item() == pytest.approx(log(1 + exp(-1.5)) + log(1 + exp(0.5)) / 2, rel=1e-12)


def test_frozen_parts_get_no_gradient_and_change_no_other():
    loss = ProxyAnchor(Sphere(3), 4, chunk_size=2)
    points, labels = loss.manifold.from_features(torch.randn(5, 3)), torch.arange(5) % 4
    learned = points.clone().requires_grad_()
    expected = torch.autograd.grad(loss(learned, labels), (learned, loss.proxies))
    (gradient,) = torch.autograd.grad(loss(points, labels), loss.proxies)
    torch.testing.assert_close(gradient, expected[1])
    loss.proxies.requires_grad_(False)
    torch.testing.assert_close(torch.autograd.grad(loss(learned, labels), learned)[0], expected[0])


def test_embeddings_of_another_dtype_are_refused():
    loss = ProxyAnchor(Sphere(3), 4)
    with pytest.raises(ValueError, match=r"proxies' dtype torch.float32, got torch.float64"):
        loss(torch.eye(3, dtype=torch.float64), torch.arange(3))
