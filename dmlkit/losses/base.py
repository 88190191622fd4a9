"""The loss interface: checks the batch and computes in full precision within mixed-precision training."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import isfinite, trunc
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dmlkit.component import Component, ComponentConfig, Requirement, option
from dmlkit.distributed.exchange import ShardedParameter
from dmlkit.manifolds.base import NEEDS_BOUNDED, UNRELATED_RADIUS, Manifold
from dmlkit.manifolds.hyperbolic import STRONGEST_CURVATURE
from dmlkit.manifolds.products import without_autocast


class LossConfig(ComponentConfig, frozen=True):
    """Root of the loss family."""

    shares_classes: ClassVar[bool] = False
    """Whether the classes may be split over ranks and a step may sample them."""
    takes_several_labels: ClassVar[bool] = False
    """Whether images may have several labels: the loss compares pairs and owns nothing per class."""
    has_proxies: ClassVar[bool] = False
    """Whether the loss has ``proxies`` for each class, points of the embeddings' space."""

    @classmethod
    def listed_under(cls) -> str:
        """Return the heading of the loss in ``dmlkit list losses``."""
        if {"loss", "losses"} & set(cls.model_fields):
            return "around other losses"
        return "over proxies" if cls.has_proxies else "over pairs"

    @abstractmethod
    def build(self, manifold: Manifold, num_classes: int) -> "Loss":
        """Return the loss for ``num_classes`` training classes and embeddings on ``manifold``."""


class Loss(Component, nn.Module, ABC, family=LossConfig):
    """A metric-learning objective. It owns its proxies and memories, which ``state_dict`` contains.

    Raises:
        ValueError: there is no class, or the manifold does not have the similarity that the loss requires.
    """

    manifold: Manifold = option(kw_only=False)
    """Geometry of the embeddings."""
    num_classes: Any = option(default=None, init=False)
    """C, the number of training classes; None for losses that own nothing per class."""

    def __post_init__(self) -> None:
        if self.num_classes is not None and self.num_classes < 1:
            raise ValueError(f"{type(self).__name__}: num_classes must be at least 1, got {self.num_classes}")
        for requirement in self.requirements():
            if requirement.key == "manifold.similarity":
                _check_similarity(type(self).__name__, self.manifold, requirement)

    @property
    def columns(self) -> int:
        """Number of columns of ``embeddings``: D, the width of a point."""
        return self.manifold.point_dim

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of a batch, a scalar.

        Args:
            embeddings: (B, D) points on the manifold; half precision is computed in float32.
            labels: (B,) int64 in 0..C-1.

        Raises:
            TypeError: an argument is not a tensor.
            ValueError: the shape or dtype is wrong; on the CPU also a label is out of range or an embedding non-finite
                (on a GPU these checks would stall the step; the trainer reports a non-finite loss instead).
        """
        check_batch(type(self).__name__, embeddings, labels, self.columns, self.num_classes)
        with without_autocast(embeddings):  # e^35 = 1.6e15 overflows float16
            return self.compute(embeddings.float() if embeddings.itemsize < 4 else embeddings, labels)

    @abstractmethod
    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of a checked batch in at least float32."""

    def set_epoch(self, epoch: int) -> None:
        """Prepare for an epoch, counted from 0; called before each epoch."""

    def use_counts(self, counts: Tensor) -> None:
        """Take the number of training images of each class (C,); most losses ignore it."""

    def use_members(self, members: Tensor | None) -> None:
        """Take which labels each class has, (C, L) bool; images that share a label are then positives.

        Raises:
            ValueError: images have several labels, but the loss needs one per image.
        """
        if members is not None:
            raise ValueError(f"{type(self).__name__}: needs one label per image")

    def keep_shard(self, rank: int, ranks: int) -> None:
        """Keep only this rank's classes; call once, before an optimizer is built. Raise ValueError if it has none."""
        raise ValueError(
            f"{type(self).__name__}: has no classes to split over {ranks} ranks; set training.shard_proxies to false"
        )

    def sharded_parameters(self) -> list[ShardedParameter]:
        """Return the parameters of which this rank holds only some rows, including those of nested losses."""
        return []


