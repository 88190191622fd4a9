import pytest
import torch
from pytorch_metric_learning.losses import SoftTripleLoss
from torch import Tensor

from dmlkit.losses import SoftTriple
from dmlkit.manifolds import Sphere


def naive(x: Tensor, labels: Tensor, centers: Tensor, options: dict[str, float], tau: float) -> Tensor:
    """Saeki et al., eq. 1-4, with the mean over the batch of Qian et al., eq. 10."""
    lam, gamma, delta = options["scale"], options["gamma"], options["margin"]
    classes, per_class = centers.shape[:2]

    def similarity(i: int, c: int) -> Tensor:
        s = [x[i] @ centers[c, k] for k in range(per_class)]
        total = sum(torch.exp(s_k / gamma) for s_k in s)
        return sum(torch.exp(s_k / gamma) / total * s_k for s_k in s)

    loss = torch.zeros((), dtype=x.dtype)
    for i in range(len(x)):
        own = torch.exp(lam * (similarity(i, int(labels[i])) - delta))
        others = sum(torch.exp(lam * similarity(i, c)) for c in range(classes) if c != labels[i])
        loss = loss - torch.log(own / (own + others)) / len(x)
    for c in range(classes):
        for s in range(per_class):
            for t in range(s + 1, per_class):
                distance = torch.sqrt(2 - 2 * centers[c, s] @ centers[c, t])
                loss = loss + tau * distance / (classes * per_class * (per_class - 1))
    return loss


OPTIONS = {"scale": 20.0, "gamma": 0.1, "margin": 0.01}


@pytest.mark.parametrize("per_class", [1, 2, 4])
@pytest.mark.parametrize("tau", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_equation(agree, per_class: int, tau: float, chunk_size: int | None):
    loss = SoftTriple(
        Sphere(5), 6, centers_per_class=per_class, regularizer_weight=tau, chunk_size=chunk_size, **OPTIONS
    ).double()
    agree(loss, lambda x, y, w: naive(x, y, w, OPTIONS, tau))


def test_peer(agree_with_peer):
    loss = SoftTriple(Sphere(5), 6, centers_per_class=3, regularizer_weight=0.0).double()
    peer = SoftTripleLoss(6, 5, centers_per_class=3).double()
    agree_with_peer(loss, peer, peer.fc, lambda centers: centers.flatten(0, 1).T)
