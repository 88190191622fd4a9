"""Losses, batches and values for the checks of losses."""

from copy import deepcopy

import torch
from torch import Tensor

from dmlkit.losses.base import Loss, LossConfig
from dmlkit.manifolds.base import Manifold, ManifoldConfig
from dmlkit.testing.promise import DIM, expect

CLASSES, BATCH = 30, 12


def draw(classes: int = CLASSES, batch: int = BATCH, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return features (B, d) and labels (B,) with several images per class, as the pair losses need."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(batch, DIM, generator=generator).to(dtype)
    labels = (torch.arange(batch) // 3) % classes
    return features.requires_grad_(), labels


def degenerate_batches() -> dict[str, tuple[Tensor, Tensor]]:
    """Return features and labels that occasionally occur in training, by description."""
    generator = torch.Generator().manual_seed(4)

    def features(count: int) -> Tensor:
        return torch.randn(count, DIM, generator=generator)

    in_pairs = torch.tensor([0, 0, 1, 1, 2, 2])
    return {
        "one class": (features(6), torch.zeros(6, dtype=torch.int64)),
        "no positives": (features(6), torch.arange(6)),
        "one image": (features(1), torch.tensor([1])),
        "one image each of two classes": (features(2), torch.tensor([1, 0])),
        "identical embeddings": (torch.ones(6, DIM), in_pairs),
        "identical embeddings of one class": (torch.ones(6, DIM), torch.zeros(6, dtype=torch.int64)),
        "zero vectors": (torch.zeros(6, DIM), in_pairs),
        "a zero vector": (features(6) * torch.arange(6)[:, None].sign(), in_pairs),
        "huge vectors": (features(6) * 1e4, in_pairs),
    }


def bad_batches(manifold: Manifold) -> dict[str, tuple[Tensor, Tensor, str]]:
    """Return invalid points and labels, each with a pattern of the error message."""
    features, labels = draw()
    points = manifold.from_features(features).detach()
    spoiled = points.clone()
    spoiled[3, 0] = torch.nan
    infinite = points.clone()
    infinite[5, 1] = torch.inf
    return {
        "negative label": (points, labels - 1, "got -1"),
        "float labels": (points, labels.float(), "expected int64 labels, got torch.float32"),
        "int32 labels": (points, labels.int(), "expected int64 labels, got torch.int32"),
        "too few labels": (points, labels[1:], r"expected labels of shape \(12,\), got \(11,\)"),
        "labels of two dimensions": (points, labels[:, None], r"got \(12, 1\)"),
        "narrow": (points[:, 1:], labels, rf"expected embeddings of shape \(B, {manifold.point_dim}\)"),
        "wide": (torch.cat([points, points], 1), labels, "expected embeddings of shape"),
        "one dimension": (points[0], labels, "expected embeddings of shape"),
        "empty": (points[:0], labels[:0], "at least one embedding"),
        "integers": (points.long(), labels, "floating-point"),
        "nan": (spoiled, labels, "row 3"),
        "infinite": (infinite, labels, "row 5"),
    }


def build(config: LossConfig, manifold: ManifoldConfig, classes: int = CLASSES) -> Loss:
    """Build the loss, with the same proxies at each call."""
    torch.manual_seed(1)
    return config.build(manifold.build(DIM), classes)


def evaluate(loss: Loss, features: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the value and the gradients by features and all parameters, with a fixed seed."""
    torch.manual_seed(2)
    value = loss(loss.manifold.from_features(features), labels)
    learnable = [features, *(parameter for parameter in loss.parameters() if parameter.requires_grad)]
    gradients = torch.autograd.grad(value, learnable, allow_unused=True, materialize_grads=True)
    return value.detach(), list(gradients)


def expect_finite(loss: Loss, features: Tensor, labels: Tensor, what: str = "a batch") -> None:
    """Check that the value and the gradients of a batch are finite."""
    value, gradients = evaluate(loss, features, labels)
    expect(value.isfinite(), f"{what}: the value is {value.item()}")
    expect(all(gradient.isfinite().all() for gradient in gradients), f"{what}: a gradient has nan or inf")


def draws_at_random(loss: Loss, features: Tensor, labels: Tensor) -> bool:
    """Return whether the value depends on the random seed."""
    values: set[float] = set()
    for seed in range(3):
        torch.manual_seed(seed)
        values.add(deepcopy(loss)(loss.manifold.from_features(features), labels).item())
    return len(values) > 1
