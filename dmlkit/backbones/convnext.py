"""ConvNeXt of torchvision."""

from typing import Literal

from torch import Tensor, nn

from dmlkit.backbones.base import Backbone
from dmlkit.backbones.torchvision import TorchvisionConfig, build_torchvision
from dmlkit.pooling import Avg, Pooling

Size = Literal["tiny", "small", "base", "large"]


class ConvNeXtConfig(TorchvisionConfig, frozen=True):
    """ConvNeXt (Liu et al. 2022), 768 features (tiny, small), 1 024 (base) or 1 536 (large)."""

    name: Literal["convnext"] = "convnext"
    size: Size = "tiny"
    """Width and depth of the network."""

    @property
    def network(self) -> str:
        return f"convnext_{self.size}"

    def create(self) -> "ConvNeXt":
        return ConvNeXt(size=self.size, weights=self.weights, pooling=self.pooling.build())


class ConvNeXt(Backbone):
    """torchvision's ConvNeXt up to the layer norm that follows its pooling.

    Args:
        size: width and depth of the network.
        weights: see `TorchvisionConfig`.
        pooling: pooling of the last feature map; None averages.

    Raises:
        UserError: the weights are unknown or cannot be downloaded or read.
    """

    def __init__(self, *, size: Size = "tiny", weights: str | None = None, pooling: Pooling | None = None) -> None:
        super().__init__()
        self.network, self.num_features = build_torchvision(f"convnext_{size}", weights, "classifier.2")
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
