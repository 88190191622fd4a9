"""Base of losses over learnable proxies: selects the classes of a step and combines blocks of similarities."""

from typing import Annotated, ClassVar

from pydantic import Field, PositiveInt
from torch import Tensor

from dmlkit.distributed.class_shard import ClassShard, ShardedParameter
from dmlkit.losses.base import Loss, LossConfig
from dmlkit.losses.proxies.classes import Block, Classes, sum_over_classes
from dmlkit.losses.proxies.gradient_sums import Terms
from dmlkit.losses.proxies.sampling import classes_of, select
from dmlkit.losses.proxies.similarity import Pool, similarity_to
from dmlkit.losses.proxies.softmax import RowLosses, cross_entropy, mean_softmax_loss
from dmlkit.manifolds.base import Manifold


class ProxyLossConfig(LossConfig, frozen=True, abstract=True):
    """Recipe keys of every loss over proxies."""

    shares_classes: ClassVar[bool] = True
    chunk_size: PositiveInt | None = None
    """Number of classes computed at a time; null selects it by size. The loss value does not depend on it."""
    negative_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the classes that a training step computes: those of the batch, filled up with random others that
    change each step (Partial FC: An et al., CVPR 2022, arXiv:2203.15565)."""


class ProxyLoss(Loss):
    """A loss over proxies, computed in blocks: a sum of `class_terms`, or a softmax of ``logit_scale * logits``.

    Args:
        manifold, num_classes: see `Loss`.
        proxies_per_class: K, or None for proxies (C, d).
        pool: reduces similarities (B, K, w) to (B, w); None passes all K to the loss.
        logit_scale: > 0, inverse temperature of a loss with a softmax.
        chunk_size: number of classes to compute at a time; None selects it by size.
        negative_fraction: fraction of the classes that a training step computes, in (0, 1]; evaluation computes all.
    """

    closed_form = True  # use closed-form gradients if the loss has them; autograd gives the same numbers

    def __init__(
        self,
        manifold: Manifold,
        num_classes: int,
        *,
        proxies_per_class: int | None = None,
        pool: Pool | None = None,
        logit_scale: float = 1.0,
        chunk_size: int | None = None,
        negative_fraction: float = 1.0,
    ) -> None:
        super().__init__(manifold, num_classes)
        if not 0 < negative_fraction <= 1:
            raise ValueError(f"{type(self).__name__}: expected negative_fraction in (0, 1], got {negative_fraction}")
        self.measure, self.logit_scale, self.chunk_size = similarity_to(manifold, pool), logit_scale, chunk_size
        self.negative_fraction, self.shard = negative_fraction, ClassShard(num_classes)
        self.proxies = manifold.new_proxies(num_classes, *([] if proxies_per_class is None else [proxies_per_class]))

    def class_terms(self, block: Block) -> Terms:
        """Compute the terms (w,) of the classes of a block, for a loss that is a sum over classes."""
        raise NotImplementedError

    def logits(self, block: Block) -> Tensor:
        """Compute the unscaled logits (B, w) of a block, for a loss with a softmax over the classes of each row."""
        return block.similarity

    def row_losses(self, others: Tensor, own: Tensor) -> RowLosses:
        """Apply a `RowLoss` to log sum_{c != y} exp(z_c) and z_y, (B,) each, for a softmax loss; here cross-entropy."""
        return cross_entropy(others, own)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.over(self.classes(embeddings, labels))

    def over(self, classes: Classes) -> Tensor:
        """Compute the loss over the classes of a step."""
        if type(self).class_terms is not ProxyLoss.class_terms:
            return sum_over_classes(classes, self.class_terms)
        logits = None if type(self).logits is ProxyLoss.logits else self.logits
        return mean_softmax_loss(classes, self.row_losses, logits, self.logit_scale)

    def classes(self, embeddings: Tensor, labels: Tensor) -> Classes:
        """Return the classes of this step: all of this rank's, or a sample."""
        parameters = [tensor for tensor in self.parameters() if tensor is not self.proxies and tensor.requires_grad]
        selection = select(self.shard, labels, self.negative_fraction if self.training else 1)
        return classes_of(selection, self.proxies, embeddings, labels, self.measure, parameters, self.chunk_size)

    def keep_shard(self, rank: int, ranks: int) -> None:
        self.shard = ClassShard(self.shard.num_classes, rank, ranks)
        self.proxies.data = self.shard.own_rows(self.proxies.data)

    def sharded_parameters(self) -> list[ShardedParameter]:
        return [ShardedParameter("proxies", self.proxies, self.shard)] if self.shard.ranks > 1 else []
