"""Proxy-Anchor loss: one learnable proxy per class pulls its class and pushes the others."""

from collections.abc import Iterable

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.proxies.classes import Block, ClosedForm, Terms
from dmlkit.losses.proxies.proxy_loss import ClassSumLoss
from dmlkit.manifolds.base import NEEDS_BOUNDED


class ProxyAnchor(ClassSumLoss, name="proxy_anchor"):
    r"""Proxy-Anchor (Kim et al. 2020): each class proxy weights the images of the batch by how hard they are.

    Kim et al., CVPR 2020 (arXiv:2003.13911), eq. 4; s = relative similarity, P+ = classes in the batch.

    .. math:: \frac{1}{|P^+|} \sum_{p \in P^+} \log(1 + \sum_{y_x = p} e^{-\alpha (s(x,p) - \delta)})
            + \frac{1}{|P|} \sum_{p \in P} \log(1 + \sum_{y_x \ne p} e^{\alpha (s(x,p) + \delta)})

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> ProxyAnchor(Sphere(2), num_classes=10)(torch.eye(2), torch.tensor([3, 7])).shape
        torch.Size([])
    """

    margin: NonNegativeFloat = 0.1
    """delta, in similarity units (cosine on the sphere)."""
    scale: PositiveFloat = 32.0
    """alpha, inverse temperature."""

    def requirements(self) -> Iterable[Requirement]:
        return (*super().requirements(), NEEDS_BOUNDED)

    def class_terms(self, block: Block) -> Terms:
        return anchor_terms(block, self.scale, self.margin)


def anchor_terms(
    block: Block,
    scale: float,
    margin: float,
    pull_factor: Tensor | None = None,
    push_factor: Tensor | None = None,
    own_weights: Tensor | None = None,
    other_weights: Tensor | None = None,
) -> ClosedForm:
    r"""Compute the terms (w,) of the classes p of a block.

    .. math:: a \log(1 + \sum_{y_x = p} e^{-\alpha \omega (s(x,p) - \delta)})
            + b \log(1 + \sum_{y_x \ne p} e^{\alpha \omega (s(x,p) + \delta)})

    Args:
        block: similarities s (B, w).
        scale: alpha > 0.
        margin: delta, in similarity units.
        pull_factor: a, a scalar; default 1 / |P+|.
        push_factor: b, a scalar; default 1 / |P|.
        own_weights: omega (B,) of each row and its own class; default 1.
        other_weights: omega (B, w) of each row and every other class; default 1.
    """
    classes = block.classes
    pull_factor = 1 / classes.in_batch if pull_factor is None else pull_factor
    push_factor = classes.in_batch.new_full((), 1 / classes.total) if push_factor is None else push_factor
    similarity = block.similarity.detach()
    own = similarity.gather(1, block.column)
    mask = torch.zeros_like(own).masked_fill_(block.inside, -torch.inf)
    push, gradient = _push(similarity, mask, block.column, scale, margin, push_factor, other_weights)
    pull, own_gradient = _pull(own, block, scale, margin, pull_factor, own_weights)
    return ClosedForm(pull + push, gradient.scatter_add_(1, block.column, own_gradient))


def _push(
    similarity: Tensor,
    own_mask: Tensor,
    column: Tensor,
    scale: float,
    margin: float,
    factor: Tensor,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    exponent = torch.add(similarity.new_full((), scale * margin), similarity, alpha=scale)
    if weights is not None:
        exponent *= weights
    exponent.scatter_add_(1, column, own_mask)
    shift = exponent.amax(0).clamp_(min=0)  # (w,); 0 is the exponent of the 1 in log(1 + ...)
    gradient = exponent.sub_(shift).exp_()
    total = gradient.sum(0) + torch.exp(-shift)
    gradient *= scale * factor / total
    if weights is not None:
        gradient *= weights
    return (shift + total.log()) * factor, gradient


def _pull(
    own: Tensor, block: Block, scale: float, margin: float, factor: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    column = block.column[:, 0]
    slope = -scale if weights is None else -scale * weights[:, None]
    exponent = torch.where(block.inside, slope * (own - margin), -torch.inf)[:, 0]  # (B,)
    shift = own.new_zeros(block.similarity.shape[1]).scatter_reduce_(0, column, exponent, "amax")
    exponential = torch.exp(exponent - shift[column])
    total = torch.exp(-shift).index_add_(0, column, exponential)
    gradient = (exponential / total[column])[:, None] * slope * factor
    return (shift + total.log()) * factor, gradient
