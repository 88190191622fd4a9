"""A memory of recent embeddings that measures how near each class is to its proxy."""

from typing import Any

import torch
from torch import Tensor, nn

from dmlkit.distributed.class_shard import ClassShard
from dmlkit.manifolds.base import Manifold

BLOCK = 64  # the similarities of T pairs come from T / BLOCK blocks of BLOCK x BLOCK pairs, not from all T x T


class ClassMemory(nn.Module):
    """A first-in, first-out queue of the last T embeddings with their labels, and statistics of each class.

    The statistics are the number of samples seen, and how near the embeddings in the memory were to the class's proxy
    when the class was last in a batch. All are buffers, so a checkpoint contains them; nothing waits for the device.

    Args:
        size: T >= 1.
        point_dim: D.
        num_classes: C.

    Example:
        >>> memory = ClassMemory(size=3, point_dim=1, num_classes=2)
        >>> memory.remember(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), torch.tensor([True, False]))
        >>> memory.labels.tolist(), memory.seen.tolist()
        ([0, -1, -1], [1, 1])
    """

    points: Tensor
    labels: Tensor
    pointer: Tensor
    seen: Tensor
    averages: Tensor

    def __init__(self, size: int, point_dim: int, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("points", torch.zeros(size, point_dim))
        self.register_buffer("labels", torch.full((size,), -1))  # -1: empty
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))  # the next slot to fill
        self.register_buffer("seen", torch.zeros(num_classes, dtype=torch.int64))  # n, per class
        self.register_buffer("averages", torch.full((num_classes,), torch.nan))  # S_avg of eq. 10; nan: not known yet
        self.register_load_state_dict_pre_hook(_without_averages)

    def remember(self, points: Tensor, labels: Tensor, clean: Tensor) -> None:
        """Count a batch (B, D), (B,), and store its embeddings where ``clean`` (B,) is True; the last T are kept."""
        size = len(self.labels)
        self.seen.index_add_(0, labels, torch.ones_like(labels))
        rank = clean.cumsum(0) - 1  # position among the clean embeddings
        stays = clean & (rank >= clean.sum() - size)
        slots = torch.where(stays, (self.pointer + rank) % size, size)  # the others go to a slot that is cut off
        self.points.copy_(torch.cat([self.points, points[:1]]).index_copy_(0, slots, points)[:size])
        self.labels.copy_(torch.cat([self.labels, labels[:1]]).index_copy_(0, slots, labels)[:size])
        self.pointer.copy_((self.pointer + clean.sum()) % size)

    @torch.no_grad()
    def update_averages(self, manifold: Manifold, proxies: Tensor, labels: Tensor, shard: ClassShard) -> None:
        """Update the averages of the classes of a batch; a class without embeddings in the memory keeps its last one.

        Args:
            manifold: the geometry of points and proxies.
            proxies: (n, d), the proxies of this rank's classes.
            labels: (B,), the labels of the batch among all classes.
            shard: the classes of this rank. Every rank gets all averages, so that its checkpoint contains them.
        """
        average, known = self.mean_similarity(manifold, proxies, shard.classes.start)
        own = labels - shard.classes.start
        inside, row = (own >= 0) & (own < len(proxies)), own.clamp(0, len(proxies) - 1)
        latest, is_known = shard.sum(torch.stack([average[row], known[row].to(average)]) * inside)
        self.averages.index_copy_(0, labels, torch.where(is_known > 0, latest, self.averages[labels]))

    def mean_similarity(self, manifold: Manifold, proxies: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return the mean similarity of each class's embeddings to its proxy: S_avg of eq. 10, 0 if it has none.

        Args:
            manifold: the geometry of points and proxies.
            proxies: (n, d), the proxies of the classes first..first+n-1.
            first: the first class.

        Returns:
            The means (n,), and whether the class has embeddings in the memory, (n,) bool.
        """
        labels = self.labels - first
        filled = (self.labels >= 0) & (labels >= 0) & (labels < len(proxies))
        labels = labels.clamp(0, len(proxies) - 1)
        own = manifold.proxy_points(proxies[labels])  # (T, D), the current proxies
        pairs = zip(self.points.split(BLOCK), own.split(BLOCK), strict=True)
        similarity = torch.cat([manifold.relative_similarity(x, p).diagonal() for x, p in pairs])
        totals = similarity.new_zeros(len(proxies)).index_add_(0, labels, torch.where(filled, similarity, 0))
        counts = similarity.new_zeros(len(proxies)).index_add_(0, labels, filled.to(similarity.dtype))
        return totals / counts.clamp(min=1), counts > 0


def _without_averages(module: ClassMemory, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the averages to checkpoints of dmlkit 0.1.0, which computed them from the memory at each step."""
    if f"{prefix}seen" in state:
        state.setdefault(f"{prefix}averages", torch.full_like(module.averages, torch.nan))
