"""The loss interface: checks the batch and computes in full precision within mixed-precision training."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from dmlkit.component import ComponentConfig
from dmlkit.distributed.class_shard import ShardedParameter
from dmlkit.losses.checks.batch import check_batch
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.numerics.autocast import without_autocast


class LossConfig(ComponentConfig, frozen=True):
    """Root of the loss family."""

    shares_classes: ClassVar[bool] = False
    """Whether the classes may be split over ranks and a step may sample them."""

    def build(self, manifold: Manifold, num_classes: int) -> "Loss":
        """Return the loss for ``num_classes`` training classes and embeddings on ``manifold``."""
        raise NotImplementedError


class Loss(nn.Module, ABC):
    """A metric-learning objective. It owns its proxies and memories, which ``state_dict`` contains.

    Args:
        manifold: the geometry of the embeddings.
        num_classes: C, the number of training classes, or None for losses that own nothing per class.
    """

    def __init__(self, manifold: Manifold, num_classes: int | None = None) -> None:
        super().__init__()
        if num_classes is not None and num_classes < 1:
            raise ValueError(f"{type(self).__name__}: num_classes must be at least 1, got {num_classes}")
        self.manifold, self.num_classes = manifold, num_classes

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of a batch, a scalar.

        Args:
            embeddings: (B, D) points on the manifold; half precision is computed in float32.
            labels: (B,) int64 in 0..C-1.

        Raises:
            ValueError: the shape or dtype is wrong; on the CPU also a label is out of range or an embedding non-finite
                (on a GPU these checks would stall the step; the trainer reports a non-finite loss instead).
        """
        check_batch(type(self).__name__, embeddings, labels, self.manifold.point_dim, self.num_classes)
        with without_autocast(embeddings):  # e^35 = 1.6e15 overflows float16
            return self.compute(embeddings.float() if embeddings.itemsize < 4 else embeddings, labels)

    @abstractmethod
    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of a checked batch in at least float32."""

    def set_epoch(self, epoch: int) -> None:
        """Prepare for an epoch, counted from 0; called before each epoch."""

    def keep_shard(self, rank: int, ranks: int) -> None:
        """Keep only this rank's classes; call once, before an optimizer is built. Raise ValueError if it has none."""
        raise ValueError(
            f"{type(self).__name__}: has no classes to split over {ranks} ranks; set training.shard_proxies to false"
        )

    def sharded_parameters(self) -> list[ShardedParameter]:
        """Return the parameters of which this rank holds only some rows, including those of nested losses."""
        inner = [(name, child) for name, child in self.named_children() if isinstance(child, Loss)]
        return [one._replace(name=f"{name}.{one.name}") for name, loss in inner for one in loss.sharded_parameters()]
