"""ConvNeXt of torchvision."""

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

Size = Literal["tiny", "small", "base", "large"]


class ConvNeXtConfig(BackboneConfig, frozen=True):
    """ConvNeXt (Liu et al. 2022), 768 features (tiny, small), 1 024 (base) or 1 536 (large)."""

    name: Literal["convnext"] = "convnext"
    size: Size = "tiny"
    """Width and depth of the network."""
    weights: str | None = None
    """``imagenet``, a name of torchvision weights, or the path of a file; null trains from scratch."""
    pooling: Annotated[PoolingConfig, one_of] = Avg.Config()
    """Pooling of the last feature map to one vector."""

    def create(self) -> "ConvNeXt":
        return ConvNeXt(size=self.size, weights=self.weights, pooling=self.pooling.build())

    def requirements(self) -> Iterable[Requirement]:
        return torchvision_requirements(self.weights)

    def check_weights(self) -> None:
        check_name(f"convnext_{self.size}", self.weights)

    def published_input(self) -> PublishedInput:
        return torchvision_input(f"convnext_{self.size}", self.weights)


class ConvNeXt(Backbone):
    """torchvision's ConvNeXt up to the layer norm that follows its pooling.

    Args:
        size: width and depth of the network.
        weights: see `dmlkit.backbones.pretrained.weights.build_torchvision`.
        pooling: pooling of the last feature map; None averages.

    Raises:
        UserError: the weights are unknown or cannot be downloaded or read.
    """

    def __init__(self, *, size: Size = "tiny", weights: str | None = None, pooling: Pooling | None = None) -> None:
        super().__init__()
        from torchvision import models

        build, enum = {
            "tiny": (models.convnext_tiny, models.ConvNeXt_Tiny_Weights),
            "small": (models.convnext_small, models.ConvNeXt_Small_Weights),
            "base": (models.convnext_base, models.ConvNeXt_Base_Weights),
            "large": (models.convnext_large, models.ConvNeXt_Large_Weights),
        }[size]
        self.network, self.num_features = build_torchvision(build, enum, weights, "classifier.2")
        self.pooling = pooling or Avg()

    def blocks(self) -> list[nn.Module]:
        _, first, *stages = self.network.features  # after the stem, stages alternate with layers that halve the map
        found: list[nn.Module] = list(first)
        for halving, (start, *others) in zip(stages[::2], stages[1::2], strict=True):
            found += [nn.ModuleList([halving, start]), *others]
        return [*found[:-1], nn.ModuleList([found[-1], self.network.classifier])]

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.pooling(self.network.features(images))
        return self.network.classifier(pooled[:, :, None, None])
