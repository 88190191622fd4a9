"""Backward-compatible training: new embeddings are classified by the class centers of an older run."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import torch
from pydantic import AfterValidator, Field, PositiveFloat
from torch import Tensor
from torch.nn.functional import cross_entropy

from dmlkit.component import Requirement, option, recipe_key
from dmlkit.manifolds.base import NEEDS_BOUNDED
from dmlkit.regularizers.base import Regularizer, check_source_run, keys_of_run


class Compatible(Regularizer, name="compatible"):
    r"""BCT (Shen et al. 2020): embeddings stay near the class centers of an older run, so that both can be compared.

    The influence loss of Shen et al., CVPR 2020 (arXiv:2003.11942).

    .. math:: -\frac{1}{B} \sum_i \log \frac{e^{\alpha s(x_i, \mu_{y_i})}}{\sum_c e^{\alpha s(x_i, \mu_c)}}

    It is the loss of the new embeddings x under the older classifier, added to the loss under the new one. The older
    classifier is their synthesized one, so that the older run may have been trained with any loss and on other classes:
    mu_c is the mean of the older embeddings of the training images of class c. s is the relative similarity.

    D: the mean is taken of log maps at the origin, and mapped back to a point; on the sphere it is the direction of the
    mean. D: the softmax is that of scaled similarities, where the paper takes the loss of the older run.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> term, labels = Compatible(Sphere(2), scale=1.0), torch.tensor([0, 1])
        >>> term.learn_from(torch.eye(2), labels)
        >>> round(term(torch.eye(2), labels).item(), 4)  # log(1 + e^-1)
        0.3133
    """

    keeps_space: ClassVar[bool] = True
    run: Annotated[str, Field(min_length=1), AfterValidator(check_source_run)] = recipe_key()
    """Older run, with the same space and width. It embeds the training images once, without augmentation, before the
    first step."""
    scale: PositiveFloat = 32.0
    """Inverse temperature of the softmax over the classes, in units of the relative similarity."""
    centers: Tensor = option(init=False)  # (C, D)

    def source_run(self) -> str:
        return self.run

    def requirements(self) -> Iterable[Requirement]:
        yield NEEDS_BOUNDED
        if older := keys_of_run(self.run):
            width, space = older["embedding_dim"], older["manifold"]["name"]
            yield Requirement("embedding_dim", (width,), f"embeddings of {self.run} have {width} dimensions")
            yield Requirement("manifold.name", (space,), f"embeddings of {self.run} are on {space}")

    def __post_init__(self) -> None:
        self.register_buffer("centers", torch.empty(0, self.manifold.point_dim), persistent=False)

    @torch.no_grad()
    def learn_from(self, points: Tensor, labels: Tensor) -> None:
        if points.shape[1:] != (self.manifold.point_dim,):
            raise ValueError(f"got embeddings of {points.shape[1]} coordinates, expected {self.manifold.point_dim}")
        was_read = points.any(1)  # an image that cannot be read has zeros
        features: Any = self.manifold.to_features(points[was_read].double())
        sums = torch.zeros(int(labels.max()) + 1, features.shape[1], dtype=features.dtype, device=features.device)
        counts = labels[was_read].bincount(minlength=len(sums)).clamp(min=1)
        means = sums.index_add_(0, labels[was_read], features) / counts[:, None]
        self.centers = self.manifold.from_features(means).float()

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        similarity = self.manifold.relative_similarity(embeddings, self.centers.to(embeddings))  # (B, C)
        return cross_entropy(self.scale * similarity, labels)
