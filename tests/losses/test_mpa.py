import pytest
import torch
from torch import Tensor

from dmlkit.losses import MPA
from dmlkit.manifolds import Sphere

ALPHA, DELTA, GAMMA = 32.0, 0.1, 0.1


def similarity(kind: str, s: list[Tensor]) -> Tensor:
    """Saeki et al., eq. 1, and the two alternatives of section 3.2."""
    if kind == "max":
        return max(s, key=lambda s_k: s_k.item())
    if kind == "mean":
        return sum(s) / len(s)
    total = sum(torch.exp(s_k / GAMMA) for s_k in s)
    return sum(torch.exp(s_k / GAMMA) / total * s_k for s_k in s)


def naive(x: Tensor, labels: Tensor, proxies: Tensor, kind: str, tau: float) -> Tensor:
    """Eq. 6, 3 and 7."""
    classes, per_class = proxies.shape[:2]
    present = set(labels.tolist())
    loss = torch.zeros((), dtype=x.dtype)
    for c in range(classes):
        own = others = torch.zeros((), dtype=x.dtype)
        for i in range(len(x)):
            s = similarity(kind, [x[i] @ proxies[c, k] for k in range(per_class)])
            if labels[i] == c:
                own = own + torch.exp(-ALPHA * (s - DELTA))
            else:
                others = others + torch.exp(ALPHA * (s + DELTA))
        loss = loss + torch.log(1 + own) / len(present) + torch.log(1 + others) / classes
        for s in range(per_class):
            for t in range(s + 1, per_class):
                distance = torch.sqrt(2 - 2 * proxies[c, s] @ proxies[c, t])
                loss = loss + tau * distance / (classes * per_class * (per_class - 1))
    return loss


@pytest.mark.parametrize("kind", ["softmax", "max", "mean"])
@pytest.mark.parametrize("per_class", [1, 2, 4])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_equation(agree, kind: str, per_class: int, chunk_size: int | None):
    loss = MPA(Sphere(5), 6, proxies_per_class=per_class, class_similarity=kind, chunk_size=chunk_size).double()
    agree(loss, lambda x, y, w: naive(x, y, w, kind, 0.2))
