"""ProxyGML loss: each point is classified by the few proxies nearest to it."""

import warnings
from collections.abc import Iterable
from math import ceil
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import softplus

from dmlkit.component import Requirement
from dmlkit.losses.base import Loss, LossConfig, require_similarity
from dmlkit.losses.proxies.class_chunks import Pool, Walk, automatic_chunk_size, own_columns, plan_walk, similarities
from dmlkit.losses.proxies.class_logsumexp import logsumexp_over_classes
from dmlkit.losses.proxies.class_sum import sum_over_classes
from dmlkit.losses.proxies.proxy_loss import Selection
from dmlkit.manifolds.base import Manifold

SIMILARITIES = ("cosine", "origin_cosine", "dot")
REASON = "it adds similarities up, so a proxy must count for its class: positive where alike, not a negative distance"


class ProxyGMLConfig(LossConfig, frozen=True):
    """ProxyGML (Zhu et al. 2020): a graph of the few proxies nearest to each point, classified as a whole."""

    name: Literal["proxy_gml"] = "proxy_gml"
    proxies_per_class: PositiveInt = 12  # N; 1 on SOP
    ratio: Annotated[float, Field(gt=0, le=1)] = 0.05  # r, the part of all proxies that a point is linked to
    scale: PositiveFloat = 1.0  # inverse temperature; 20 on SOP
    regularizer_weight: NonNegativeFloat = 0.3  # lambda; 0 on SOP
    positive_mask: bool = True  # always link a point to all proxies of its class
    mask_softmax: bool = True  # leave classes without a linked proxy out of the softmax
    chunk_size: PositiveInt | None = None  # classes computed at a time; None chooses by size

    def requirements(self) -> Iterable[Requirement]:
        return (Requirement("manifold.similarity", SIMILARITIES, REASON),)

    def build(self, manifold: Manifold, num_classes: int) -> "ProxyGML":
        return ProxyGML(manifold, num_classes, **self.model_dump(exclude={"name"}))


