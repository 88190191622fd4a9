"""ResNet-18 and ResNet-50 of torchvision."""

from typing import Literal

from torch import Tensor, nn

from dmlkit.backbones.base import Backbone, BackboneConfig
from dmlkit.errors import UserError


class ResNet18Config(BackboneConfig, frozen=True):
    """ResNet-18 (He et al. 2016), 512 features."""

    name: Literal["resnet18"] = "resnet18"
    weights: Literal["imagenet"] | None = None  # null trains from scratch

    def build(self) -> "ResNet":
        return ResNet(18, weights=self.weights, freeze_batchnorm=self.freeze_batchnorm)


class ResNet50Config(BackboneConfig, frozen=True):
    """ResNet-50 (He et al. 2016), 2 048 features."""

    name: Literal["resnet50"] = "resnet50"
    weights: Literal["imagenet"] | None = None

    def build(self) -> "ResNet":
        return ResNet(50, weights=self.weights, freeze_batchnorm=self.freeze_batchnorm)


class ResNet(Backbone):
    """torchvision's ResNet up to its average pooling.

    Args:
        depth: 18 or 50.
        weights: ``"imagenet"`` takes torchvision's best ImageNet weights, downloaded once; None starts at random.
        freeze_batchnorm: see `Backbone`.

    Raises:
        UserError: the weights cannot be downloaded.
    """

    def __init__(
        self,
        depth: Literal[18, 50],
        *,
        weights: Literal["imagenet"] | None = None,
        freeze_batchnorm: bool = False,
    ) -> None:
        super().__init__(freeze_batchnorm=freeze_batchnorm)
        from torchvision import models

        build = models.resnet18 if depth == 18 else models.resnet50
        pretrained = None
        if weights == "imagenet":
            pretrained = (models.ResNet18_Weights if depth == 18 else models.ResNet50_Weights).DEFAULT
        try:
            self.network = build(weights=pretrained)
        except OSError as error:
            raise UserError(
                f"backbone.weights: could not download {pretrained.url if pretrained else ''} ({error}); put that "
                "file into torch's folder of checkpoints (see torch.hub.get_dir) or set weights to null"
            ) from error
        self.num_features = self.network.fc.in_features
        self.network.fc = nn.Identity()  # type: ignore[assignment]

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)
