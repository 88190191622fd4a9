"""Graph consistency (CGML): two draws of the same classes should propagate to the same features."""

from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor
from torch.linalg import matrix_norm

from dmlkit.component import Requirement, recipe_key
from dmlkit.regularizers.base import Regularizer


class GraphConsistency(Regularizer, name="graph_consistency"):
    r"""CGML (Chen et al. 2021): two draws of the same classes should have the same graph of similarities.

    Chen et al., AAAI 2021, eq. 3: the norm, not its square, of the difference of two propagated draws.

    .. math:: \| S' {X'}^T - S'' {X''}^T \|_F, \quad s_{ij} = \exp(-d(x_i, x_j)^2 / \sigma)

    This is the ``form`` *propagated*, which the paper uses for training. *graphs* is its eq. 1, the initial term, and
    *bound* its eq. 2, parts of which the paper then drops:

    .. math:: \| S' - S'' \|_F^2, \quad
            (\| S' {X'}^T - S'' {X''}^T \|_F + \| S'' \|_F \| X'' - X' \|_F) \, \| X'^{T\dagger} \|_F

    X' and X'' have the same classes in the same order, n images each. The first half of the images of each class in
    the batch belongs to X', the second half to X''; for the paired sampler these are the halves of the batch. An
    image without a counterpart (e.g. because the other image could not be read) is not used.

    The norm has no gradient at 0, where both draws propagate to the same features (e.g. identical embeddings):
    d|v|/dv = v/|v| is 0/0, and the nan would spoil the weights. The safe form returns 0, the smallest subgradient.

    The paper does not print sigma. Features of norm 17 have s_ij = 8e-21 with sigma = 1, which is an empty graph; the
    median squared distance of ``relative_bandwidth`` is a constant for the gradient.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> term = GraphConsistency(Euclidean(1))
        >>> term(torch.tensor([[0.0], [3.0], [0.0], [4.0]]), torch.tensor([0, 1, 0, 1])).round(decimals=2).item()
        1.0
    """

    weight: PositiveFloat = recipe_key(default=0.001)
    """lambda: 0.001 with triplet, 0.002 with n_pair and binomial_deviance."""
    bandwidth: PositiveFloat = 1.0
    """sigma, in units of the squared distance."""
    relative_bandwidth: bool = False
    """Multiply sigma by the median squared distance of the batch, for embeddings of any length."""
    form: Literal["propagated", "graphs", "bound"] = "propagated"
    """What to compare: ``propagated`` features (eq. 3), the ``graphs`` (eq. 1), or the full ``bound`` (eq. 2)."""

    def requirements(self) -> Iterable[Requirement]:
        reason = "it compares two draws of the same classes with the same number of images each"
        return (Requirement("sampler.name", ("paired",), reason),)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        first, second, is_used = aligned_draws(labels)
        points = embeddings[first], embeddings[second]
        draws = points[0] * is_used[:, None], points[1] * is_used[:, None]  # X', X'' (H, D)
        used_pairs = is_used[:, None] & is_used  # (H, H)
        squared = [self.manifold.distance(draw, draw).square() for draw in points]
        sigma = self.bandwidth * (median_apart(squared, used_pairs) if self.relative_bandwidth else 1)
        graphs = [torch.exp(-distances / sigma) * used_pairs for distances in squared]  # S', S'' (H, H)
        if self.form == "graphs":
            return (graphs[0] - graphs[1]).square().sum()
        propagated = matrix_norm(graphs[0] @ draws[0] - graphs[1] @ draws[1])
        if self.form == "propagated":
            return propagated
        inverse = matrix_norm(torch.linalg.pinv(draws[0]))
        return (propagated + matrix_norm(graphs[1]) * matrix_norm(draws[1] - draws[0])) * inverse


@torch.no_grad()
def median_apart(squared: list[Tensor], both: Tensor) -> Tensor:
    """Return the median squared distance of two different positions of a draw, over all draws: a scalar above 0."""
    apart = both & ~torch.eye(len(both), dtype=torch.bool, device=both.device)
    median = torch.stack(squared).masked_fill(~apart, torch.nan).nanmedian()
    return median.nan_to_num(1).clamp(min=torch.finfo(median.dtype).tiny)  # a draw of one image has no pairs


def aligned_draws(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split a batch into two draws with the same labels in the same order.

    Returns:
        The indices (H,) of each draw, H = B // 2, and whether each of the H positions is used (H,): of a class with
        an odd number of images the last one is not used. The shapes depend only on B, so nothing waits for a GPU.
    """
    same = labels[:, None] == labels  # (B, B)
    half = same.sum(1) // 2
    occurrence = same.tril(-1).sum(1)  # number of earlier images of the class
    by_label = labels.argsort(stable=True)

    def in_front(chosen: Tensor) -> Tensor:
        return by_label[(~chosen[by_label]).long().argsort(stable=True)][: len(labels) // 2]

    is_first = occurrence < half
    is_used = torch.arange(len(labels) // 2, device=labels.device) < is_first.sum()
    return in_front(is_first), in_front((occurrence >= half) & (occurrence < 2 * half)), is_used
