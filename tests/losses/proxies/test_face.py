"""The face that the engine shows to losses over proxies: closed forms against plain ones, and losses written anew."""

import re

import pytest
import torch
from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from dmlkit.losses.proxies.classes import Block
from dmlkit.losses.proxies.proxy_loss import ClassSumLoss
from dmlkit.losses.proxies.softmax import SoftmaxLoss
from dmlkit.manifolds import Sphere
from tests.conftest import ROOT


class ProxyHinge(ClassSumLoss):
    """A row is as near as the margin to the proxy of its class, and no nearer than 0 to any other."""

    margin: PositiveFloat = 0.5

    def class_terms(self, block: Block) -> Tensor:
        gaps = torch.where(block.is_own, self.margin - block.similarity, block.similarity)  # (B, w)
        return gaps.relu().sum(0) / len(gaps)


class PlainSoftmax(SoftmaxLoss):
    """Cross-entropy of 20 s."""

    def logits(self, block: Block) -> Tensor:
        return 20 * block.similarity


def hinge_in_loops(points: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
    total = points.new_zeros(())
    for x, label in zip(points, labels.tolist(), strict=True):
        for c, proxy in enumerate(proxies):
            gap = 0.3 - x @ proxy if c == label else x @ proxy
            total = total + (gap if gap > 0 else 0 * gap)
    return total / len(points)


@pytest.mark.parametrize("chunk_size", [1, 7, None])
def test_a_new_sum_over_classes_equals_loops(agree, batch, chunk_size: int | None):
    torch.manual_seed(0)
    loss = ProxyHinge(Sphere(5), 15, margin=0.3, chunk_size=chunk_size).double()  # blocks of 7, 7 and 1
    agree(loss, hinge_in_loops)
    features, labels = batch
    points = loss.manifold.from_features(features)
    expected = hinge_in_loops(points, labels, normalize(loss.proxies, dim=1))
    with torch.no_grad():
        torch.testing.assert_close(loss(points, labels), expected)


@pytest.mark.parametrize("chunk_size", [1, 7, None])
def test_a_new_softmax_equals_cross_entropy(agree, batch, chunk_size: int | None):
    torch.manual_seed(0)
    loss = PlainSoftmax(Sphere(5), 15, chunk_size=chunk_size).double()
    agree(loss, lambda points, labels, proxies: cross_entropy(20 * points @ proxies.T, labels))
    features, labels = batch
    points = loss.manifold.from_features(features)
    expected = cross_entropy(20 * points @ normalize(loss.proxies, dim=1).T, labels)
    with torch.no_grad():
        torch.testing.assert_close(loss(points, labels), expected)


def test_all_of_proxy_anchor_is_in_at_most_5_files():
    """Its own file and the files below dmlkit/losses that it imports, directly or not."""
    found, left = set[str](), ["dmlkit.losses.proxy_anchor"]
    while left:
        text = ROOT.joinpath(*(name := left.pop()).split(".")).with_suffix(".py").read_text(encoding="utf-8")
        found.add(name)
        left += set(re.findall(r"from (dmlkit\.losses\.[\w.]+) import", text)) - found
    assert len(found) <= 5
