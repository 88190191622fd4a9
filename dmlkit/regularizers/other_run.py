"""Terms that learn from another run: a teacher to be distilled, or an older run to stay compatible with."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, ValidationInfo
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, smooth_l1_loss

from dmlkit.component import Requirement, option, recipe_key
from dmlkit.errors import UserError
from dmlkit.files.source import require_run
from dmlkit.files.yaml_tree import read_yaml
from dmlkit.manifolds.base import NEEDS_BOUNDED
from dmlkit.manifolds.products import safe_sqrt, squared_distances
from dmlkit.regularizers.base import Regularizer, mean_where

FLAT = ("sphere", "euclidean")


def check_source_run(path: str, info: ValidationInfo) -> str:
    """Check that a key of a recipe names a run; one that has been trained with it does not need it any more."""
    if not (info.context or {}).get("is_trained", False):
        try:
            space_of_run(path)
        except UserError as error:
            raise ValueError(str(error)) from None
    return path


def space_of_run(path: str) -> tuple[int, str]:
    """Return the width and the manifold of a run's embeddings, as its recipe has them."""
    require_run(Path(path))
    file = Path(path) / "recipe.yaml"
    match read_yaml(file, "recipe", f"{file}: no such file; expected the recipe of a run").data:
        case {"embedding_dim": int(width), "manifold": {"name": str(space)}}:
            return width, space
        case _:
            raise UserError(f"{file}: has no embedding_dim, or no manifold with a name; expected the recipe of a run")


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
        with suppress(UserError):  # a run that was there when the recipe was checked
            width, space = space_of_run(self.run)
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
        if not len(self.centers):
            raise ValueError("Compatible: got no embeddings of the older run, expected a call of learn_from before")
        similarity = self.manifold.relative_similarity(embeddings, self.centers.to(embeddings))  # (B, C)
        return cross_entropy(self.scale * similarity, labels)


def check_teacher(teacher: str, info: ValidationInfo) -> str:
    """Check that a key of a recipe names a run with flat embeddings; see `check_source_run`."""
    check_source_run(teacher, info)
    if not (info.context or {}).get("is_trained", False) and (space := space_of_run(teacher)[1]) not in FLAT:
        raise ValueError(
            f"{teacher} has embeddings on {space}; expected {' or '.join(FLAT)}: straight lines are compared"
        )
    return teacher


def check_angle_weight(weight: float | None, info: ValidationInfo) -> float | None:
    """Check in a recipe that the weight is not ignored."""
    if weight is not None and (info.data or {}).get("kind") == "similarity":
        raise ValueError("angle_weight applies to kind relational; remove it")
    return weight


