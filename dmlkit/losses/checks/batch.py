"""Checks of shape, dtype and values of a batch."""

from math import isfinite

import torch
from torch import Tensor


def check_batch(name: str, embeddings: Tensor, labels: Tensor, point_dim: int, num_classes: int | None) -> None:
    """Reject a batch that would give a wrong result or an obscure error.

    Raises:
        ValueError: the batch is invalid; the message says what was expected and what was found.

    Example:
        >>> check_batch("Triplet", torch.zeros(4, 8), torch.zeros(3, dtype=torch.long), 8, None)
        Traceback (most recent call last):
        ...
        ValueError: Triplet: expected labels of shape (4,), got (3,)
    """
    if embeddings.ndim != 2 or embeddings.shape[1] != point_dim:
        raise ValueError(f"{name}: expected embeddings of shape (B, {point_dim}), got {tuple(embeddings.shape)}")
    if len(embeddings) == 0:
        raise ValueError(f"{name}: expected at least one embedding, got an empty batch")
    if not embeddings.is_floating_point():
        raise ValueError(f"{name}: expected floating-point embeddings, got {embeddings.dtype}")
    if labels.shape != embeddings.shape[:1]:
        raise ValueError(f"{name}: expected labels of shape ({len(embeddings)},), got {tuple(labels.shape)}")
    if labels.dtype != torch.int64:
        raise ValueError(f"{name}: expected int64 labels, got {labels.dtype}")
    if embeddings.is_cpu:
        _check_values(name, embeddings, labels, num_classes)


def _check_values(name: str, embeddings: Tensor, labels: Tensor, num_classes: int | None) -> None:
    low, high = (bound.item() for bound in labels.aminmax())
    if low < 0 or (num_classes is not None and high >= num_classes):
        expected = "0 or more" if num_classes is None else f"0 to {num_classes - 1}"
        raise ValueError(f"{name}: expected labels from {expected}, got {low if low < 0 else high}")
    if isfinite(embeddings.detach().sum().item()):  # one fast pass; the sum of finite numbers may overflow
        return
    finite = embeddings.detach().isfinite().all(1)
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise ValueError(f"{name}: expected finite embeddings, got nan or inf in row {row}")
