import pytest
import torch
from torch import Tensor

from dmlkit.losses import MPA, ProxyAnchor
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


@pytest.mark.parametrize("kind", ["softmax", "max", "mean"])
def test_one_proxy_a_class_is_proxy_anchor(batch, kind: str):
    features, labels = batch
    sphere = Sphere(5)
    mpa = MPA(sphere, 6, proxies_per_class=1, class_similarity=kind, regularizer_weight=0.0).double()
    anchor = ProxyAnchor(sphere, 6).double()
    anchor.proxies.data.copy_(mpa.proxies[:, 0])
    results = []
    for loss in (mpa, anchor):
        points = sphere.from_features(features).requires_grad_()
        value = loss(points, labels)
        value.backward()
        results.append((value.detach(), points.grad, loss.proxies.grad.view(6, 5)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)


def test_merged_proxies_have_a_finite_gradient():
    loss = MPA(Sphere(3), 2, proxies_per_class=2)
    loss.proxies.data[:, 1] = loss.proxies.data[:, 0]
    loss(torch.eye(3), torch.tensor([0, 1, 1])).backward()
    assert loss.proxies.grad is not None and loss.proxies.grad.isfinite().all()
