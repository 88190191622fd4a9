"""The backbone interface: images to features."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from dmlkit.component import ComponentConfig


class BackboneConfig(ComponentConfig, frozen=True):
    """Root of the backbone family."""

    freeze_batchnorm: bool = False
    """Keep the running statistics of batch norms: batches of few classes give biased ones."""

    def build(self) -> "Backbone":
        """The backbone, with the weights that the recipe names."""
        raise NotImplementedError


class Backbone(nn.Module, ABC):
    """Images (B, 3, H, W), normalized, to features (B, F).

    Args:
        freeze_batchnorm: batch norms use their running statistics also in training.

    Attributes:
        num_features: F.
    """

    num_features: int

    def __init__(self, *, freeze_batchnorm: bool) -> None:
        super().__init__()
        self.freeze_batchnorm = freeze_batchnorm

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Features (B, F) of images (B, 3, H, W)."""

    def train(self, mode: bool = True) -> "Backbone":
        """Switch to training, leaving frozen batch norms in evaluation."""
        super().train(mode)
        if self.freeze_batchnorm:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportPrivateUsage]
                    module.eval()
        return self
