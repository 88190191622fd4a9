"""Cross-batch memory: a pair loss that also compares the batch with the embeddings of earlier batches."""

from typing import Annotated, Any

import torch
from pydantic import AfterValidator, NonNegativeInt, PositiveInt
from torch import Tensor

from dmlkit.component import option
from dmlkit.losses.base import Loss, LossConfig
from dmlkit.losses.contrastive import Contrastive
from dmlkit.losses.pair_loss import PairLoss


def compares_pairs(loss: LossConfig) -> LossConfig:
    """Return the configuration of a pair loss."""
    if not issubclass(loss.component or object, PairLoss):
        kinds = LossConfig.variants.items()
        pair_losses = [name for name, kind in kinds if issubclass(kind.component or object, PairLoss)]
        raise ValueError(
            f"{loss.name} does not compare pairs, so it cannot use a memory; expected one of {', '.join(pair_losses)}"
        )
    return loss


class CrossBatchMemory(Loss, name="cross_batch_memory"):
    r"""Cross-batch memory (Wang et al. 2020): a pair loss over the batch and a queue of past embeddings.

    Wang et al., CVPR 2020 (arXiv:1912.06798), eq. 4: the batch is compared with itself and with the last ``size``
    embeddings.

    .. math:: L = \mathrm{loss}(\text{rows} = X, \text{columns} = [X, M])

    M holds embeddings of earlier batches, without gradient; under a learned curvature, their features, which are mapped
    to points at every step. After its loss is computed, the batch is added to the
    memory and replaces the oldest embeddings. The value equals that of the paper's Algorithm 1, which adds the
    batch first; here the batch's own columns keep their gradient, so an empty memory gives exactly the plain loss.
    In evaluation mode and before ``start_epoch`` the memory is neither read nor filled, and the plain loss is
    computed. The queue and its position are buffers, which ``state_dict`` restores. The default is the contrastive
    loss, which is the best one in the paper.

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

    num_classes: Any = option(default=None, kw_only=False)
    """C, the number of training classes, for a loss given by its configuration that has parameters per class."""
    loss: Annotated[PairLoss, AfterValidator(compares_pairs)] = Contrastive.Config()
    """The pair loss to compute over the batch and the memory."""
    size: PositiveInt = 1024
    """Number of embeddings in the memory."""
    start_epoch: NonNegativeInt = 0
    """Number of epochs at the start of training without the memory, while embeddings still change quickly."""

    memory: Tensor = option(init=False)  # (size, D), see `Manifold.to_memory`
    memory_labels: Tensor = option(init=False)  # (size,), -1 for an empty slot
    position: Tensor = option(init=False)  # scalar, the next slot to write

    def __post_init__(self) -> None:
        self.num_classes, self.epoch = self.loss.num_classes, 0
        super().__post_init__()
        # Empty slots hold a point of the manifold, so that distances and their masked gradients are finite.
        origin = self.manifold.from_features(torch.zeros(self.size, self.manifold.dim))
        self.register_buffer("memory", self.manifold.to_memory(origin))
        self.register_buffer("memory_labels", torch.full((self.size,), -1))
        self.register_buffer("position", torch.tensor(0))

    @property
    def takes_several_labels(self) -> bool:
        return self.loss.takes_several_labels

    def use_members(self, members: Tensor | None) -> None:
        self.loss.use_members(members)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.loss.set_epoch(epoch)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if not self.training or self.epoch < self.start_epoch:
            return self.loss.compute(embeddings, labels)
        columns = torch.cat([embeddings, self.manifold.from_memory(self.memory.to(embeddings.dtype))])
        column_labels = torch.cat([labels, self.memory_labels])
        loss = self.loss.compute_pairs(self.loss.pairs(embeddings, labels, columns, column_labels))
        self._remember(self.manifold.to_memory(embeddings[-self.size :]), labels[-self.size :])
        return loss

    def _remember(self, embeddings: Tensor, labels: Tensor) -> None:
        slots = (self.position + torch.arange(len(labels), device=labels.device)) % self.size
        self.memory.index_copy_(0, slots, embeddings.to(self.memory.dtype))
        self.memory_labels.index_copy_(0, slots, labels)
        self.position.copy_((self.position + len(labels)) % self.size)
