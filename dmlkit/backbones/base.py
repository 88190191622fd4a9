"""Interface of the backbones, which turn images into features and freeze parameters for fine-tuning."""

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar

from pydantic import NonNegativeInt
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dmlkit.backbones.tuning import FullTuningConfig, LowRankUpdate, TuningConfig, poolings
from dmlkit.backbones.weights import UNKNOWN, PublishedInput
from dmlkit.component import Component, ComponentConfig, one_of, option
from dmlkit.errors import OptionError
from dmlkit.pooling import Pooling

BatchNorm = nn.modules.batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage] - the one base of all batch norms


class BackboneConfig(ComponentConfig, frozen=True):
    """Root of the backbone family."""

    builder: ClassVar[str] = "create"
    sample: ClassVar[str] = "image"
    """Name of the kind of samples that the backbone takes as input."""
    has_class_token: ClassVar[bool] = False
    """Whether the backbone passes a class token to its pooling."""
    is_of_library: ClassVar[bool] = False
    """Whether a library of models builds the backbone, whose import takes 2 s of a processor."""

    tuning: Annotated[TuningConfig, one_of] = FullTuningConfig()
    """Which backbone weights train: all, none, those of the last blocks, or low-rank updates (LoRA)."""
    freeze_batchnorm_statistics: bool = False
    """Keep the running mean and variance of batch norms fixed, because batches of few classes give biased ones."""
    freeze_batchnorm_affine: bool = False
    """Freeze the scale and shift of batch norms."""
    freeze_epochs: NonNegativeInt = 0
    """Number of first epochs in which only the head and the loss train."""

    @classmethod
    def lacks(cls) -> list[str]:
        """Return `create` where neither it nor `build` is defined."""
        root = BackboneConfig
        return [*super().lacks(), *(["create"] if (cls.create, cls.build) == (root.create, root.build) else [])]

    def build(self, num_features: int | None = None) -> "Backbone":
        """Return the backbone with the recipe's weights loaded and its tuning and freezing applied."""
        backbone = self.create().tune(self.tuning)
        backbone.freeze(
            batchnorm_statistics=self.freeze_batchnorm_statistics,
            batchnorm_affine=self.freeze_batchnorm_affine,
            epochs=self.freeze_epochs,
        )
        return backbone

    @property
    def is_pretrained(self) -> bool:
        """Whether the recipe names pretrained weights."""
        return getattr(self, "weights", None) is not None

    def license(self) -> str | None:
        """Return the license of the pretrained weights, ``unknown`` if none is published; None without weights."""
        return UNKNOWN if self.is_pretrained else None

    def create(self) -> "Backbone":
        """Return the backbone with the recipe's weights loaded, before tuning and freezing."""
        raise TypeError(f"{type(self).__name__} has no weights of its own; use build()")

    def check_weights(self) -> None:
        """Raise a `UserError` for an unknown name of weights before anything is built; a file is checked when read."""

    def resolved_keys(self) -> dict[str, Any]:
        """Return values of the weights for keys that the recipe lacks, so that a run does not look them up again."""
        return {}

    def published_input(self) -> PublishedInput:
        """Return how images were prepared for the weights, for ``transform: {name: pretrained}``; raise if unknown."""
        raise OptionError(
            "transform.name",
            "pretrained uses the preprocessing published with the weights, but no preprocessing is "
            f"known for the weights of {self.name}; use another transform, e.g. imagenet",
        )


