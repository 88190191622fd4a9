"""No backbone: vectors are features as they are."""

from collections.abc import Iterable
from typing import ClassVar, Literal

from torch import Tensor

from dmlkit.backbones.base import Backbone, BackboneConfig
from dmlkit.component import Requirement


class IdentityConfig(BackboneConfig, frozen=True):
    """Takes a dataset's vectors as features, so that the head alone is trained."""

    sample: ClassVar = "vector"

    name: Literal["identity"] = "identity"

    def build(self, num_features: int | None = None) -> "Identity":
        """The backbone for vectors of ``num_features`` coordinates."""
        if num_features is None:
            raise ValueError("identity takes vectors; expected their number of coordinates")
        return Identity(num_features)

    def requirements(self) -> Iterable[Requirement]:
        nothing = "it has no weights"
        yield Requirement("backbone.tuning.name", ("full",), nothing)
        yield Requirement("backbone.freeze_batchnorm_statistics", (False,), nothing)
        yield Requirement("backbone.freeze_batchnorm_affine", (False,), nothing)
        yield Requirement("backbone.freeze_epochs", (0,), nothing)
        yield Requirement("optimizer.lr_multipliers.backbone", (1.0,), nothing)
        yield Requirement("training.compile", (False,), nothing)
        yield Requirement("training.gradient_checkpointing", (False,), nothing)


class Identity(Backbone):
    """Hands vectors on.

    Args:
        num_features: their coordinates.

    Example:
        >>> import torch
        >>> Identity(3)(torch.ones(1, 3))
        tensor([[1., 1., 1.]])
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, images: Tensor) -> Tensor:
        return images
