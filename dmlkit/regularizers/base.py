"""The regularizer interface: a term of a batch that is added to any loss, in full precision."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn

from dmlkit.component import Component, ComponentConfig, option
from dmlkit.errors import OptionError
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.products import without_autocast


class RegularizerConfig(ComponentConfig, frozen=True):
    """Root of the regularizer family."""

    weight: PositiveFloat = 1.0
    """lambda, weight of the term relative to the loss."""

    keeps_space: ClassVar[bool] = False
    """Whether the embeddings can be compared with those of the `source_run`."""
    takes_several_labels: ClassVar[bool] = False
    """Whether images may have several labels, because the term ignores them."""

    @abstractmethod
    def build(self, manifold: Manifold) -> "Regularizer":
        """Return the term for embeddings on ``manifold``; the trainer multiplies it by ``weight``."""

    def source_run(self) -> str | None:
        """Return the run whose embeddings of the training images `Regularizer.learn_from` takes; None for no run.

        A term with such a run has the same method, which may read only options.
        """
        return None


class Regularizer(Component, nn.Module, ABC, family=RegularizerConfig):
    """A term added to a loss. A subclass implements `compute`; autocast is off inside it, as for losses."""

    manifold: Manifold = option(kw_only=False)
    """Geometry of the embeddings."""
    proxies_per_step: Any = option(default=None, init=False)
    """Maximum number of the loss's proxies that are drawn for a step: the term gets their points and classes instead of
    the embeddings and labels of a batch. None for a term of the batch."""

    def forward(self, embeddings: Tensor, labels: Tensor, images: Tensor | None = None) -> Tensor:
        """Compute the unweighted term of a batch, a scalar.

        Args:
            embeddings: (B, D) points on the manifold; half precision is computed in float32.
            labels: (B,) int64.
            images: (B,) int64, rows of the images in the training split. Default: the first B images.
        """
        with without_autocast(embeddings):
            points = embeddings.float() if embeddings.itemsize < 4 else embeddings
            return self.compute(points, labels) if images is None else self.compute_of(points, labels, images)

    def use_levels(self, levels: Mapping[str, Tensor]) -> None:
        """Take the levels of the training classes, coarsest first, (C,) int64 each; a term may ignore them.

        Raises:
            OptionError: the term needs levels, and there are none.
        """

    @abstractmethod
    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compute the unweighted term in at least float32."""

    def compute_of(self, embeddings: Tensor, labels: Tensor, images: Tensor) -> Tensor:
        """Compute the term of images of the training split; by default the same whichever images they are."""
        return self.compute(embeddings, labels)

    def learn_from(self, points: Tensor, labels: Tensor) -> None:
        """Take what another run says about the training images, before the first step.

        Args:
            points: (N, D') embeddings of all training images by the run of `RegularizerConfig.source_run`; a row of
                zeros for an image that cannot be read.
        """


def mean_where(values: Tensor, where: Tensor) -> Tensor:
    """Return the mean of the values kept by ``where``; 0 if there are none."""
    where = where.expand_as(values)
    return torch.where(where, values, 0).sum() / where.count_nonzero().clamp(min=1)


def stack_levels(name: str, levels: Mapping[str, Tensor]) -> Tensor:
    """Return the levels of the classes as a matrix (C, L), coarsest first."""
    if not levels:
        raise OptionError("regularizers", f"{name}.levels needs a dataset with levels; set dataset.levels")
    return torch.stack(list(levels.values()), 1)
