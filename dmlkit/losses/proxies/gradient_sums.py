"""Adding up the gradients of blocks of classes."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dmlkit.distributed.class_shard import ClassShard


class GradientSums:
    """Gradients of all blocks together: (B, D) for embeddings, (n, ...) for proxies, and one for each parameter.

    Args:
        proxies: (n, ...) of all blocks.
        shard: where the other classes are.
    """

    def __init__(self, proxies: Tensor, shard: ClassShard) -> None:
        self.like, self.shard = proxies, shard
        self.proxies = torch.empty(0)
        self.shared: list[Tensor] = []  # of embeddings and parameters, which every block adds to

    def add(self, first: int, gradients: Sequence[Tensor]) -> None:
        """Add those of embeddings, proxies and parameters, of the block that begins with class ``first``."""
        embeddings, proxies, *parameters = gradients
        if len(proxies) == len(self.like):
            self.proxies = proxies
        else:
            self.proxies = self.proxies if len(self.proxies) else torch.empty_like(self.like)  # rows are written once
            self.proxies[first : first + len(proxies)] = proxies
        new = [embeddings, *parameters]
        self.shared = [old.add_(more) for old, more in zip(self.shared, new, strict=True)] if self.shared else new

    def over_ranks(self) -> tuple[Tensor, ...]:
        """The sums; those of embeddings and parameters, to which every rank's classes contribute, over all ranks."""
        embeddings, *parameters = (self.shard.sum(total.contiguous()) for total in self.shared)
        return embeddings, self.proxies, *parameters


@contextmanager
def in_full_precision(like: Tensor) -> Generator[None]:
    """With gradient and without autocast, inside which a backward pass may be called."""
    with torch.enable_grad(), torch.autocast(like.device.type, enabled=False):
        yield


def refuse_gradient_of_gradient() -> None:
    """Refuse ``create_graph=True`` in a backward pass in closed form, which would silently count as a constant.

    Raises:
        RuntimeError: it was asked for.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("the gradient of a proxy loss has no gradient of its own; use create_graph=False")
