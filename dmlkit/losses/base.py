"""The loss interface: what a batch must look like, and full precision inside mixed-precision training."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from dmlkit.component import ComponentConfig
from dmlkit.manifolds.base import Manifold


class LossConfig(ComponentConfig, frozen=True):
    """Root of the loss family."""

    over_pairs: ClassVar[bool] = False
    """The loss is a `PairLoss`: it also compares a batch with a memory of embeddings."""
    shards_proxies: ClassVar[bool] = False
    """The loss is a `ProxyLoss`: ranks may share its proxies out."""

    def build(self, manifold: Manifold, num_classes: int) -> "Loss":
        """The loss for ``num_classes`` training classes with embeddings on ``manifold``."""
        raise NotImplementedError


class Loss(nn.Module, ABC):
    """A metric-learning objective. It owns its proxies and memories; ``state_dict`` is complete.

    A member implements `compute`; calling the loss checks the batch first and turns autocast off, because
    exponentials of similarities overflow float16 (e^35 = 1.6e15).

    Args:
        manifold: the geometry of the embeddings.
        num_classes: C, the number of training classes, or None for losses that own nothing per class.
    """

    def __init__(self, manifold: Manifold, num_classes: int | None = None) -> None:
        super().__init__()
        if num_classes is not None and num_classes < 1:
            raise ValueError(f"{type(self).__name__}: num_classes must be at least 1, got {num_classes}")
        self.manifold = manifold
        self.num_classes = num_classes

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch.

        Args:
            embeddings: (B, D) points on the manifold; half precision is computed in float32.
            labels: (B,) int64 in 0..C-1.

        Returns:
            A scalar.

        Raises:
            ValueError: a wrong shape or dtype; on the CPU also a label out of range or a non-finite embedding
                (on a GPU these would stall the step; the trainer reports a non-finite loss instead).
        """
        check_batch(type(self).__name__, embeddings, labels, self.manifold.point_dim, self.num_classes)
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.compute(embeddings.float() if embeddings.itemsize < 4 else embeddings, labels)

    @abstractmethod
    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a checked batch in at least float32."""

    def set_epoch(self, epoch: int) -> None:
        """Told before each epoch, counted from 0."""


def check_batch(name: str, embeddings: Tensor, labels: Tensor, point_dim: int, num_classes: int | None) -> None:
    """Refuse a batch that would give a wrong or obscure result.

    Raises:
        ValueError: says what came and what was expected.

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
    if embeddings.detach().sum().isfinite():  # one quick pass; a sum of finite numbers may still overflow
        return
    finite = embeddings.detach().isfinite().all(1)
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise ValueError(f"{name}: expected finite embeddings, got nan or inf in row {row}")


def require_similarity(name: str, manifold: Manifold, allowed: tuple[str, ...], reason: str) -> None:
    """Refuse a manifold whose similarity makes no sense in a loss; the twin of a `Requirement` for library use.

    Raises:
        ValueError: says which similarity came, and which were expected.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> sphere = Sphere(8, similarity="negative_distance")
        >>> require_similarity("ArcFace", sphere, ("cosine",), "it turns angles")
        Traceback (most recent call last):
        ...
        ValueError: ArcFace: expected a manifold with similarity 'cosine', got 'negative_distance': it turns angles
    """
    if manifold.similarity_name not in allowed:
        expected = " or ".join(map(repr, allowed))
        raise ValueError(
            f"{name}: expected a manifold with similarity {expected}, got {manifold.similarity_name!r}: {reason}"
        )
