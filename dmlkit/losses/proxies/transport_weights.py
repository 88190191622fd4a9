"""Transport weights for anchor losses: transport plans of grouplets of the batch weight its exponentials."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn

from dmlkit.component import Component, Requirement, option
from dmlkit.losses.proxies.classes import Block, Classes, sum_over_classes
from dmlkit.losses.proxies.proxy_loss import require_all
from dmlkit.transport.base import TransportSolver
from dmlkit.transport.members import Exact

ALL_CLASSES_REASON = "the transport plans of grouplets need the proxies of all classes"
ALL_CLASSES = (
    Requirement("training.shard_proxies", (False,), ALL_CLASSES_REASON),
    Requirement("loss.negative_fraction", (1.0,), ALL_CLASSES_REASON),
)


@dataclass(frozen=True)
class Grouplets:
    """G grouplets of equal size k, with the transport problem between their images and their classes.

    Column j of a grouplet represents the class of its image j. If several images have the same label, the column of the
    first one is used and those of the others are empty.
    """

    similarity: Tensor  # (G, k, k): similarity of image i to the class of column j
    own: Tensor  # (G, k, k) bool: column j is the class of image i
    has_column: Tensor  # (G, k) bool
    plan: Tensor  # x, (G, k, k)


class TransportWeights(Component, nn.Module):
    r"""Weights (1 + x) from the transport plans x of random grouplets (Zhang et al., CVPR 2022, eq. 1).

    Each image of a grouplet sends 1, class j receives the number of the grouplet's images with that label, and sending
    i to j costs c_ij = 1 - s_ij. So x is the class that the grouplet as a whole would assign to i. Only classes of the
    grouplet can receive, so the k x C program reduces to k x k. A weighted term is the plain term plus a gain,

    .. math:: \log(1 + \sum_i (1 + x_{ij}) e^{z_{ij}}) =
            \log(1 + \sum_i e^{z_{ij}}) + \log(1 + \sum_i x_{ij} p_{ij}), \quad
            p_{ij} = \frac{e^{z_{ij}}}{1 + \sum_l e^{z_{lj}}}

    so any loss made of such terms is weighted by adding the gains of the classes in the batch.

    On any manifold, the plan depends on s only up to a constant per row and column. So the 1 is irrelevant, and a
    negative distance as s gives the plan of the distance. The scale of s matters for solvers with a regularization.

    **Grouping.** The batch is shuffled by a separate generator, seeded by ``seed`` and the number of training steps so
    far, which the state dict contains: a resumed run makes the same groups as an uninterrupted one, and all processes
    make the same groups. If k does not divide the batch, the remaining images form one smaller grouplet.
    """

    solver: TransportSolver = Exact.Config()
    """Solver for the plans."""
    group_size: PositiveInt = 4
    """k, number of images in a grouplet."""
    seed: NonNegativeInt = 0
    """Seed of the random grouping."""
    step: Tensor = option(init=False)

    def __post_init__(self) -> None:
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.known_step = 0  # a copy of the buffer: reading the device would stall it
        self.register_load_state_dict_post_hook(_read_step)

    def forward(self, classes: Classes, scale: float, margin: float) -> Tensor:
        """Compute what the weights add to the anchor terms of a whole batch: a scalar."""
        labels, grouping = classes.labels, self.regroup(classes.labels)
        own = labels[:, None] == labels
        column = own.byte().argmax(1)  # (B,): each class uses the column of its first image

        def gains(block: Block) -> Tensor:
            similarity = block.similarity
            plan = torch.zeros_like(similarity)
            for images in grouping:
                entries = images[:, :, None], column[images][:, None]
                plan = plan.index_put(entries, self.solve(images, similarity, labels).plan, accumulate=True)
            pull = gain(-scale * (similarity - margin), plan, own)
            push = gain(scale * (similarity + margin), plan, ~own)
            return pull / classes.in_batch + push / classes.total

        return sum_over_classes(pairs(classes), gains)

    def regroup(self, labels: Tensor) -> list[Tensor]:
        """Return the image indices (G, k) of the grouplets of a batch, and (1, rest) if k does not divide the batch.

        In training every call draws a new grouping.
        """
        order = self._shuffle(len(labels)).to(labels.device)
        if self.training and torch.is_grad_enabled():
            self.step += 1
            self.known_step += 1
        whole = len(order) - len(order) % self.group_size
        stacks = order[:whole].view(-1, self.group_size), order[whole:].view(1, -1)
        return [images for images in stacks if images.numel()]

    def solve(self, images: Tensor, similarity: Tensor, labels: Tensor) -> Grouplets:
        """Solve the grouplets of images (G, k); similarity (B, B) is that of image i to the class of image j."""
        similarity, labels = similarity[images[:, :, None], images[:, None]], labels[images]
        own = labels[:, :, None] == labels[:, None]
        has_column = ~own.tril(-1).any(2)
        counts = (own.sum(1) * has_column).to(similarity.dtype)
        # Non-finite similarities make the loss non-finite, which the trainer reports; the solver must not fail on them.
        cost = (1 - similarity).nan_to_num(0, 0, 0)
        plan = self.solver.assignment(cost, counts)
        return Grouplets(similarity, own, has_column, plan)

    def _shuffle(self, count: int) -> Tensor:
        # The prime multiplier makes (seed, step) differ from (seed + 1, step') for any realistic number of steps.
        generator = torch.Generator().manual_seed((self.seed * 1_000_000_007 + self.known_step) % 2**63)
        return torch.randperm(count, generator=generator)


def _read_step(module: TransportWeights, _: Any) -> None:
    module.known_step = int(module.step)


def pairs(classes: Classes) -> Classes:
    """Return the classes of the batch's own labels in one block (B, B): image i against the class of image j."""
    require_all(classes, ALL_CLASSES_REASON)
    return replace(classes, proxies=classes.proxies[classes.labels], block_size=len(classes.labels))


def gain(exponent: Tensor, plan: Tensor, kept: Tensor) -> Tensor:
    """Compute log(1 + sum (1 + x) e^z) - log(1 + sum e^z) over the kept rows i of z, x (..., i, j): (..., j)."""
    share = (exponent.masked_fill(~kept, -torch.inf) - log_one_plus_sum_exp(exponent, kept)[..., None, :]).exp()
    return torch.log1p((plan * share).sum(-2))


def log_one_plus_sum_exp(exponent: Tensor, where: Tensor) -> Tensor:
    """Compute log(1 + sum_i e^z_ij) over the kept rows i of z (..., i, j): (..., j); 0 if no row is kept."""
    nearly_minus_infinity = torch.finfo(exponent.dtype).min  # a sum over no rows then has a finite gradient
    total = exponent.masked_fill(~where, nearly_minus_infinity).logsumexp(-2)
    return torch.logaddexp(total, torch.zeros_like(total))
