"""The backbone interface: images to features, with the freezing that fine-tuning needs."""

from abc import ABC, abstractmethod
from typing import Annotated

from pydantic import NonNegativeInt
from torch import Tensor, nn

from dmlkit.backbones.tuning.base import TuningConfig
from dmlkit.backbones.tuning.full import FullTuningConfig
from dmlkit.component import ComponentConfig, one_of
from dmlkit.errors import UserError


class BackboneConfig(ComponentConfig, frozen=True):
    """Root of the backbone family."""

    tuning: Annotated[TuningConfig, one_of] = FullTuningConfig()
    """Which weights of the backbone train: all, none, those of the last blocks, or low-rank updates of them."""
    freeze_batchnorm_statistics: bool = False
    """Keep the running mean and variance of batch norms: batches of few classes give biased ones."""
    freeze_batchnorm_affine: bool = False
    """Do not train the scale and shift of batch norms."""
    freeze_epochs: NonNegativeInt = 0
    """Epochs at the start in which only head and loss are trained."""

    def build(self) -> "Backbone":
        """The backbone, with the weights that the recipe names, frozen as it says."""
        backbone = self.create().tune(self.tuning)
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
        self._frozen: frozenset[nn.Module] = frozenset()
        self._keep_statistics = False
        self._frozen_epochs = 0

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Features (B, F) of images (B, 3, H, W)."""

    def blocks(self) -> list[nn.Module]:
        """The blocks from input to output, the last with all that follows it, e.g. a final norm.

        Raises:
            UserError: it has none that can be told apart.
        """
        raise UserError(f"backbone.tuning: {type(self).__name__} has no blocks that can be told apart")

    def tune(self, tuning: TuningConfig) -> "Backbone":
        """Freeze what does not train: no gradients, and in evaluation also while the rest trains.

        Nothing runs backward before the first weight that trains: autograd keeps nothing of what needs no gradient.

        Raises:
            UserError: this backbone cannot be tuned like this.
        """
        trained = {module for top in tuning.trained_modules(self, self.blocks) for module in top.modules()}
        self._frozen = frozenset(self.modules()) - trained
        for module in self._frozen:
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
        return self.train(self.training)

    def tuned_parameters(self) -> list[nn.Parameter]:
        """The parameters that train, in frozen epochs too, and the batch norms' among them, frozen or not."""
        frozen = {id(parameter) for module in self._frozen for parameter in module.parameters(recurse=False)}
        return [parameter for parameter in self.parameters() if id(parameter) not in frozen]

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
        for module in self._batchnorms() if batchnorm_affine else ():
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
        return self.train(self.training)

    def discard_frozen_gradients(self, epoch: int) -> None:
        """Drop all gradients in the epochs in which the backbone is frozen, 0 being the first.

        Gradients are dropped instead of never made: data-parallel training waits for all that it saw at the start.
        """
        if epoch < self._frozen_epochs:
            for parameter in self.parameters():
                parameter.grad = None

    def train(self, mode: bool = True) -> "Backbone":
        """Switch to training, leaving what is frozen in evaluation: dropout off, batch norms as they are."""
        super().train(mode)
        for module in self._frozen:
            module.training = False
        if self._keep_statistics:
            for module in self._batchnorms():
                module.eval()
        return self

    def _batchnorms(self) -> list[nn.Module]:
        kind = nn.modules.batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage] - the one base of all batch norms
        return [module for module in self.modules() if isinstance(module, kind)]
