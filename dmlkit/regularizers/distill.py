"""Distillation: relations between the images of a batch should be those that a teacher sees."""

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, ValidationInfo, field_validator, model_validator
from torch import Tensor
from torch.nn.functional import normalize, smooth_l1_loss

from dmlkit.component import Requirement
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.products import safe_sqrt, squared_distances
from dmlkit.regularizers.base import Regularizer, RegularizerConfig, check_source_run, keys_of_run

FLAT = ("sphere", "euclidean")
DistillKind = Literal["relational", "similarity"]
ANGLE_WEIGHT = 2.0


class DistillConfig(RegularizerConfig, frozen=True):
    """RKD (Park et al. 2019) or similarity preservation (Tung & Mori 2019): learn the relations that a teacher sees."""

    takes_several_labels: ClassVar[bool] = True
    name: Literal["distill"] = "distill"
    teacher: Annotated[str, Field(min_length=1)]
    """Run of the teacher, whose embeddings may have another width. It embeds the training images once, without
    augmentation, before the first step."""
    kind: DistillKind = "relational"
    """What to compare: distances and angles (``relational``), or the rows of the matrix of inner products
    (``similarity``; the paper's weight is 3000)."""
    angle_weight: NonNegativeFloat | None = None
    """Weight of angles relative to distances, only of ``relational``; null is 2, as in the paper."""

    def source_run(self) -> str:
        return self.teacher

    def build(self, manifold: Manifold) -> "Distill":
        return Distill(manifold, **self.options("weight", "teacher"))

    def requirements(self) -> Iterable[Requirement]:
        return (Requirement("manifold.name", FLAT, "it compares straight lines between embeddings"),)

    @field_validator("teacher")
    @classmethod
    def check_teacher(cls, teacher: str, info: ValidationInfo) -> str:
        """Reject a teacher that is missing or has curved embeddings."""
        check_source_run(teacher, info)
        space = keys_of_run(teacher).get("manifold", {}).get("name", "sphere")
        if space not in FLAT and not (info.context or {}).get("is_trained", False):
            raise ValueError(
                f"{teacher} has embeddings on {space}; expected {' or '.join(FLAT)}: straight lines are compared"
            )
        return teacher

    @model_validator(mode="after")
    def check_angle_weight(self) -> "DistillConfig":
        """Reject a weight that would be ignored."""
        if self.kind == "similarity" and self.angle_weight is not None:
            raise ValueError("angle_weight applies to kind relational; remove it")
        return self


class Distill(Regularizer):
    r"""Distillation of relations; t are the teacher's points of a batch, s the student's.

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

    Args:
        manifold: the geometry of the student: a sphere or Euclidean space.
        kind: see above.
        angle_weight: lambda_A, the weight of the angles; None is 2.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> term = Distill(Euclidean(1), angle_weight=0)
        >>> line, labels = torch.tensor([[0.0], [1.0], [4.0]]), torch.tensor([0, 0, 1])
        >>> term.learn_from(2 * line, labels)  # the same relations
        >>> term(line, labels).item()
        0.0
    """

    points: Tensor

    def __init__(
        self, manifold: Manifold, *, kind: DistillKind = "relational", angle_weight: float | None = None
    ) -> None:
        super().__init__(manifold)
        self.kind = kind
        self.angle_weight = ANGLE_WEIGHT if angle_weight is None else angle_weight
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
        apart = mean_huber(relative_distances(teacher), relative_distances(student), distinct(len(student), 2, student))
        if self.angle_weight == 0:
            return apart
        triplets = distinct(len(student), 3, student)
        return apart + self.angle_weight * mean_huber(angles(teacher), angles(student), triplets)


def distinct(count: int, places: int, like: Tensor) -> Tensor:
    """Return where the indices of ``places`` dimensions of size ``count`` are all different, on the device of a tensor.

    Example:
        >>> distinct(2, 2, torch.zeros(1)).tolist(), int(distinct(4, 3, torch.zeros(1)).sum())
        ([[False, True], [True, False]], 24)
    """
    apart = ~torch.eye(count, dtype=torch.bool, device=like.device)
    return apart if places == 2 else apart[:, :, None] & apart[None] & apart[:, None]


def mean_huber(teacher: Tensor, student: Tensor, where: Tensor) -> Tensor:
    """Return the mean Huber loss with delta 1 over the entries kept by ``where``; 0 if there are none."""
    values = smooth_l1_loss(student, teacher, reduction="none") * where
    return values.sum() / where.count_nonzero().clamp(min=1)


def relative_distances(points: Tensor) -> Tensor:
    """Compute the distances (B, B) of points (B, D) in units of their mean over different points.

    Example:
        >>> relative_distances(torch.tensor([[0.0], [2.0]])).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    apart = safe_sqrt(squared_distances(points, points).clamp(min=0)) * distinct(len(points), 2, points)
    mean = apart.sum() / max(len(points) * (len(points) - 1), 1)
    return apart / mean.clamp(min=torch.finfo(points.dtype).tiny ** 0.5)  # equal points have distances of 0


def angles(points: Tensor) -> Tensor:
    """Compute the cosines (B, B, B) of the angles at the point of the first index between those of the others.

    Example:
        >>> corner = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
        >>> angles(corner)[0, 1, 2].item()
        0.0
    """
    rays = normalize(points[None] - points[:, None], dim=2)  # (B, B, D), from the first to the second
    return rays @ rays.transpose(1, 2)


def similarity_rows(points: Tensor) -> Tensor:
    """Compute the inner products (B, B) of points (B, D), each row with length 1."""
    return normalize(points @ points.T, dim=1)
