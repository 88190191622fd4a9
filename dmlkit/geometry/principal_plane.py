"""PCA of points of a manifold."""

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold


def principal_plane(manifold: Manifold, points: Tensor) -> Tensor:
    """The first two principal components (N, 2) of the points' features."""
    features = manifold.to_features(points).detach().double()
    centered = features - features.mean(0)
    _, directions = torch.linalg.eigh(centered.T @ centered)  # an SVD of 60 000 x 512 would take 1 GB more
    plane = centered @ directions[:, -2:].flip(1)
    return torch.nn.functional.pad(plane, (0, 2 - plane.shape[1]))
