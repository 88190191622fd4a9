"""The Lorentz-linear head against geoopt's operations, one by one."""

import geoopt
import pytest
import torch
from torch import Tensor

from dmlkit.heads import LorentzLinear
from dmlkit.manifolds import Lorentz, Poincare

CURVATURES = (-0.125, -1.0, -4.0)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(curvature: float, *, bias: bool = True) -> LorentzLinear:
    torch.manual_seed(0)
    head = LorentzLinear(6, Lorentz(4, curvature=curvature, clip_distance=None), bias=bias).double()
    if head.bias is not None:
        with torch.no_grad():
            head.bias.copy_(0.5 * random(4, seed=3))
    return head


@pytest.mark.parametrize("curvature", CURVATURES)
def test_it_is_geoopts_exponential_map_transport_and_exponential_map(curvature: float):
    head = layer(curvature)
    assert head.bias is not None
    sheet = geoopt.Lorentz(k=torch.tensor(-1 / curvature, dtype=torch.float64))
    features = 0.3 * random(20, 6)
    tangent = torch.nn.functional.pad(features @ head.linear.weight.T, (1, 0))
    inside = sheet.expmap0(tangent)
    moved = sheet.transp0(inside, torch.nn.functional.pad(head.bias, (1, 0)).expand_as(inside))
    torch.testing.assert_close(head(features), sheet.expmap(inside, moved), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_translation_moves_each_point_by_the_length_of_the_bias(curvature: float):
    head, features = layer(curvature), 0.3 * random(20, 6)
    assert head.bias is not None
    before = head.manifold.from_features(head.project(features))
    moved = head.manifold.paired_distance(before, head(features))
    torch.testing.assert_close(moved, head.bias.norm().expand(20), atol=0, rtol=1e-9)


def test_without_bias_it_is_an_exponential_map_behind_a_linear_layer():
    head, features = layer(-1.0, bias=False), random(12, 6)
    expected = head.manifold.from_features(features @ head.linear.weight.T)
    torch.testing.assert_close(head(features), expected)


def test_far_points_stay_on_the_sheet_with_a_finite_gradient():
    head = LorentzLinear(6, Lorentz(4, clip_distance=None))
    assert head.bias is not None
    with torch.no_grad():
        head.bias.fill_(50.0)
    features = (1e4 * random(8, 6).float()).requires_grad_()
    points = head(features)
    points.sum().backward()
    assert head.manifold.geometry.check_point_on_manifold(points.detach(), atol=1e-4)
    assert features.grad is not None and features.grad.isfinite().all()


def test_the_ball_is_refused():
    with pytest.raises(ValueError, match="expected the hyperboloid, got Poincare"):
        LorentzLinear(6, Poincare(4))
