"""Cross-batch memory: a pair loss that also compares the batch with the embeddings of earlier batches."""

from typing import Annotated, Literal

import torch
from pydantic import ConfigDict, NonNegativeInt, PositiveInt, field_validator
from torch import Tensor

from dmlkit.component import one_of
from dmlkit.losses.base import Loss, LossConfig
from dmlkit.losses.contrastive import Contrastive, ContrastiveConfig
from dmlkit.losses.pair_loss import PairLoss, PairLossConfig, make_pairs
from dmlkit.manifolds.base import Manifold


class CrossBatchMemoryConfig(LossConfig, frozen=True):
    """Cross-batch memory (Wang et al. 2020): a pair loss over the batch and a queue of past embeddings."""

    # The union of losses is complete only after all of them are imported, so the schema is built on first use.
    model_config = ConfigDict(defer_build=True)

    name: Literal["cross_batch_memory"] = "cross_batch_memory"
    loss: Annotated[LossConfig, one_of] = ContrastiveConfig()
    """The pair loss to compute over the batch and the memory."""
    size: PositiveInt = 1024
    """Number of embeddings in the memory."""
    start_epoch: NonNegativeInt = 0
    """Number of epochs without the memory, until embeddings drift slowly."""

    @field_validator("loss")
    @classmethod
    def _compares_pairs(cls, loss: LossConfig) -> LossConfig:
        if not isinstance(loss, PairLossConfig):
            raise ValueError(refusal(loss.name))
        return loss

    def build(self, manifold: Manifold, num_classes: int) -> "CrossBatchMemory":
        loss = self.loss.build(manifold, num_classes)
        return CrossBatchMemory(manifold, loss=loss, size=self.size, start_epoch=self.start_epoch)


class CrossBatchMemory(Loss):
    r"""Wang et al., CVPR 2020 (arXiv:1912.06798), eq. 4: the batch against itself and the last ``size`` embeddings.

    .. math:: L = \mathrm{loss}(\text{rows} = X, \text{columns} = [X, M])

    M holds embeddings of earlier batches, without gradient. After its loss is computed, the batch is added to the
    memory and replaces the oldest embeddings. The value equals that of the paper's Algorithm 1, which adds the batch
    first; here the batch's own columns keep their gradient, so an empty memory gives exactly the plain loss. In
    evaluation mode and before ``start_epoch`` the memory is neither read nor filled, and the plain loss is computed.
    The queue and its position are buffers, which ``state_dict`` restores.

    Args:
        manifold: the geometry of the embeddings.
        loss: a `PairLoss`: binomial_deviance, circle, contrastive, margin, multi_similarity, n_pair,
            pairwise_cross_entropy or triplet; the default is contrastive, the best one in the paper.
        size: number of embeddings in the memory.
        start_epoch: the first epoch that uses the memory (counted from 0, see `Loss.set_epoch`). The paper waits
            until embeddings drift slowly.

    Raises:
        ValueError: the loss does not compare pairs, e.g. a proxy loss.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> line = Euclidean(1)
        >>> loss = CrossBatchMemory(line, size=8)
        >>> loss(torch.tensor([[0.0]]), torch.tensor([0])).item()
        0.0
        >>> loss(torch.tensor([[3.0]]), torch.tensor([0])).item()  # 3^2, from the embedding in the memory
        9.0
    """

    memory: Tensor  # (size, D)
    memory_labels: Tensor  # (size,), -1 for an empty slot
    position: Tensor  # scalar, the next slot to write

    def __init__(self, manifold: Manifold, *, loss: Loss | None = None, size: int = 1024, start_epoch: int = 0) -> None:
        loss = loss or Contrastive(manifold)
        super().__init__(manifold, loss.num_classes)
        if not isinstance(loss, PairLoss):
            raise ValueError(f"CrossBatchMemory: {refusal(type(loss).__name__)}")
        self.loss = loss
        self.size, self.start_epoch, self.epoch = size, start_epoch, 0
        # Empty slots hold a point of the manifold, so that distances and their masked gradients are finite.
        origin = manifold.from_features(torch.zeros(size, manifold.dim)).detach()
        self.register_buffer("memory", origin)
        self.register_buffer("memory_labels", torch.full((size,), -1))
        self.register_buffer("position", torch.tensor(0))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.loss.set_epoch(epoch)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if not self.training or self.epoch < self.start_epoch:
            return self.loss.compute(embeddings, labels)
        columns = torch.cat([embeddings, self.memory.to(embeddings.dtype)])
        column_labels = torch.cat([labels, self.memory_labels])
        loss = self.loss.compute_pairs(make_pairs(embeddings, labels, columns, column_labels))
        self._remember(embeddings.detach()[-self.size :], labels[-self.size :])
        return loss

    def _remember(self, embeddings: Tensor, labels: Tensor) -> None:
        slots = (self.position + torch.arange(len(labels), device=labels.device)) % self.size
        self.memory.index_copy_(0, slots, embeddings.to(self.memory.dtype))
        self.memory_labels.index_copy_(0, slots, labels)
        self.position.copy_((self.position + len(labels)) % self.size)


def refusal(name: str) -> str:
    """Return the message for a loss that cannot use a memory of embeddings."""
    over_pairs = sorted(key for key, variant in LossConfig.variants.items() if issubclass(variant, PairLossConfig))
    return f"{name} does not compare pairs, so it cannot use a memory; expected one of {', '.join(over_pairs)}"
