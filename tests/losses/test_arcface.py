from math import degrees, pi

import pytest
import torch
from pytorch_metric_learning.losses import ArcFaceLoss, SubCenterArcFaceLoss
from torch import Tensor

from dmlkit.losses import ArcFace
from dmlkit.manifolds import Sphere


def naive(x: Tensor, labels: Tensor, proxies: Tensor, scale: float, margin: float) -> Tensor:
    """Deng et al., eq. 3, by the angle itself, to the nearest center of each class."""
    total = torch.zeros((), dtype=x.dtype)
    for i in range(len(x)):
        cosines = [max(x[i] @ center for center in centers.view(-1, x.shape[1])) for centers in proxies]
        angle = torch.acos(cosines[labels[i]])
        turned = (
            torch.cos(angle + margin)
            if angle + margin <= pi
            else torch.cos(angle) - margin * torch.sin(torch.tensor(margin, dtype=x.dtype))
        )
        own = torch.exp(scale * turned)
        others = [torch.exp(scale * cosines[c]) for c in range(len(proxies)) if c != labels[i]]
        total = total - torch.log(own / (own + sum(others)))
    return total / len(x)


@pytest.mark.parametrize(("scale", "margin"), [(64.0, 0.5), (3.0, 2.0)])
@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("centers", [1, 3])
def test_equation(agree, scale: float, margin: float, chunk_size: int | None, centers: int):
    options = {"scale": scale, "margin": margin, "centers_per_class": centers, "chunk_size": chunk_size}
    loss = ArcFace(Sphere(5), 6, **options).double()
    agree(loss, lambda x, y, p: naive(x, y, p, scale, margin))


def test_peer(agree_with_peer):
    loss, peer = ArcFace(Sphere(5), 6, margin=0.5).double(), ArcFaceLoss(6, 5, margin=degrees(0.5)).double()
    agree_with_peer(loss, peer, peer.W, lambda proxies: proxies.T)


def test_peer_of_sub_centers(agree_with_peer):
    loss = ArcFace(Sphere(5), 6, margin=0.5, centers_per_class=3).double()
    peer = SubCenterArcFaceLoss(num_classes=6, embedding_size=5, margin=degrees(0.5), sub_centers=3).double()
    agree_with_peer(loss, peer, peer.W, lambda proxies: proxies.flatten(0, 1).T)


def test_equal_centers_are_one_center(batch):
    features, labels = batch
    sphere = Sphere(5)
    one, three = ArcFace(sphere, 6).double(), ArcFace(sphere, 6, centers_per_class=3).double()
    three.proxies.data.copy_(one.proxies.data[:, None].expand(-1, 3, -1))
    values = [loss(sphere.from_features(features), labels) for loss in (one, three)]
    torch.testing.assert_close(*values, rtol=1e-12, atol=0)
    (of_one,), (of_three,) = (
        torch.autograd.grad(value, loss.proxies) for value, loss in zip(values, (one, three), strict=True)
    )
    torch.testing.assert_close(of_three.sum(1), of_one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cosine", [1.0, -1.0])
def test_gradient_is_finite_on_the_proxy_and_opposite_to_it(cosine: float):
    loss = ArcFace(Sphere(2), 2)
    loss.proxies.data.copy_(torch.eye(2))
    points = torch.tensor([[cosine, 0.0]], requires_grad=True)
    loss(points, torch.tensor([0])).backward()
    assert points.grad is not None and points.grad.isfinite().all()