class Distill(Regularizer, name="distill"):
    r"""RKD (Park et al. 2019) or similarity preservation (Tung & Mori 2019): learn the relations that a teacher sees.

    t are the teacher's points of a batch, s the student's.

    *relational* is RKD-DA of Park et al., CVPR 2019 (arXiv:1904.05068, section 3.2), with the Huber loss l:

    .. math:: \frac{1}{B (B - 1)} \sum_{i \ne j} l(\psi_D(t_i, t_j), \psi_D(s_i, s_j)) + \lambda_A
            \frac{1}{B (B - 1) (B - 2)} \sum_{i, j, k} l(\psi_A(t_i, t_j, t_k), \psi_A(s_i, s_j, s_k))

    .. math:: \psi_D(x_i, x_j) = \|x_i - x_j\| / \mu, \quad \psi_A(x_i, x_j, x_k) = \cos \angle x_i x_j x_k

    mu is the mean distance of the batch, of the teacher and of the student each, and i, j, k are different. D: means
    replace the paper's sums, so that weights do not depend on the batch. The angles take memory for several tensors of
    B^3 numbers: 70 MB each for 256 images.

    *similarity* is Tung & Mori, ICCV 2019 (arXiv:1907.09682, section 3), with the matrix G of inner products:

    .. math:: \frac{1}{B^2} \| \tilde G_t - \tilde G_s \|_F^2, \quad \tilde G_{i} = G_i / \|G_i\|_2

    D: embeddings replace the activations of a hidden layer.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> term = Distill(Euclidean(1), angle_weight=0)
        >>> line, labels = torch.tensor([[0.0], [1.0], [4.0]]), torch.tensor([0, 0, 1])
        >>> term.learn_from(2 * line, labels)  # the same relations
        >>> term(line, labels).item()
        0.0
    """

    takes_several_labels: ClassVar[bool] = True
    teacher: Annotated[str, Field(min_length=1), AfterValidator(check_teacher)] = recipe_key()
    """Run of the teacher, whose embeddings may have another width. It embeds the training images once, without
    augmentation, before the first step."""
    kind: Literal["relational", "similarity"] = "relational"
    """What to compare: distances and angles (``relational``), or the rows of the matrix of inner products
    (``similarity``; the paper's weight is 3000)."""
    angle_weight: Annotated[NonNegativeFloat | None, AfterValidator(check_angle_weight)] = None
    """Weight of angles relative to distances, only of ``relational``; null is 2, as in the paper."""
    points: Tensor = option(init=False)  # (N, D') of the teacher

    def source_run(self) -> str:
        return self.teacher

    def requirements(self) -> Iterable[Requirement]:
        return (Requirement("manifold.name", FLAT, "it compares straight lines between embeddings"),)

    def __post_init__(self) -> None:
        self.register_buffer("points", torch.empty(0, 0), persistent=False)

    def learn_from(self, points: Tensor, labels: Tensor) -> None:
        self.points = points

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self._difference(self.points[: len(embeddings)].to(embeddings), embeddings)

    def compute_of(self, embeddings: Tensor, labels: Tensor, images: Tensor) -> Tensor:
        return self._difference(self.points[images].to(embeddings), embeddings)

    def _difference(self, teacher: Tensor, student: Tensor) -> Tensor:
        if len(teacher) != len(student):
            raise ValueError(f"Distill: got {len(teacher)} points of the teacher for a batch of {len(student)}")
        if self.kind == "similarity":
            return (similarity_rows(teacher) - similarity_rows(student)).square().mean()
        huber = smooth_l1_loss(relative_distances(student), relative_distances(teacher), reduction="none")
        apart = mean_where(huber, distinct(len(student), 2, student))
        angle_weight = 2.0 if self.angle_weight is None else self.angle_weight
        if angle_weight == 0:
            return apart
        huber = smooth_l1_loss(angles(student), angles(teacher), reduction="none")
        return apart + angle_weight * mean_where(huber, distinct(len(student), 3, student))


def distinct(count: int, places: int, like: Tensor) -> Tensor:
    """Return where the indices of ``places`` dimensions of size ``count`` all differ, on the device of a tensor."""
    apart = ~torch.eye(count, dtype=torch.bool, device=like.device)
    return apart if places == 2 else apart[:, :, None] & apart[None] & apart[:, None]


def relative_distances(points: Tensor) -> Tensor:
    """Compute the distances (B, B) of points (B, D) in units of their mean over different points."""
    apart = safe_sqrt(squared_distances(points, points)) * distinct(len(points), 2, points)
    mean = apart.sum() / max(len(points) * (len(points) - 1), 1)
    return apart / mean.clamp(min=torch.finfo(points.dtype).tiny ** 0.5)  # equal points have distances of 0


def angles(points: Tensor) -> Tensor:
    """Compute the cosines (B, B, B) of the angles at the point of the first index between those of the others."""
    rays = normalize(points[None] - points[:, None], dim=2)  # (B, B, D), from the first to the second
    return rays @ rays.transpose(1, 2)


def similarity_rows(points: Tensor) -> Tensor:
    """Compute the inner products (B, B) of points (B, D), each row with length 1."""
    return normalize(points @ points.T, dim=1)
