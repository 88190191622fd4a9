"""Every head on every manifold: points of the manifold, finite gradients, full precision under autocast."""

import pytest
import torch

from dmlkit.heads.base import HeadConfig
from dmlkit.manifolds.base import ManifoldConfig


@pytest.fixture(
    params=[(head, manifold) for head in sorted(HeadConfig.variants) for manifold in sorted(ManifoldConfig.variants)]
)
def parts(request: pytest.FixtureRequest) -> tuple[HeadConfig, ManifoldConfig]:
    head, manifold = HeadConfig.variants[request.param[0]](), ManifoldConfig.variants[request.param[1]]()
    for requirement in head.requirements():
        if requirement.key == "manifold.name" and manifold.name not in requirement.allowed:
            pytest.skip(f"{head.name} needs another manifold: {requirement.reason}")
    return head, manifold


def test_outputs_are_points(parts: tuple[HeadConfig, ManifoldConfig]):
    torch.manual_seed(0)
    manifold = parts[1].build(6)
    points = parts[0].build(10, manifold)(torch.randn(40, 10) * 3)
    assert points.shape == (40, manifold.point_dim) and points.dtype == torch.float32
    assert manifold.geometry.check_point_on_manifold(points, atol=1e-4)


def test_gradients_are_finite_also_at_zero_features(parts: tuple[HeadConfig, ManifoldConfig]):
    torch.manual_seed(0)
    head = parts[0].build(10, parts[1].build(6))
    features = torch.cat([torch.zeros(1, 10), torch.randn(3, 10)]).requires_grad_()
    head(features).sum().backward()
    assert features.grad is not None and features.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in head.parameters() if parameter.grad is not None)


def test_half_precision_ends_before_the_manifold(parts: tuple[HeadConfig, ManifoldConfig]):
    torch.manual_seed(0)
    manifold = parts[1].build(6)
    head = parts[0].build(10, manifold)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        points = head(torch.randn(20, 10))
    assert points.dtype == torch.float32
    assert manifold.geometry.check_point_on_manifold(points, atol=1e-4)
