"""GoogLeNet of torchvision."""

from typing import Literal

from torch import Tensor, nn

from dmlkit.backbones.base import Backbone
from dmlkit.backbones.torchvision import TorchvisionConfig, build_torchvision
from dmlkit.pooling import Avg, Pooling


class GoogLeNetConfig(TorchvisionConfig, frozen=True):
    """GoogLeNet with batch norm (Szegedy et al. 2015, as in torchvision), 1 024 features."""

    name: Literal["googlenet"] = "googlenet"

    def create(self) -> "GoogLeNet":
        return GoogLeNet(weights=self.weights, pooling=self.pooling.build())


class GoogLeNet(Backbone):
    """torchvision's GoogLeNet up to its pooling, without auxiliary classifiers and dropout.

    Args:
        weights: see `TorchvisionConfig`.
        pooling: pooling of the last feature map; None averages.

    Raises:
        UserError: the weights are unknown or cannot be downloaded or read.
    """

    def __init__(self, *, weights: str | None = None, pooling: Pooling | None = None) -> None:
        super().__init__()
        # torchvision's weights need pixels in -1..1; transform_input converts them from ImageNet's statistics. It is
        # always on, so that a trained model does not depend on where its first weights came from.
        options = {"transform_input": True, "aux_logits": False, "init_weights": False}
        self.network, self.num_features = build_torchvision("googlenet", weights, "fc", **options)
        self.network.avgpool = pooling or Avg()
        self.network.dropout = nn.Identity()

    def blocks(self) -> list[nn.Module]:
        return [child for name, child in self.network.named_children() if name.startswith("inception")]

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)
