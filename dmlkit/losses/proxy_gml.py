"""ProxyGML loss: each point is classified by the few proxies nearest to it."""

import warnings
from collections.abc import Iterable
from decimal import ROUND_CEILING, Context
from math import ceil
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.distributed.exchange import ClassShard
from dmlkit.losses.proxies.classes import Block, Classes, computed_once, sum_over_classes
from dmlkit.losses.proxies.proxy_loss import ProxyLoss, require_all
from dmlkit.losses.proxies.similarity import automatic_block_size, by_autograd
from dmlkit.losses.proxies.softmax import RowLosses, cross_entropy, mean_softmax_loss

ALL_CLASSES_REASON = "the k most similar proxies are chosen among all classes"


class ProxyGML(ProxyLoss, name="proxy_gml"):
    r"""ProxyGML (Zhu et al. 2020): a graph links each point to its few nearest proxies, which classify it together.

    Zhu et al., NeurIPS 2020 (arXiv:2010.13636), eq. 2-12, where s is a cosine or the inner product.

    .. math:: Z_{ic} &= \sum_{p \in P_c \cap I_i} s(x_i, p), \quad M_{ic} = [P_c \cap I_i \ne \emptyset] \\
        L &= \frac{1}{B} \sum_i -\log \frac{M_{iy_i} e^{\sigma Z_{iy_i}}}{\sum_c M_{ic} e^{\sigma Z_{ic}}}
            + \frac{\lambda}{C N} \sum_p -\log \frac{e^{Z^p_{y_p}}}{\sum_c e^{Z^p_c}},
            \quad Z^p_c = \sum_{q \in P_c} s(p, q)

    I_i are the k = ceil(r C N) proxies most similar to x_i. Z^p needs no (CN)^2 matrix: a sum of inner products is the
    inner product with a sum, so one product with the C sums of proxies suffices.

    ``positive_mask`` keeps all proxies of the own class, as in the paper's text and the authors' code; the printed
    formula, which adds 1 to their similarities, does not always keep them. If k < N, k is set to N. With k = N no other
    class is linked, which gives a warning: the masked softmax is then 1 and its loss 0. The paper does not specify the
    following. M is 1 for a class with a linked proxy, whatever the sum Z is. Proxies that tie with the k-th are linked
    too. Without ``positive_mask``, a point whose class has no linked proxy adds 0 to the mean of a masked softmax.

    Raises:
        ValueError: the manifold has another similarity, or r C N < 1.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> sphere = Sphere(8)
        >>> loss = ProxyGML(sphere, num_classes=5, proxies_per_class=4, ratio=0.5)
        >>> loss(sphere.from_features(torch.randn(4, 8)), torch.arange(4)).shape
        torch.Size([])
    """

    shares_classes: ClassVar[bool] = False
    proxies_per_class: PositiveInt = 12
    """N, proxies per class; 1 on SOP."""
    ratio: Annotated[float, Field(gt=0, le=1)] = 0.05
    """r, fraction of all proxies that a point is linked to."""
    scale: PositiveFloat = 1.0
    """Inverse temperature; 20 on SOP."""
    regularizer_weight: NonNegativeFloat = 0.3
    """lambda; 0 on SOP."""
    positive_mask: bool = True
    """Always link a point to all proxies of its class."""
    mask_softmax: bool = True
    """Exclude classes without a linked proxy from the softmax."""

    def requirements(self) -> Iterable[Requirement]:
        return (
            *super().requirements(),
            Requirement(
                "manifold.similarity",
                ("cosine", "origin_cosine", "dot"),
                "it adds similarities, so those of proxies near a point must be positive, unlike negative distances",
            ),
            Requirement("loss.negative_fraction", (1.0,), ALL_CLASSES_REASON),
        )

    def __post_init__(self) -> None:
        super().__post_init__(self.proxies_per_class)
        self.linked = _linked_proxies(self.num_classes, self.proxies_per_class, self.ratio, self.positive_mask)
        if self.linked == 1 and self.mask_softmax and not self.positive_mask:
            least = _rounded_up(self.num_classes * self.proxies_per_class)
            warnings.warn(
                f"ProxyGML: ratio {self.ratio:g} links 1 proxy, so that a point meets a single class and its "
                f"loss is 0; use a ratio above {least} to link other classes",
                stacklevel=2,
            )

    def over(self, classes: Classes) -> Tensor:
        require_all(classes, ALL_CLASSES_REASON)
        classes = computed_once(classes)
        threshold = self._threshold(classes)

        def logits(block: Block) -> Tensor:
            return self.linked_sum(block, threshold)

        loss = mean_softmax_loss(classes, self._row_losses, logits, self.scale)
        return loss + self.regularizer_weight * self.regularizer() if self.regularizer_weight else loss

    def _row_losses(self, others: Tensor, own_logits: Tensor) -> RowLosses:
        rows, has_own = cross_entropy(others, own_logits), own_logits != -torch.inf  # nan stays nan
        return RowLosses(*(torch.where(has_own, of_rows, 0) for of_rows in rows))

    def linked_sum(self, block: Block, threshold: Tensor) -> Tensor:
        """Compute Z of eq. 5 (B, w); -inf for a class excluded from the softmax.

        Args:
            block: similarities (B, N, w) to every proxy.
            threshold: (B, 1, 1), the smallest similarity of a linked proxy.
        """
        linked = block.similarity.detach() >= threshold
        if self.positive_mask:
            linked |= block.is_own[:, None]
        total = (block.similarity * linked).sum(1)
        return total.masked_fill(~linked.any(1), -torch.inf) if self.mask_softmax else total

    def regularizer(self) -> Tensor:
        """Compute L^p of eq. 11: the cross-entropy of every proxy, classified by all proxies."""
        num_classes, per_class = self.proxies.shape[:2]
        points = self.manifold.proxy_points(self.proxies).flatten(0, 1)
        vectors = self.manifold.index_vectors(points, "gallery")  # (CN, d), whose inner products are the similarities
        sums = vectors.view(num_classes, per_class, -1).sum(1)  # (C, d)

        def terms(block: Block) -> Tensor:  # similarities are (C, w), a column for each proxy
            logits = block.similarity
            proxies = torch.arange(block.first, block.first + logits.shape[1], device=logits.device)
            return (logits.logsumexp(0) - logits.gather(0, proxies[None] // per_class)[0]) / len(vectors)

        against_sums = Classes(
            embeddings=sums,
            proxies=vectors,
            labels=torch.zeros(len(sums), dtype=torch.int64, device=sums.device),
            measure=by_autograd(lambda x, y: x @ y.T),
            parameters=(),
            block_size=automatic_block_size(sums, vectors),
            total=len(vectors),
            all_labels=torch.zeros(len(sums), dtype=torch.int64, device=sums.device),
            shard=ClassShard(len(vectors)),
        )
        return sum_over_classes(against_sums, terms)

    @torch.no_grad()
    def _threshold(self, classes: Classes) -> Tensor:
        """Return the smallest similarity (B, 1, 1) of a linked proxy; with ``positive_mask``, of another class."""
        count = self.linked - (self.proxies.shape[1] if self.positive_mask else 0)
        rows = len(classes.embeddings)
        best = classes.embeddings.new_empty(rows, 0)
        if not count:
            return best.new_full((rows, 1, 1), torch.inf)
        for block in classes.blocks():  # (B, N, w)
            similarity = block.similarity
            if self.positive_mask:
                similarity = similarity.masked_fill(block.is_own[:, None], -torch.inf)
            best = largest(torch.cat([best, similarity.flatten(1)], 1), count)
        return best.amin(1)[:, None, None]


def _linked_proxies(num_classes: int, per_class: int, ratio: float, positive_mask: bool) -> int:
    """Return k of section 3.2, at least N if all proxies of the own class are linked."""
    links = ratio * num_classes * per_class
    if links < 1 - 1e-9:  # 1 / 49 * 49 is 0.9999999999999999
        raise ValueError(
            f"ProxyGML: ratio {ratio:g} of {num_classes} classes x {per_class} proxies links none; "
            f"expected a ratio of at least {_rounded_up(num_classes * per_class)}"
        )
    count = ceil(links - 1e-9)  # 0.07 * 100 is 7.000000000000001
    if positive_mask and count <= per_class:
        warnings.warn(
            f"ProxyGML: ratio {ratio:g} links {count} proxies, no more than the {per_class} of a class; {per_class} "
            f"are linked and none of another class; use a ratio above {_rounded_up(num_classes)} to link other classes",
            stacklevel=3,
        )
        return per_class
    return count


def _rounded_up(count: int) -> str:
    """Return 1 / count with two digits, at least as large, so that a ratio of what is printed suffices."""
    return f"{Context(prec=2, rounding=ROUND_CEILING).divide(1, count):f}"


def largest(values: Tensor, count: int) -> Tensor:
    """Return the ``count`` largest numbers of each row (B, m), in any order, or all if there are fewer."""
    dropped = values.shape[1] - count
    if dropped <= 0:
        return values
    if values.is_cpu:  # 565 of 11 318 in 180 rows: 1.6 ms; topk takes 42 ms
        return torch.from_numpy(np.partition(values.numpy(), dropped, axis=1)[:, dropped:])
    return values.topk(count, sorted=False).values
