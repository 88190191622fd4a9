"""The face that the engine shows to losses over proxies: closed forms against plain ones, and losses written anew."""

import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
from pydantic import PositiveFloat, TypeAdapter
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from dmlkit.component import one_of
from dmlkit.losses import Grouplet, proxy_anchor, proxy_isa
from dmlkit.losses.base import LossConfig
from dmlkit.losses.mpa import MPA
from dmlkit.losses.proxies.centers import center_regularizer
from dmlkit.losses.proxies.classes import Block, ClosedForm, GradientSums, Terms
from dmlkit.losses.proxies.proxy_loss import ClassSumLoss, ProxyLoss
from dmlkit.losses.proxies.softmax import SoftmaxLoss
from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.manifolds.base import Manifold
from tests.conftest import ROOT

CLASSES, DIM = 7, 5
LABELS = torch.tensor([3, 3, 6, 0, 6, 0, 3, 1, 5, 3])  # 2 and 4 do not occur
MANIFOLDS: dict[str, Callable[[], Manifold]] = {
    "sphere": lambda: Sphere(DIM),
    "negative distance": lambda: Euclidean(DIM, similarity="negative_distance"),
}
CLOSED = sorted(
    name for name, variant in LossConfig.variants.items() if issubclass(variant.component, proxy_anchor.ProxyAnchor)
)
CASES: list[tuple[str, dict[str, Any], int]] = [
    *((name, {}, 0) for name in CLOSED),
    ("proxy_isa", {"sensitivity": 0.1, "search_margin": 0.0}, 2),  # many below the search interval, so many w- < 1
    ("grouplet", {"group_size": 5}, 0),
    ("grouplet", {"scope": "batch"}, 0),
    ("mpa", {"transport": {"group_size": 3}}, 0),
]


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


def build_case(name: str, options: dict[str, Any], epoch: int, manifold: Manifold) -> ProxyLoss:
    """A loss in float64, always with the same proxies and groups; in epoch 2 with a memory of epoch 1."""
    torch.manual_seed(0)
    loss = LossConfig.variants[name](**options).build(manifold, CLASSES).double()
    if epoch == 2:
        loss.set_epoch(1)
        with torch.no_grad():
            for seed in range(1, 5):
                loss(draw(seed, manifold), LABELS)
        assert (loss.informative.memory.labels >= 0).sum() == 4 * len(LABELS)
        loss.set_epoch(2)
    return loss


def test_the_losses_with_a_closed_form_are_found():
    assert {"grouplet", "mpa", "proxy_anchor", "proxy_isa"} <= set(CLOSED)


def plain_terms(
    block: Block,
    scale: float,
    margin: float,
    pull_factor: Tensor | None = None,
    push_factor: Tensor | None = None,
    own_weights: Tensor | None = None,
    other_weights: Tensor | None = None,
) -> Tensor:
    """The formula of `anchor_terms`, whose gradient autograd computes."""
    own = 1 if own_weights is None else own_weights[:, None]
    others = 1 if other_weights is None else other_weights
    pull = ((-scale * own * (block.similarity - margin)).exp() * block.own).sum(0).log1p()
    push = ((scale * others * (block.similarity + margin)).exp() * ~block.own).sum(0).log1p()
    pull_factor = 1 / block.classes.in_batch if pull_factor is None else pull_factor
    return pull * pull_factor + push * (1 / block.classes.total if push_factor is None else push_factor)


def plain_push_terms(loss: Grouplet, block: Block, grouping: list[Tensor], factor: float) -> Tensor:
    """The negative terms of a grouplet, whose gradient autograd computes."""
    exponentials = (loss.scale * (block.similarity + loss.margin)).exp() * ~block.own
    return factor * torch.stack([exponentials[images].sum(1).log1p().sum(0) for images in grouping]).sum(0)


def plain_mpa_terms(loss: MPA, block: Block) -> Tensor:
    """The terms of MPA with its regularizer, whose gradient autograd computes in one."""
    terms = plain_terms(block, loss.scale, loss.margin).sum()
    return terms + center_regularizer(loss.manifold, block, loss.regularizer_weight)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("scale", [2.0, 32.0])  # at 32 a negative distance of 1 counts e^-32: pushes are lost in pulls
@pytest.mark.parametrize("space", MANIFOLDS)
@pytest.mark.parametrize(("name", "options", "epoch"), CASES, ids=["-".join([name, *keys]) for name, keys, _ in CASES])
def test_closed_form_equals_plain_form(
    name: str,
    options: dict[str, Any],
    epoch: int,
    space: str,
    scale: float,
    chunk_size: int | None,
    monkeypatch: pytest.MonkeyPatch,
):
    manifold = MANIFOLDS[space]()
    calls: list[bool] = []
    add_terms = GradientSums.add_terms

    def note(sums: GradientSums, block: Block, terms: Terms) -> Tensor:
        calls.append(isinstance(terms, ClosedForm))
        return add_terms(sums, block, terms)

    monkeypatch.setattr(GradientSums, "add_terms", note)
    results: list[tuple[Tensor, ...]] = []
    for is_closed in (True, False):
        if not is_closed:
            monkeypatch.setattr(proxy_anchor, "anchor_terms", plain_terms)
            monkeypatch.setattr(proxy_isa, "anchor_terms", plain_terms)
            monkeypatch.setattr(MPA, "class_terms", plain_mpa_terms)
            monkeypatch.setattr(Grouplet, "_push_terms", plain_push_terms)
        loss = build_case(name, options | {"scale": scale, "chunk_size": chunk_size}, epoch, manifold)
        points = draw(0, manifold).requires_grad_()
        calls.clear()
        value = loss(points, LABELS)
        assert any(calls) == is_closed
        results.append((value.detach(), *torch.autograd.grad(value, (points, loss.proxies))))
        if epoch == 2:  # the weights count
            assert not torch.isclose(value, loss.over(loss.classes(points, LABELS)), rtol=1e-6)
    assert all(result.abs().sum() > 0 for result in results[0])
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)


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


def test_the_example_is_gone_where_it_was_not_asked_for():
    assert "example_proxy_hinge" not in LossConfig.variants


def test_a_new_loss_takes_at_most_15_lines():
    assert len(inspect.getsource(ProxyHinge).splitlines()) <= 15


def test_all_of_proxy_anchor_is_in_at_most_5_files():
    """Its own file and the files below dmlkit/losses that it imports, directly or not."""
    found, left = set[str](), ["dmlkit.losses.proxy_anchor"]
    while left:
        text = ROOT.joinpath(*(name := left.pop()).split(".")).with_suffix(".py").read_text(encoding="utf-8")
        found.add(name)
        left += set(re.findall(r"from (dmlkit\.losses\.[\w.]+) import", text)) - found
    assert len(found) <= 5
