"""PCA of points of a manifold."""

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold

ROWS = 8192  # in float64 at once: all of 60 000 x 512 and an SVD would take 1.5 GB more


@torch.no_grad()
def principal_plane(manifold: Manifold, points: Tensor) -> Tensor:
    """The first two principal components (N, 2), in float64, of the features of points (N, D)."""
    features = [manifold.to_features(block) for block in points.split(ROWS)]
    mean = torch.stack([block.double().sum(0) for block in features]).sum(0) / len(points)
    scatter = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for block in features:
        centered = block.double() - mean
        scatter += centered.T @ centered
    _, directions = torch.linalg.eigh(scatter)
    main = directions[:, -2:].flip(1)
    plane = torch.cat([(block.double() - mean) @ main for block in features])
    return torch.nn.functional.pad(plane, (0, 2 - plane.shape[1]))
