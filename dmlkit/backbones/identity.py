"""Identity backbone, which returns a dataset's vectors unchanged as features."""

from collections.abc import Iterable
from typing import ClassVar, Literal

from torch import Tensor

from dmlkit.backbones.base import Backbone, BackboneConfig
from dmlkit.component import Requirement


class IdentityConfig(BackboneConfig, frozen=True):
    """Identity: a dataset's vectors are the features, and only the head trains."""

    sample: ClassVar = "vector"

    name: Literal["identity"] = "identity"

    def build(self, num_features: int | None = None) -> "Identity":
        """Return the backbone for vectors of ``num_features`` coordinates."""
        if num_features is None:
            raise ValueError("identity: num_features is missing; expected the number of coordinates of the vectors")
        return Identity(num_features)

    def requirements(self) -> Iterable[Requirement]:
        unchanged: dict[str, object] = {
            "backbone.tuning.name": "full",
            "backbone.freeze_batchnorm_statistics": False,
            "backbone.freeze_batchnorm_affine": False,
            "backbone.freeze_epochs": 0,
            "optimizer.lr_multipliers.backbone": 1.0,
            "training.compile": False,
            "training.gradient_checkpointing": False,
        }
        return [Requirement(key, (value,), "the backbone identity has no weights") for key, value in unchanged.items()]


class Identity(Backbone):
    """Backbone that returns its input vectors.

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
