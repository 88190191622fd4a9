import pytest
import torch
from pytorch_metric_learning.losses import NormalizedSoftmaxLoss
from torch import Tensor

from dmlkit.losses import NormSoftmax
from dmlkit.manifolds import Sphere


def naive(x: Tensor, labels: Tensor, proxies: Tensor, temperature: float) -> Tensor:
    """Zhai & Wu, eq. 3."""
    total = torch.zeros((), dtype=x.dtype)
    for i in range(len(x)):
        logits = [x[i] @ proxies[c] / temperature for c in range(len(proxies))]
        total = total + torch.log(sum(torch.exp(logit) for logit in logits)) - logits[labels[i]]
    return total / len(x)


@pytest.mark.parametrize("temperature", [0.05, 1.0])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_equation(agree, temperature: float, chunk_size: int | None):
    loss = NormSoftmax(Sphere(5), 6, temperature=temperature, chunk_size=chunk_size).double()
    agree(loss, lambda x, y, p: naive(x, y, p, temperature))


def test_peer(agree_with_peer):
    loss, peer = NormSoftmax(Sphere(5), 6).double(), NormalizedSoftmaxLoss(6, 5).double()
    agree_with_peer(loss, peer, peer.W, lambda proxies: proxies.T)
