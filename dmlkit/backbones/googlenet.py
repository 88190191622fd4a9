"""GoogLeNet of torchvision."""

from collections.abc import Iterable
from typing import Annotated, Literal

from torch import Tensor, nn

from dmlkit.backbones.base import Backbone, BackboneConfig
from dmlkit.backbones.pretrained.weights import (
    PublishedInput,
    build_torchvision,
    check_name,
    torchvision_input,
    torchvision_requirements,
)
from dmlkit.component import Requirement, one_of
from dmlkit.pooling import Avg, Pooling, PoolingConfig


class GoogLeNetConfig(BackboneConfig, frozen=True):
    """GoogLeNet with batch norm (Szegedy et al. 2015, as in torchvision), 1 024 features."""

    name: Literal["googlenet"] = "googlenet"
    weights: str | None = None
    """``imagenet``, a name of torchvision weights, or the path of a file; null trains from scratch."""
    pooling: Annotated[PoolingConfig, one_of] = Avg.Config()
    """Pooling of the last feature map to one vector."""

    def create(self) -> "GoogLeNet":
        return GoogLeNet(weights=self.weights, pooling=self.pooling.build())

    def requirements(self) -> Iterable[Requirement]:
        return torchvision_requirements(self.weights)

    def check_weights(self) -> None:
        check_name("googlenet", self.weights)

    def published_input(self) -> PublishedInput:
        return torchvision_input("googlenet", self.weights)


class GoogLeNet(Backbone):
    """torchvision's GoogLeNet up to its pooling, without auxiliary classifiers and dropout.

    Args:
        weights: see `dmlkit.backbones.pretrained.weights.build_torchvision`.
        pooling: pooling of the last feature map; None averages.

    Raises:
        UserError: the weights are unknown or cannot be downloaded or read.
    """

    def __init__(self, *, weights: str | None = None, pooling: Pooling | None = None) -> None:
        super().__init__()
        from torchvision import models

        build, enum = models.googlenet, models.GoogLeNet_Weights
        # torchvision's weights need pixels in -1..1; transform_input converts them from ImageNet's statistics. It is
        # always on, so that a trained model does not depend on where its first weights came from.
        options = {"transform_input": True, "aux_logits": False, "init_weights": False}
        self.network, self.num_features = build_torchvision(build, enum, weights, "fc", **options)
        self.network.avgpool = pooling or Avg()
        self.network.dropout = nn.Identity()

    def blocks(self) -> list[nn.Module]:
        return [child for name, child in self.network.named_children() if name.startswith("inception")]

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)