def check_batch(name: str, embeddings: Tensor, labels: Tensor, columns: int, num_classes: int | None) -> None:
    """Reject a batch that would give a wrong result or an obscure error.

    Example:
        >>> check_batch("Triplet", torch.zeros(4, 8), torch.zeros(3, dtype=torch.long), 8, None)
        Traceback (most recent call last):
        ...
        ValueError: Triplet: expected labels of shape (4,), got (3,)
    """
    for what, given in (("embeddings", embeddings), ("labels", labels)):
        if not torch.is_tensor(given):
            raise TypeError(f"{name}: expected {what} as a tensor, got {type(given).__name__}; use torch.as_tensor")
    if embeddings.ndim != 2 or embeddings.shape[1] != columns:
        raise ValueError(f"{name}: expected embeddings of shape (B, {columns}), got {tuple(embeddings.shape)}")
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


def _check_similarity(name: str, manifold: Manifold, requirement: Requirement) -> None:
    """Reject a manifold whose similarity a loss does not support, as ``Recipe`` does when it is loaded."""
    if manifold.similarity_name not in requirement.allowed:
        expected = " or ".join(map(repr, requirement.allowed))
        raise ValueError(
            f"{name}: expected a manifold with similarity {expected}, because {requirement.reason}; "
            f"got {manifold.similarity_name!r}"
        )
    if requirement is NEEDS_BOUNDED:
        for key, fault in too_near(name, manifold, manifold.similarity_name):
            raise ValueError(f"{name}: {'.'.join(map(str, key))} {fault}")


def too_near(loss: str, space: Any, similarity: str) -> Iterable[tuple[tuple[str | int, ...], str]]:
    """Yield the keys of a space that keep points nearer to the origin than a loss expects unrelated points to be.

    With such a value `Manifold.relative_similarity` would stay above 0 between any two points at right angles; so it
    would on a factor of a product.

    Args:
        space: a manifold or its configuration.

    Example:
        >>> from dmlkit.manifolds import Poincare
        >>> [fault] = too_near("proxy_anchor", Poincare.Config(curvature=-16.0), "negative_distance")
        >>> fault[0], fault[1][:60]
        (('curvature',), 'got -16, expected -9.6 or weaker: points of float32 end 1.55')
    """
    if not similarity.endswith("distance"):
        return
    for index, factor in enumerate(getattr(space, "factors", ())):
        yield from ((("factors", index, *key), fault) for key, fault in too_near(loss, factor, similarity))
    taken = (
        f"from the origin, but {loss} pushes points of different classes as far apart as two at right angles that are "
        f"{UNRELATED_RADIUS:g} from the origin, which these never reach; choose"
    )
    or_cosine = "" if "chordal" in similarity else ", or a cosine as similarity"
    curvature, longest = getattr(space, "curvature", None), getattr(space, "clip_distance", None)
    if isinstance(curvature, Tensor):  # of a manifold instead of its configuration
        curvature = curvature.item()
    if curvature is not None and curvature < STRONGEST_CURVATURE:
        border = UNRELATED_RADIUS * (STRONGEST_CURVATURE / curvature) ** 0.5
        yield (
            ("curvature",),
            f"got {curvature:g}, expected {trunc(10 * STRONGEST_CURVATURE) / 10} or weaker: points of float32 "
            f"end {border:.3g} {taken} a weaker curvature{or_cosine}",
        )
    if longest is not None and longest < UNRELATED_RADIUS:
        yield (
            ("clip_distance",),
            f"got {longest:g}, expected at least {UNRELATED_RADIUS:g}: points end that far {taken} "
            f"a longer one{or_cosine}",
        )
