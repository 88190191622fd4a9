"""Cross-batch memory: a pair loss that also compares the batch with the embeddings of earlier batches."""

from typing import Annotated, Literal

import torch
from pydantic import ConfigDict, NonNegativeInt, PositiveInt, field_validator
from torch import Tensor

from dmlkit.component import one_of
from dmlkit.losses.base import Loss, LossConfig
from dmlkit.losses.contrastive import Contrastive, ContrastiveConfig
from dmlkit.losses.pairs.pair_loss import PairLoss, PairLossConfig, make_pairs
from dmlkit.manifolds.base import Manifold


class CrossBatchMemoryConfig(LossConfig, frozen=True):
    """Cross-batch memory (Wang et al. 2020): a pair loss over the batch and a queue of past embeddings."""

    # The union of losses is complete only when all of them are imported, so its schema waits for its first use.
    model_config = ConfigDict(defer_build=True)

    name: Literal["cross_batch_memory"] = "cross_batch_memory"
    loss: Annotated[LossConfig, one_of] = ContrastiveConfig()
    """One that compares pairs."""
    size: PositiveInt = 1024
    """Embeddings remembered."""
    start_epoch: NonNegativeInt = 0
    """Epochs of the bare loss, until embeddings drift slowly."""

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

    M holds embeddings of earlier batches, without gradient; the batch enters it after its loss, pushing out the
    oldest. The value is that of the paper's Algorithm 1, which enters the batch first; the batch's own columns keep
    their gradient here, so that an empty memory gives exactly the bare loss. In evaluation mode and before
    ``start_epoch`` the memory rests and the bare loss is computed. The queue, its position and its fill are buffers:
    ``state_dict`` restores them.

    Args:
        manifold: the geometry of the embeddings.
        loss: a `PairLoss`: binomial_deviance, circle, contrastive, margin, multi_similarity, n_pair,
            pairwise_cross_entropy or triplet; contrastive by default, the paper's best.
        size: how many embeddings are remembered.
        start_epoch: the memory opens with this epoch (counted from 0, see `Loss.set_epoch`). The paper warms up
            until embeddings drift slowly.

    Raises:
        ValueError: a loss without a form for pairs, such as a proxy loss.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> line = Euclidean(1)
        >>> loss = CrossBatchMemory(line, size=8)
        >>> loss(torch.tensor([[0.0]]), torch.tensor([0])).item()
        0.0
        >>> loss(torch.tensor([[3.0]]), torch.tensor([0])).item()  # 3^2 from the remembered one
        9.0
    """

    memory: Tensor  # (size, D)
    memory_labels: Tensor  # (size,), -1 where nothing is remembered yet
    position: Tensor  # scalar, the slot that is written next

    def __init__(self, manifold: Manifold, *, loss: Loss | None = None, size: int = 1024, start_epoch: int = 0) -> None:
        loss = loss or Contrastive(manifold)
        super().__init__(manifold, loss.num_classes)
        if not isinstance(loss, PairLoss):
            raise ValueError(f"CrossBatchMemory: {refusal(type(loss).__name__)}")
        self.loss = loss
        self.size, self.start_epoch, self.epoch = size, start_epoch, 0
        # Empty slots hold a point of the manifold: its distances are finite, and so are their masked gradients.
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
    """Why the loss ``name`` has no use for a memory of embeddings."""
    over_pairs = sorted(key for key, variant in LossConfig.variants.items() if issubclass(variant, PairLossConfig))
    return f"{name} does not compare pairs of a batch and a memory; expected one of {', '.join(over_pairs)}"