class Backbone(Component, nn.Module, ABC, family=BackboneConfig):
    """Network from normalized images (B, 3, H, W) to features (B, F).

    The methods of `BackboneConfig` that a backbone defines too, e.g. ``requirements``, may only read options.
    """

    num_features: int = option(init=False)
    """F."""
    frozen_names: frozenset[str] = option(default=frozenset(), init=False)
    """Names of the state dict's tensors that the recipe's tuning does not change."""

    def __post_init__(self) -> None:
        self._frozen: frozenset[nn.Module] = frozenset()
        self._keep_statistics = False
        self._frozen_epochs = 0
        self._waiting: list[nn.Parameter] = []  # trainable, but frozen in the current epoch

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Compute features (B, F) of images (B, 3, H, W)."""

    def take_pooling(self) -> Pooling:
        """Return the pooling and remove it: it comes after the network, also in the order of the parameters."""
        pooling: Any = self.pooling
        del self.pooling
        return pooling

    def blocks(self) -> list[nn.Module]:
        """Return the blocks from input to output; the last one includes what follows it, e.g. a final norm.

        A backbone that is not divided into blocks raises a `UserError`.
        """
        raise OptionError(
            "backbone.tuning", f"{type(self).__name__} is not divided into blocks; use another tuning, e.g. full"
        )

    def tune(self, tuning: TuningConfig) -> "Backbone":
        """Freeze the modules that do not train: they get no gradients and always stay in evaluation mode.

        The backward pass ends at the first weight that trains, because autograd stores nothing before it.
        """
        trained = {module for top in tuning.trained_modules(self, self.blocks) for module in top.modules()}
        self._frozen = frozenset(self.modules()) - trained
        frozen: set[int] = set()
        for module in self._frozen:
            frozen |= {id(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
        tuning.adapt(self)
        state = self.state_dict(keep_vars=True)
        self.frozen_names = frozenset(name for name, tensor in state.items() if id(tensor) in frozen)
        return self.train(self.training)

    def tuned_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the tuning trains, also those frozen for some epochs or as batch norms."""
        return [parameter for name, parameter in self.named_parameters() if name not in self.frozen_names]

    def tuned_blocks(self) -> list[list[nn.Parameter]]:
        """Return the `tuned_parameters` per block, from the last block to the first, then those before all blocks."""
        blocks = [{id(parameter) for parameter in block.parameters()} for block in reversed(self.blocks())]
        for block in blocks[:1]:  # a pooling follows the last one
            block |= {id(parameter) for pooling in poolings(self) for parameter in pooling.parameters()}
        outside = {id(parameter) for parameter in self.parameters()}.difference(*blocks)
        tuned = self.tuned_parameters()
        return [[parameter for parameter in tuned if id(parameter) in block] for block in (*blocks, outside)]

    def merge(self) -> "Backbone":
        """Merge low-rank updates, if any, into the weights, which makes them faster and restores their usual names."""
        for module in list(self.modules()):
            for name, updates in dict(getattr(module, "parametrizations", {})).items():
                if isinstance(updates[0], LowRankUpdate):
                    parametrize.remove_parametrizations(module, name, leave_parametrized=True)
        return self

    def freeze(
        self, *, batchnorm_statistics: bool = False, batchnorm_affine: bool = False, epochs: int = 0
    ) -> "Backbone":
        """Exclude parameters from training.

        Args:
            batchnorm_statistics: batch norms use their running statistics in training too, without updating them.
            batchnorm_affine: the scale and shift of batch norms do not train.
            epochs: number of first epochs in which no parameter trains; statistics are still updated. See `set_epoch`.
        """
        self._keep_statistics = batchnorm_statistics
        self._frozen_epochs = epochs
        for module in self._batchnorms() if batchnorm_affine else ():
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
        return self.train(self.training)

    def set_epoch(self, epoch: int) -> bool:
        """Freeze all parameters in the first epochs, which saves the backward pass, and unfreeze them later.

        Epochs count from 0. Return whether the set of parameters that need a gradient has changed.
        """
        is_frozen = epoch < self._frozen_epochs
        if is_frozen == bool(self._waiting):
            return False
        changed = [parameter for parameter in self.parameters() if parameter.requires_grad] or self._waiting
        self._waiting = changed if is_frozen else []
        for parameter in changed:
            parameter.requires_grad_(not is_frozen)
        return bool(changed)

    def train(self, mode: bool = True) -> "Backbone":
        """Switch to training mode, except frozen modules: their dropout stays off, their batch norms unchanged."""
        super().train(mode)
        for module in self._frozen:
            module.training = False
        if self._keep_statistics:
            for module in self._batchnorms():
                module.eval()
        return self

    def _batchnorms(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, BatchNorm)]


def blocks_in(network: nn.Module, *containers: str) -> list[nn.Module]:
    """Return the blocks inside a network's containers; the last block includes the children that follow."""
    children = list(network.named_children())
    blocks = [block for name, child in children if name in containers for block in child.children()]
    end = 1 + max(index for index, (name, _) in enumerate(children) if name in containers)
    return [*blocks[:-1], nn.ModuleList([blocks[-1], *(child for _, child in children[end:])])]
