"""Similarities of a batch to the proxies of some classes, and the number of classes to compute at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.manifolds import Sphere
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.products import Cosines

PullBack = Callable[[Tensor, Tensor], Sequence[Tensor]]
"""A function of the gradient of similarities that returns the gradients of embeddings and parameters. It writes the
gradient of the proxies to its second argument."""


class Traced(NamedTuple):
    """Similarities without a graph, and their backward function."""

    similarity: Tensor  # (B, w), or (B, K, w) for K proxies per class
    pull_back: PullBack


Pool = Callable[[Tensor], Tensor]
"""A differentiable function that pools similarities (B, K, w) to (B, w)."""


@dataclass(frozen=True)
class Measure:
    """A similarity of embeddings (B, D) to the proxies of w classes (w, ...), with the parameters it depends on."""

    trace: Callable[[Tensor, Tensor, Sequence[Tensor]], Traced]
    has_graph: bool = False  # also for single proxies; it holds several tensors of the similarities' size


# A few large blocks: at B=180, C=11 318, d=512 a step of the softmax takes 1.17x its three products in one block of
# 2^23 and 1.23x in blocks of 2^20; at C=100 000 1.19x and 1.58x. Larger blocks only take more memory.
BLOCK_NUMBERS = {"cpu": 2**23, "cuda": 2**26}
KEPT_NUMBERS = 2**26  # numbers that may always be kept for the backward pass: 256 MiB of float32


def similarity_to(manifold: Manifold, pool: Pool | None) -> Measure:
    """Return the relative similarity to proxies (w, d) as (B, w); to (w, K, d) as (B, K, w), or pooled to (B, w)."""
    # A subclass may define another similarity.
    is_cosine = type(manifold) is Sphere and manifold.similarity_name == "cosine" and manifold.proxies == "features"
    to_each = (
        Measure(_cosines)
        if is_cosine
        else by_autograd(
            lambda embeddings, proxies: manifold.relative_similarity(embeddings, manifold.proxy_points(proxies))
        )
    )

    def trace(embeddings: Tensor, proxies: Tensor, parameters: Sequence[Tensor]) -> Traced:
        if proxies.ndim == 2:
            return to_each.trace(embeddings, proxies, parameters)
        each = to_each.trace(embeddings, proxies.flatten(0, 1), parameters)
        return _by_class(each, proxies.shape[:2], pool)

    return Measure(trace, to_each.has_graph)


def by_autograd(function: Callable[[Tensor, Tensor], Tensor]) -> Measure:
    """Return the measure of a differentiable function of embeddings, proxies and possibly parameters."""

    def trace(embeddings: Tensor, proxies: Tensor, parameters: Sequence[Tensor]) -> Traced:
        learns = torch.is_grad_enabled()
        leaves = *(tensor.detach().requires_grad_(learns) for tensor in (embeddings, proxies)), *parameters
        similarity = function(*leaves[:2])

        def pull_back(gradient: Tensor, out: Tensor) -> Sequence[Tensor]:
            of_embeddings, of_proxies, *of_parameters = torch.autograd.grad(
                similarity, leaves, gradient, allow_unused=True, materialize_grads=True
            )
            out.copy_(of_proxies)
            return of_embeddings, *of_parameters

        return Traced(similarity.detach(), pull_back)

    return Measure(trace, has_graph=True)


def _cosines(embeddings: Tensor, proxies: Tensor, parameters: Sequence[Tensor]) -> Traced:
    cosines = Cosines(embeddings, proxies)

    def pull_back(gradient: Tensor, out: Tensor) -> Sequence[Tensor]:
        return cosines.pull_back(gradient, out), *(torch.zeros_like(parameter) for parameter in parameters)

    return Traced(cosines.values, pull_back)


def _by_class(each: Traced, shape: Sequence[int], pool: Pool | None) -> Traced:
    """Reshape similarities (B, w K) to (B, K, w), so that later operations run along classes, not few proxies."""
    similarity = each.similarity.unflatten(1, shape).transpose(1, 2).contiguous()
    pooled = similarity if pool is None else pool(similarity.requires_grad_(torch.is_grad_enabled()))

    def pull_back(gradient: Tensor, out: Tensor) -> Sequence[Tensor]:
        of_each = gradient if pool is None else torch.autograd.grad(pooled, similarity, gradient)[0]
        with torch.no_grad():
            return each.pull_back(of_each.transpose(1, 2).flatten(1), out.flatten(0, 1))

    return Traced(pooled.detach(), pull_back)


def automatic_block_size(embeddings: Tensor, proxies: Tensor) -> int:
    """Return the number of classes per block: as few blocks as the limit allows, of equal size."""
    count, *per_class, dim = proxies.shape
    numbers = prod(per_class) * max(len(embeddings), dim)  # per class
    at_most = max(64, BLOCK_NUMBERS.get(embeddings.device.type, BLOCK_NUMBERS["cpu"]) // numbers)
    return ceil(count / ceil(count / at_most))


def may_wait(measure: Measure, embeddings: Tensor, proxies: Tensor) -> bool:
    """Return whether to keep similarities and exponentials for the backward pass instead of computing them twice.

    True if they are few, or if there is no graph and they take no more memory than the proxies and their gradient:
    up to B = d. On the ball at B=180, C=100 000 a step would take 729 MiB instead of 289 MiB and gain nothing.
    """
    numbers = 2 * len(embeddings) * prod(proxies.shape[:-1])
    has_graph = measure.has_graph or proxies.ndim > 2
    return numbers + proxies.numel() <= KEPT_NUMBERS or (not has_graph and numbers <= 2 * proxies.numel())
