"""The contract of heads."""

import torch

from dmlkit.heads.base import HeadConfig
from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.testing.promise import Promise, expect, fitting_manifolds, hold

DIM = 6


def check_head(config: HeadConfig) -> None:
    """Check a head against its contract, on every manifold that its requirements allow.

    Outputs are points; gradients are finite, also for features that are 0; half precision ends before the manifold.

    Raises:
        AssertionError: the contract is broken; the message says how.

    Example:
        >>> from dmlkit.heads import Linear
        >>> check_head(Linear.Config())
    """
    for manifold in {one.name: one for one in fitting_manifolds(config)}.values():
        hold(HEAD, f"{config.name} on {manifold.name}", config, manifold)


def outputs_are_points(config: HeadConfig, manifold_config: ManifoldConfig) -> None:
    """Check that features become points of the manifold, in float32."""
    manifold = manifold_config.build(DIM)
    points = config.build(10, manifold)(torch.randn(40, 10) * 3)
    expect(points.shape == (40, manifold.point_dim), f"got shape {tuple(points.shape)}")
    expect(points.dtype == torch.float32, f"got {points.dtype}")
    expect(manifold.geometry.check_point_on_manifold(points, atol=1e-4), "not on the manifold")


def gradients_are_finite_also_at_zero_features(config: HeadConfig, manifold: ManifoldConfig) -> None:
    """Check that gradients of features and parameters are finite, also if all features of an image are 0."""
    head = config.build(10, manifold.build(DIM))
    features = torch.cat([torch.zeros(1, 10), torch.randn(3, 10)]).requires_grad_()
    head(features).sum().backward()
    expect(
        features.grad is not None and bool(features.grad.isfinite().all()),
        "gradient of the features: missing, nan or inf",
    )
    for name, parameter in head.named_parameters():
        expect(parameter.grad is None or bool(parameter.grad.isfinite().all()), f"gradient of {name}: nan or inf")


def half_precision_ends_before_the_manifold(config: HeadConfig, manifold_config: ManifoldConfig) -> None:
    """Check that under autocast points are float32 and on the manifold."""
    manifold = manifold_config.build(DIM)
    head = config.build(10, manifold)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        points = head(torch.randn(20, 10))
    expect(points.dtype == torch.float32, f"got {points.dtype}")
    expect(manifold.geometry.check_point_on_manifold(points, atol=1e-4), "not on the manifold")


HEAD: tuple[Promise, ...] = (
    outputs_are_points,
    gradients_are_finite_also_at_zero_features,
    half_precision_ends_before_the_manifold,
)
"""Each takes a head configuration and a manifold configuration."""
