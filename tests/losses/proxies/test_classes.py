import pytest
import torch
from torch import Tensor, nn

from dmlkit.losses import MPA, ProxyAnchor, ProxyGML, ProxyISA, ProxyNCA, SoftTriple
from dmlkit.losses.base import Loss
from dmlkit.losses.proxies.similarity import (
    BLOCK_NUMBERS,
    KEPT_NUMBERS,
    automatic_block_size,
    may_wait,
    similarity_to,
)
from dmlkit.losses.proxy_gml import largest
from dmlkit.manifolds import Poincare, Sphere


class WarmSphere(Sphere):
    """A sphere with a learnable temperature, which the walks must pass a gradient to."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def similarity(self, x: Tensor, y: Tensor) -> Tensor:
        return super().similarity(x, y) / self.temperature


def losses(manifold: Sphere, chunk_size: int | None) -> list[Loss]:
    torch.manual_seed(0)
    return [
        ProxyAnchor(manifold, 30, chunk_size=chunk_size),
        MPA(manifold, 30, proxies_per_class=2, chunk_size=chunk_size),
        ProxyNCA(manifold, 30, chunk_size=chunk_size),
        SoftTriple(manifold, 30, centers_per_class=2, chunk_size=chunk_size),
        ProxyGML(manifold, 30, proxies_per_class=2, ratio=0.5, chunk_size=chunk_size),
    ]


def batch() -> tuple[Tensor, Tensor]:
    points = nn.functional.normalize(torch.randn(12, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    return points.requires_grad_(), torch.arange(12) // 3


@pytest.mark.parametrize("chunk_size", [1, 7, None])
@pytest.mark.parametrize("index", range(5))
def test_a_learnable_manifold_gets_its_gradient(index: int, chunk_size: int | None):
    points, labels = batch()
    loss = losses(WarmSphere(8), chunk_size)[index].double()
    temperature = loss.manifold.temperature
    points = points.detach().double()
    (gradient,) = torch.autograd.grad(loss(points, labels), temperature)
    step = 1e-6
    values = []
    for sign in (1, -1):
        temperature.data.add_(sign * step)
        values.append(loss(points, labels).item())
        temperature.data.sub_(sign * step)
    assert gradient.item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6)


@pytest.mark.parametrize("chunk_size", [7, None])
@pytest.mark.parametrize("index", range(5))
def test_a_backward_pass_under_autocast_is_computed_in_full(index: int, chunk_size: int | None):
    points, labels = batch()
    loss = losses(Sphere(8), chunk_size)[index]
    gradients: list[Tensor] = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            gradients += torch.autograd.grad(loss(points, labels), points)
    assert torch.equal(*gradients)


def test_similarities_are_kept_only_where_they_are_small():
    sphere = Sphere(8)
    points = torch.randn(12, 8)
    few, many = torch.empty(30, 8), torch.empty(1, 8).expand(KEPT_NUMBERS // 8, 8)
    cosine, distance = (similarity_to(manifold, None) for manifold in (sphere, Poincare(8)))
    for measure in (cosine, distance):
        assert may_wait(measure, points, few) and not may_wait(measure, points, many)
    assert may_wait(cosine, points[:8], many)  # no more than the proxies and their gradient
    assert not may_wait(distance, points[:8], many)  # a graph would wait, too
    labels = torch.zeros(12, dtype=torch.int64)
    assert ProxyAnchor(sphere, 30).classes(points, labels).keep
    assert not ProxyAnchor(sphere, 30, chunk_size=7).classes(points, labels).keep  # who asks for it wants little memory


def test_blocks_are_as_few_as_the_limit_allows_and_of_equal_size():
    limit = BLOCK_NUMBERS["cpu"] // 512
    for classes, size in ((100, 100), (limit, limit), (limit + 1, limit // 2 + 1), (3 * limit - 1, limit)):
        assert automatic_block_size(torch.empty(180, 512), torch.empty(1, 512).expand(classes, 512)) == size
    assert automatic_block_size(torch.empty(1024, 8), torch.empty(1, 4, 8).expand(limit, 4, 8)) == limit // 8


def test_gradients_of_the_gradient_are_refused():
    points, labels = batch()
    for loss in losses(Sphere(8), None):
        with pytest.raises(RuntimeError, match="second derivatives"):
            torch.autograd.grad(loss(points, labels), points, create_graph=True)


@pytest.mark.parametrize("sizes", [[1, 2], [7, 30]])
def test_the_largest_are_those_of_a_sorted_row(sizes: list[int]):
    values = torch.randn(6, 30, generator=torch.Generator().manual_seed(0))
    for count in sizes:
        assert torch.equal(largest(values, count).sort().values, values.sort().values[:, 30 - count :])


@pytest.mark.parametrize("loss", [ProxyISA(Sphere(8), 30), ProxyGML(Sphere(8), 30, proxies_per_class=2, ratio=0.5)])
def test_similarities_computed_once_give_the_numbers_of_those_computed_twice(loss: Loss, monkeypatch):
    points, labels = batch()
    loss.set_epoch(2)
    found: list[Tensor] = []
    for once in (True, False):
        with monkeypatch.context() as patch:
            if not once:
                patch.setattr(f"{type(loss).__module__}.computed_once", lambda classes: classes)
            before = {name: value.clone() for name, value in loss.state_dict().items()}
            value = loss(points, labels)
            leaves = (points, loss.proxies)
            found += [value, *torch.autograd.grad(value, leaves, retain_graph=True)]
            found += torch.autograd.grad(value, leaves)  # a second backward pass computes them anew
            loss.load_state_dict(before)
    for one, other in zip(found[:5], found[5:], strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(*pair) for pair in zip(found[1:3], found[3:5], strict=True))
