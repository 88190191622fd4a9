"""The backbone interface: images to features, with the freezing that fine-tuning needs."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from pydantic import NonNegativeInt
from torch import Tensor, nn

from dmlkit.component import ComponentConfig


class BackboneConfig(ComponentConfig, frozen=True):
    """Root of the backbone family."""

    sample: ClassVar[Literal["image", "vector"]] = "image"
    """What it takes."""

    freeze_batchnorm_statistics: bool = False
    """Keep the running mean and variance of batch norms: batches of few classes give biased ones."""
    freeze_batchnorm_affine: bool = False
    """Do not train the scale and shift of batch norms."""
    freeze_epochs: NonNegativeInt = 0
    """Epochs at the start in which only head and loss are trained."""

    def build(self, num_features: int | None = None) -> "Backbone":
        """The backbone, with the weights that the recipe names, frozen as it says.

        Args:
            num_features: coordinates of the dataset's vectors; None where it has images.
        """
        backbone = self.create()
        backbone.freeze(
            batchnorm_statistics=self.freeze_batchnorm_statistics,
            batchnorm_affine=self.freeze_batchnorm_affine,
            epochs=self.freeze_epochs,
        )
        return backbone

    def create(self) -> "Backbone":
        """The backbone, with the weights that the recipe names."""
        raise NotImplementedError


class Backbone(nn.Module, ABC):
    """Images (B, 3, H, W), normalized, to features (B, F).

    Attributes:
        num_features: F.
    """

    num_features: int

    def __init__(self) -> None:
        super().__init__()
        self._keep_statistics = False
        self._frozen_epochs = 0

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Features (B, F) of images (B, 3, H, W)."""

    def freeze(
        self, *, batchnorm_statistics: bool = False, batchnorm_affine: bool = False, epochs: int = 0
    ) -> "Backbone":
        """Leave some parameters out of training.

        Args:
            batchnorm_statistics: batch norms use their running statistics also in training, and keep them.
            batchnorm_affine: their scale and shift stay as they are.
            epochs: the first epochs, in which `discard_frozen_gradients` drops the gradients of all parameters.
        """
        self._keep_statistics = batchnorm_statistics
        self._frozen_epochs = epochs
        for module in self._batchnorms():
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(not batchnorm_affine)
        return self.train(self.training)

    def discard_frozen_gradients(self, epoch: int) -> None:
        """Drop all gradients in the epochs in which the backbone is frozen, 0 being the first.

        Gradients are dropped instead of never made: data-parallel training waits for all that it saw at the start.
        """
        if epoch < self._frozen_epochs:
            for parameter in self.parameters():
                parameter.grad = None

    def train(self, mode: bool = True) -> "Backbone":
        """Switch to training, leaving frozen batch norms in evaluation."""
        super().train(mode)
        if self._keep_statistics:
            for module in self._batchnorms():
                module.eval()
        return self

    def _batchnorms(self) -> list[nn.Module]:
        kind = nn.modules.batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage] - the one base of all batch norms
        return [module for module in self.modules() if isinstance(module, kind)]
