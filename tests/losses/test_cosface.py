import pytest
import torch
from pytorch_metric_learning.losses import CosFaceLoss
from torch import Tensor

from dmlkit.losses import CosFace
from dmlkit.manifolds import Sphere


def naive(x: Tensor, labels: Tensor, proxies: Tensor, scale: float, margin: float) -> Tensor:
    """Wang et al., eq. 4."""
    total = torch.zeros((), dtype=x.dtype)
    for i in range(len(x)):
        own = torch.exp(scale * (x[i] @ proxies[labels[i]] - margin))
        others = [torch.exp(scale * (x[i] @ proxies[c])) for c in range(len(proxies)) if c != labels[i]]
        total = total - torch.log(own / (own + sum(others)))
    return total / len(x)


@pytest.mark.parametrize(("scale", "margin"), [(64.0, 0.35), (3.0, 0.0)])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_equation(agree, scale: float, margin: float, chunk_size: int | None):
    loss = CosFace(Sphere(5), 6, scale=scale, margin=margin, chunk_size=chunk_size).double()
    agree(loss, lambda x, y, p: naive(x, y, p, scale, margin))


def test_peer(agree_with_peer):
    loss, peer = CosFace(Sphere(5), 6).double(), CosFaceLoss(6, 5).double()
    agree_with_peer(loss, peer, peer.W, lambda proxies: proxies.T)
