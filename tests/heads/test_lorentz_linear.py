"""The Lorentz-linear head against geoopt's operations, one by one."""

from itertools import product

import geoopt
import pytest
import torch
from mpmath import matrix, mp, mpf
from torch import Tensor

from dmlkit.heads import LorentzLinear, MobiusLinear
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


def log_map(projected: Tensor, bias: Tensor, curvature: float, clip_distance: float | None) -> list[float]:
    """log_0 of W h moved by b, in 50 digits: by the Möbius sum in coordinates of the ball (Ganea et al.)."""
    root, border = mp.sqrt(-mpf(curvature)), 2 * mp.atanh(1 - mpf("4e-3"))  # units of 1 / root; as far as points go

    def cut(vector: matrix, length: mpf) -> matrix:
        return vector * min(mpf(1), length / mp.norm(vector))

    def exponential(vector: matrix) -> matrix:
        return vector * (mp.tanh(mp.norm(vector) / 2) / mp.norm(vector))

    longest = border if clip_distance is None else min(border, clip_distance * root)
    x = exponential(cut(root * matrix(projected.tolist()), longest))
    y = exponential(cut(root * matrix(bias.tolist()), border))
    dot, xx, yy = (sum(a * b for a, b in zip(*pair, strict=True)) for pair in ((x, y), (x, x), (y, y)))
    total = ((1 + 2 * dot + yy) * x + (1 - xx) * y) / (1 + 2 * dot + xx * yy)
    moved = cut(total * (2 * mp.atanh(mp.norm(total)) / mp.norm(total)), border)
    return [float(value / root) for value in moved]


@pytest.mark.parametrize(("curvature", "clip_distance"), [*product((-0.1, -1.0, -4.0), (None, 2.3))])
def test_it_is_the_moebius_head_and_the_closed_form_for_features_of_any_length(
    curvature: float, clip_distance: float | None
):
    """In float32, with W as it starts and one that brings long features back, short and long biases."""
    torch.manual_seed(0)
    sheet = LorentzLinear(6, Lorentz(4, curvature=curvature, clip_distance=clip_distance))
    ball = MobiusLinear(6, Poincare(4, curvature=curvature, clip_distance=clip_distance))
    weight, direction = sheet.linear.weight.detach().clone(), torch.nn.functional.normalize(torch.randn(4), dim=0)
    lengths = torch.tensor([1e-3, 0.3, 1.0, 5.0, 26.0, 100.0])
    features = lengths[:, None] * torch.nn.functional.normalize(torch.randn(6, 6), dim=1)
    for shrink, bias in product((1.0, 0.02), (0.01, 0.5, 3.0)):
        parameters = {"linear.weight": shrink * weight, "bias": bias * direction}
        sheet.load_state_dict(parameters, strict=False)
        ball.load_state_dict(parameters, strict=False)
        with torch.no_grad():
            ours, others = (head.manifold.to_features(head(features)) for head in (sheet, ball))
            projected = features.double() @ parameters["linear.weight"].double().T
        with mp.workdps(50):
            rows = [log_map(row, parameters["bias"].double(), curvature, clip_distance) for row in projected]
        expected = torch.tensor(rows)
        torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(others, expected, atol=2e-4, rtol=2e-4)


def test_the_ball_is_refused():
    with pytest.raises(ValueError, match="expected the hyperboloid, got Poincare"):
        LorentzLinear(6, Poincare(4))
