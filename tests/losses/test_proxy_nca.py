import pytest
import torch
from pytorch_metric_learning.losses import ProxyNCALoss
from torch import Tensor

from dmlkit.losses import ProxyNCA
from dmlkit.manifolds import Sphere


def naive(x: Tensor, labels: Tensor, proxies: Tensor, scale: float, positive: bool, squared: bool) -> Tensor:
    """Movshovitz-Attias et al., eq. 4, with a scale."""
    total = torch.zeros((), dtype=x.dtype)
    for i in range(len(x)):
        denominator = torch.zeros((), dtype=x.dtype)
        for c in range(len(proxies)):
            similarity = -(x[i] - proxies[c]).square().sum() if squared else x[i] @ proxies[c]
            if c == labels[i]:
                numerator = torch.exp(scale * similarity)
            if positive or c != labels[i]:
                denominator = denominator + torch.exp(scale * similarity)
        total = total - torch.log(numerator / denominator)
    return total / len(x)


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("similarity", ["cosine", "negative_squared_distance"])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_equation(agree, positive: bool, similarity: str, chunk_size: int | None):
    sphere = Sphere(5, similarity=similarity)
    loss = ProxyNCA(sphere, 6, scale=5.0, positive_in_denominator=positive, chunk_size=chunk_size).double()
    squared = similarity == "negative_squared_distance"  # 1 - |x - p|^2 / 2 to the loss: the paper's has half the scale
    agree(loss, lambda x, y, p: naive(x, y, p, 2.5 if squared else 5.0, positive, squared))


def test_peer_on_squared_distances_is_twice_the_scale_on_cosines(agree_with_peer):
    loss, peer = ProxyNCA(Sphere(5), 6, scale=18.0).double(), ProxyNCALoss(6, 5, softmax_scale=9).double()
    agree_with_peer(loss, peer, peer.proxies, lambda proxies: proxies)


def test_negatives_only_can_be_negative():
    loss = ProxyNCA(Sphere(2), 2, scale=1.0, positive_in_denominator=False)
    loss.proxies.data.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    assert loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0])).item() == pytest.approx(-2)


def test_a_single_class_has_no_negatives():
    with pytest.raises(ValueError, match="positive_in_denominator=False needs at least 2 classes, got 1"):
        ProxyNCA(Sphere(2), 1, positive_in_denominator=False)
    assert ProxyNCA(Sphere(2), 1)(torch.tensor([[1.0, 0.0]]), torch.tensor([0])).item() == 0
