"""Weights of samples by how informative they are for each class (Proxy-ISA, eq. 15 and 16)."""

from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.losses.proxies.classes import Block, Classes


class SampleWeights(NamedTuple):
    """The weights w+ and w- of a batch, and the quantities they are computed from."""

    own: Tensor  # w+, (B,)
    own_total: Tensor  # sum over the classes of the batch of their mean w+
    others_total: Tensor  # sum over all classes of the step of their mean w-
    clean: Tensor  # (B,) bool, False for an outlier of its class
    outlier: Tensor  # h a - eta of this rank's classes (n,)
    penalty: Tensor  # w- below that threshold, (n,)

    def of_others(self, block: Block) -> Tensor:
        """Return w- (B, w) of a block."""
        similarity = block.similarity.detach()
        classes = slice(block.first, block.first + similarity.shape[1])
        return torch.where(similarity < self.outlier[classes], self.penalty[classes], 1)


def own_and_below(classes: Classes, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Return the similarity of each row to its class (B,), and how many other rows are below the thresholds (n,)."""
    own = classes.embeddings.new_zeros(len(classes.embeddings), 1)
    below: list[Tensor] = []
    for block in classes.blocks():
        own = torch.where(block.inside, block.similarity.gather(1, block.column), own)
        is_below = block.similarity < threshold[block.first : block.first + block.similarity.shape[1]]
        below.append((is_below & ~block.own).sum(0))
    return own[:, 0], torch.cat(below)
