"""The pull and push terms of Proxy-Anchor and its descendants, with their gradients in closed form."""

from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.losses.proxies.class_chunks import own_columns


class Anchors(NamedTuple):
    r"""What the terms of a batch need to know before the first chunk of classes.

    .. math:: a \sum_p \log(1 + \sum_{y_x = p} e^{-\alpha \omega (s(x,p) - \delta)})
            + b \sum_p \log(1 + \sum_{y_x \ne p} e^{\alpha \omega (s(x,p) + \delta)})
    """

    labels: Tensor  # (B,)
    scale: float  # alpha
    margin: float  # delta
    pull_factor: Tensor  # a, a scalar
    push_factor: Tensor  # b, a scalar

    def score(
        self,
        similarity: Tensor,
        first: int,
        own_weights: Tensor | None = None,
        other_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The terms of the classes first..first+w-1.

        Args:
            similarity: (B, w).
            first: the first class.
            own_weights: omega of each row and its own class (B,); 1 if not given.
            other_weights: omega of each row and every other class (B, w); 1 if not given.

        Returns:
            The value, and its gradient with respect to the similarity (B, w).
        """
        column, inside = own_columns(self.labels, first, similarity.shape[1])
        own = similarity.gather(1, column)
        push, gradient = self._push(
            similarity, torch.zeros_like(own).masked_fill_(inside, -torch.inf), column, other_weights
        )
        pull, own_gradient = self._pull(own, inside, column[:, 0], similarity.shape[1], own_weights)
        gradient.scatter_add_(1, column, own_gradient)
        return pull + push, gradient

    def _push(
        self, similarity: Tensor, own_mask: Tensor, column: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        offset = similarity.new_full((), self.scale * self.margin)
        exponent = torch.add(offset, similarity, alpha=self.scale)
        if weights is not None:
            exponent *= weights
        exponent.scatter_add_(1, column, own_mask)
        shift = exponent.amax(0).clamp_(min=0)  # (w,); 0 is the exponent of the 1 in log(1 + ...)
        gradient = exponent.sub_(shift).exp_()
        total = gradient.sum(0) + torch.exp(-shift)
        gradient *= self.scale * self.push_factor / total
        if weights is not None:
            gradient *= weights
        return (shift + total.log()).sum() * self.push_factor, gradient

    def _pull(
        self, own: Tensor, inside: Tensor, column: Tensor, width: int, weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        slope = -self.scale if weights is None else -self.scale * weights[:, None]
        exponent = torch.where(inside, slope * (own - self.margin), -torch.inf)[:, 0]  # (B,)
        shift = own.new_zeros(width).scatter_reduce_(0, column, exponent, "amax")
        exponential = torch.exp(exponent - shift[column])
        total = torch.exp(-shift).index_add_(0, column, exponential)
        gradient = (exponential / total[column])[:, None] * slope * self.pull_factor
        return (shift + total.log()).sum() * self.pull_factor, gradient


def number_of_classes_in(labels: Tensor, num_classes: int, like: Tensor) -> Tensor:
    """|P+|: how many classes occur among the labels; a scalar of ``like``'s dtype, without a device sync."""
    return like.new_zeros(num_classes).scatter_(0, labels, 1).sum()