class ProxyGML(Loss):
    r"""Zhu et al., NeurIPS 2020 (arXiv:2010.13636), eq. 2-12, with s a cosine or the inner product.

    .. math:: Z_{ic} &= \sum_{p \in P_c \cap I_i} s(x_i, p), \quad M_{ic} = [P_c \cap I_i \ne \emptyset] \\
        L &= \frac{1}{B} \sum_i -\log \frac{M_{iy_i} e^{\sigma Z_{iy_i}}}{\sum_c M_{ic} e^{\sigma Z_{ic}}}
            + \frac{\lambda}{C N} \sum_p -\log \frac{e^{Z^p_{y_p}}}{\sum_c e^{Z^p_c}},
            \quad Z^p_c = \sum_{q \in P_c} s(p, q)

    I_i are the k = ceil(r C N) proxies most alike to x_i. Z^p needs no (CN)^2 matrix: a sum of inner products is the
    inner product with a sum, so it is one product with the C sums of proxies.

    D: ``positive_mask`` keeps all proxies of the own class, as the paper's prose and its authors' code do; adding the
    printed 1 to their similarities does not always. Where k < N, k is N, with a warning. D: M is 1 for a class with a
    linked proxy, whatever the sum Z. D: proxies as alike as the k-th are linked too. D: without ``positive_mask``, a
    masked softmax has no term for a point whose class has no linked proxy; it adds 0 to the mean.

    Args:
        manifold: the geometry of embeddings and proxies; its similarity must be a cosine or the inner product.
        num_classes: C.
        proxies_per_class: N.
        ratio: r in (0, 1].
        scale: sigma > 0, an inverse temperature for Z (not for Z^p).
        regularizer_weight: lambda >= 0.
        positive_mask: always link a point to all proxies of its class (S^pos of Table 1).
        mask_softmax: leave classes without a linked proxy out of the softmax (M of Table 1), instead of Z = 0.
        chunk_size: how many classes to compute at a time; None chooses by size. The value does not depend on it.

    Raises:
        ValueError: the manifold has another similarity, or r C N < 1; see also `Loss.forward`.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> sphere = Sphere(8)
        >>> loss = ProxyGML(sphere, num_classes=5, proxies_per_class=4, ratio=0.5)
        >>> loss(sphere.from_features(torch.randn(4, 8)), torch.arange(4)).shape
        torch.Size([])
    """

    def __init__(
        self,
        manifold: Manifold,
        num_classes: int,
        *,
        proxies_per_class: int = 12,
        ratio: float = 0.05,
        scale: float = 1.0,
        regularizer_weight: float = 0.3,
        positive_mask: bool = True,
        mask_softmax: bool = True,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(manifold, num_classes)
        require_similarity("ProxyGML", manifold, SIMILARITIES, REASON)
        self.linked = _linked_proxies(num_classes, proxies_per_class, ratio, positive_mask)
        self.scale, self.regularizer_weight, self.chunk_size = scale, regularizer_weight, chunk_size
        self.positive_mask, self.mask_softmax = positive_mask, mask_softmax
        self.proxies = manifold.new_proxies(num_classes, proxies_per_class)  # (C, N, d)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        threshold = self._threshold(embeddings, labels)
        pool = self._linked_sum(labels, threshold)
        walk = plan_walk(self.manifold, embeddings, self.proxies, self.chunk_size, pool)
        selection = Selection(walk, self.proxies, labels, len(self.proxies))
        others, own = logsumexp_over_classes(selection, embeddings, self.scale)
        has_own = own.isfinite()
        own = torch.where(has_own, own, 0)
        loss = torch.where(has_own, softplus(others - self.scale * own), 0).mean()
        return loss + self.regularizer_weight * self.regularizer() if self.regularizer_weight else loss

    def regularizer(self) -> Tensor:
        """L^p of eq. 11: the cross-entropy of every proxy, classified by all proxies."""
        num_classes, per_class = self.proxies.shape[:2]
        points = self.manifold.proxy_points(self.proxies).flatten(0, 1)
        vectors = self.manifold.index_vectors(points, "gallery")  # (CN, d), with the similarity as inner product
        sums = vectors.view(num_classes, per_class, -1).sum(1)  # (C, d)

        def score(logits: Tensor, first: int) -> tuple[Tensor, Tensor]:  # (C, w): a column for each proxy
            own = torch.arange(first, first + logits.shape[1], device=logits.device)[None] // per_class
            factor = 1 / len(vectors)
            gradient = logits.softmax(0).mul_(factor)
            gradient.scatter_add_(0, own, gradient.new_full((1, 1), -factor).expand_as(own))
            return (logits.logsumexp(0) - logits.gather(0, own)[0]).sum() * factor, gradient

        walk = Walk(_inner_product, (), automatic_chunk_size(sums, vectors))
        return sum_over_classes(walk, score, sums, vectors)

    def _threshold(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The least similarity (B, 1, 1) of a linked proxy; with ``positive_mask``, of one of another class."""
        count = self.linked - (self.proxies.shape[1] if self.positive_mask else 0)
        best = embeddings.new_empty(len(embeddings), 0)
        walk = plan_walk(self.manifold, embeddings, self.proxies, self.chunk_size, lambda similarity, _: similarity)
        for first, similarity in similarities(walk, embeddings, self.proxies) if count else ():  # (B, N, w)
            if self.positive_mask:
                column, inside = own_columns(labels, first, similarity.shape[2])
                own = column[:, None].expand(-1, similarity.shape[1], 1)
                kept = torch.where(inside[:, None], -torch.inf, similarity.gather(2, own))
                similarity = similarity.scatter(2, own, kept)
            best = torch.cat([best, similarity.flatten(1)], 1)
            best = best.topk(min(count, best.shape[1]), sorted=False).values
        return best.amin(1)[:, None, None] if count else best.new_full((len(embeddings), 1, 1), torch.inf)

    def _linked_sum(self, labels: Tensor, threshold: Tensor) -> Pool:
        """Z of eq. 5 (B, w), -inf where the softmax leaves a class out."""

        def pool(similarity: Tensor, first: int) -> Tensor:  # (B, N, w) -> (B, w)
            linked = similarity.detach() >= threshold
            if self.positive_mask:
                column, inside = own_columns(labels, first, similarity.shape[2])
                own = column[:, None].expand(-1, similarity.shape[1], 1)
                linked.scatter_(2, own, linked.gather(2, own) | inside[:, None])
            total = (similarity * linked).sum(1)
            return total.masked_fill(~linked.any(1), -torch.inf) if self.mask_softmax else total

        return pool


def _inner_product(x: Tensor, y: Tensor, _: int) -> Tensor:
    return x @ y.T


def _linked_proxies(num_classes: int, per_class: int, ratio: float, positive_mask: bool) -> int:
    """k of section 3.2, at least N where all proxies of the own class are linked."""
    if ratio * num_classes * per_class < 1:
        raise ValueError(
            f"ProxyGML: ratio {ratio:g} of {num_classes} classes x {per_class} proxies selects none; "
            f"expected a ratio of at least {1 / (num_classes * per_class):.2g}"
        )
    count = ceil(ratio * num_classes * per_class - 1e-9)  # 0.07 * 100 is 7.000000000000001
    if positive_mask and count < per_class:
        warnings.warn(
            f"ProxyGML: k = {count} is less than the {per_class} proxies of a class, so k is {per_class} and no proxy "
            f"of another class is linked; a ratio above {1 / num_classes:.2g} links some",
            stacklevel=3,
        )
        return per_class
    return count
