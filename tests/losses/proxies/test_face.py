"""The face that the engine shows to losses over proxies: closed forms against plain ones, and losses written anew."""

import re
from typing import Annotated, Any

import pytest
import torch
from pydantic import PositiveFloat, TypeAdapter
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from dmlkit.component import one_of
from dmlkit.losses.base import LossConfig
from dmlkit.losses.proxies.classes import Block
from dmlkit.losses.proxies.proxy_loss import ClassSumLoss, ProxyLoss
from dmlkit.losses.proxies.softmax import SoftmaxLoss
from dmlkit.manifolds import Sphere
from dmlkit.manifolds.base import Manifold
from tests.conftest import ROOT

CLASSES, DIM = 7, 5
LABELS = torch.tensor([3, 3, 6, 0, 6, 0, 3, 1, 5, 3])  # 2 and 4 do not occur


class ProxyHinge(ClassSumLoss, name="example_proxy_hinge"):
    r"""A hinge on proxies: an example of a new loss.

    Every row is as near as delta to the proxy of its class, and no nearer than 0 to any other.

    .. math:: \frac{1}{B} \sum_i ( \max(0, \delta - s(x_i, p_{y_i})) + \sum_{c \ne y_i} \max(0, s(x_i, p_c)) )
    """

    margin: PositiveFloat = 0.5
    """delta, in similarity units."""

    def class_terms(self, block: Block) -> Tensor:
        gaps = torch.where(block.own, self.margin - block.similarity, block.similarity)  # (B, w)
        return gaps.relu().sum(0) / len(gaps)


LossConfig.variants.pop("example_proxy_hinge")  # so that no other test meets it; `registered` puts it back


class PlainSoftmax(SoftmaxLoss):
    """Cross-entropy of 20 s: an example of a loss with a softmax."""

    def logits(self, block: Block) -> Tensor:
        return 20 * block.similarity


class ScaledSoftmax(SoftmaxLoss):
    """The same by a logit scale."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.logit_scale = 20.0


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a member of the family, for one test."""
    monkeypatch.setitem(LossConfig.variants, "example_proxy_hinge", ProxyHinge.Config)
    return LossConfig.variants["example_proxy_hinge"]


def draw(seed: int, manifold: Manifold, labels: Tensor = LABELS) -> Tensor:
    """Points in float64, one for each label."""
    generator = torch.Generator().manual_seed(seed)
    return manifold.from_features(torch.randn(len(labels), DIM, generator=generator, dtype=torch.float64))


def hinge_in_loops(points: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
    total = points.new_zeros(())
    for x, label in zip(points, labels.tolist(), strict=True):
        for c, proxy in enumerate(proxies):
            gap = 0.3 - x @ proxy if c == label else x @ proxy
            total = total + (gap if gap > 0 else 0 * gap)
    return total / len(points)


@pytest.mark.parametrize("chunk_size", [1, 7, None])
def test_a_new_sum_over_classes_equals_loops(registered: Any, agree, batch, chunk_size: int | None):
    torch.manual_seed(0)
    loss = registered(margin=0.3, chunk_size=chunk_size).build(Sphere(DIM), 15).double()  # blocks of 7, 7 and 1
    agree(loss, hinge_in_loops)
    features, labels = batch
    points = loss.manifold.from_features(features)
    expected = hinge_in_loops(points, labels, normalize(loss.proxies, dim=1))
    with torch.no_grad():
        torch.testing.assert_close(loss(points, labels), expected)


@pytest.mark.parametrize("chunk_size", [1, 7, None])
@pytest.mark.parametrize("build", [PlainSoftmax, ScaledSoftmax])
def test_a_new_softmax_equals_cross_entropy(build: type[ProxyLoss], agree, batch, chunk_size: int | None):
    torch.manual_seed(0)
    loss = build(Sphere(DIM), 15, chunk_size=chunk_size).double()
    agree(loss, lambda points, labels, proxies: cross_entropy(20 * points @ proxies.T, labels))
    features, labels = batch
    points = loss.manifold.from_features(features)
    expected = cross_entropy(20 * points @ normalize(loss.proxies, dim=1).T, labels)
    with torch.no_grad():
        torch.testing.assert_close(loss(points, labels), expected)


@pytest.mark.parametrize("chunk_size", [1, 7, None])
@pytest.mark.parametrize("build", [ProxyHinge, PlainSoftmax])
def test_a_new_loss_of_sampled_classes_is_the_loss_of_these_alone(build: type[ProxyLoss], chunk_size: int | None):
    torch.manual_seed(0)
    sampled = build(Sphere(DIM), 40, chunk_size=chunk_size, negative_fraction=0.4).double()
    points = draw(0, sampled.manifold).requires_grad_()
    torch.manual_seed(5)
    chosen = sampled.classes(points, LABELS).chosen
    assert len(chosen) == 16 and set(LABELS.tolist()) <= set(chosen.tolist())
    alone = build(Sphere(DIM), 16, chunk_size=chunk_size).double()
    alone.proxies.data.copy_(sampled.proxies.data[chosen])
    expected = alone(points, torch.searchsorted(chosen, LABELS))
    torch.manual_seed(5)
    value = sampled(points, LABELS)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=0)
    to_points, to_proxies = torch.autograd.grad(value, (points, sampled.proxies))
    expected_gradients = torch.autograd.grad(expected, (points, alone.proxies))
    torch.testing.assert_close((to_points, to_proxies[chosen]), expected_gradients, rtol=1e-9, atol=1e-12)
    assert to_proxies.index_fill(0, chosen, 0).count_nonzero() == 0


def test_a_recipe_can_name_a_new_loss(registered: Any):
    adapter: TypeAdapter[LossConfig] = TypeAdapter(Annotated[LossConfig, one_of])
    config = adapter.validate_python({"name": "example_proxy_hinge", "margin": 0.3, "negative_fraction": 0.5})
    assert config == registered(margin=0.3, negative_fraction=0.5) and config.shares_classes
    assert isinstance(config.build(Sphere(DIM), CLASSES), ProxyHinge)


def test_all_of_proxy_anchor_is_in_at_most_5_files():
    """Its own file and the files below dmlkit/losses that it imports, directly or not."""
    found, left = set[str](), ["dmlkit.losses.proxy_anchor"]
    while left:
        text = ROOT.joinpath(*(name := left.pop()).split(".")).with_suffix(".py").read_text(encoding="utf-8")
        found.add(name)
        left += set(re.findall(r"from (dmlkit\.losses\.[\w.]+) import", text)) - found
    assert len(found) <= 5
