"""The backbone interface: images to features, with the freezing that fine-tuning needs."""

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import NonNegativeInt
from torch import Tensor, nn

from dmlkit.backbones.pretrained.published import PublishedInput
from dmlkit.backbones.tuning.base import TuningConfig
from dmlkit.backbones.tuning.full import FullTuningConfig
from dmlkit.backbones.tuning.lora import merge
from dmlkit.component import ComponentConfig, one_of
from dmlkit.errors import UserError


class BackboneConfig(ComponentConfig, frozen=True):
    """Root of the backbone family."""

    sample: ClassVar[Literal["image", "vector"]] = "image"
    """What it takes."""

    tuning: Annotated[TuningConfig, one_of] = FullTuningConfig()
    """Which weights of the backbone train: all, none, those of the last blocks, or low-rank updates of them."""
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
        backbone = self.create().tune(self.tuning)
        backbone.freeze(
            batchnorm_statistics=self.freeze_batchnorm_statistics,
            batchnorm_affine=self.freeze_batchnorm_affine,
            epochs=self.freeze_epochs,
        )
        return backbone

    @property
    def is_pretrained(self) -> bool:
        """Whether the recipe names weights to start from."""
        return getattr(self, "weights", None) is not None

    def create(self) -> "Backbone":
        """The backbone, with the weights that the recipe names."""
        raise NotImplementedError

    def resolved_keys(self) -> dict[str, Any]:
        """What the reader of a recipe adds to these keys, so that a run asks neither network nor folder again."""
        return {}

    def published_input(self) -> PublishedInput:
        """How images were prepared for the weights, which ``transform: {name: pretrained}`` takes over.

        Raises:
            UserError: that is not known.
        """
        raise UserError(
            f"transform.name: pretrained is the preprocessing of published weights, and {self.name} has none that "
            "tell it; expected another transform, e.g. imagenet"
        )


class Backbone(nn.Module, ABC):
    """Images (B, 3, H, W), normalized, to features (B, F).

    Attributes:
        num_features: F.
        frozen_names: of the tensors in the state dict that the recipe's tuning leaves as they are.
    """

    num_features: int

    def __init__(self) -> None:
        super().__init__()
        self._frozen: frozenset[nn.Module] = frozenset()
        self.frozen_names: frozenset[str] = frozenset()
        self._keep_statistics = False
        self._frozen_epochs = 0
        self._waiting: list[nn.Parameter] = []  # they train, though not in the epoch under way

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
        """The parameters that train, in frozen epochs too, and the batch norms' among them, frozen or not."""
        return [parameter for name, parameter in self.named_parameters() if name not in self.frozen_names]

    def tuned_blocks(self) -> list[list[nn.Parameter]]:
        """`tuned_parameters` of each of the `blocks`, the last block first, and those before all blocks in the end.

        Raises:
            UserError: it has no blocks that can be told apart.
        """
        blocks = [{id(parameter) for parameter in block.parameters()} for block in reversed(self.blocks())]
        rest = {id(parameter) for parameter in self.parameters()}.difference(*blocks)
        tuned = self.tuned_parameters()
        return [[parameter for parameter in tuned if id(parameter) in block] for block in (*blocks, rest)]

    def merge(self) -> "Backbone":
        """Put the updates of low rank, where there are any, into the weights: faster, and with their usual names."""
        merge(self)
        return self

    def freeze(
        self, *, batchnorm_statistics: bool = False, batchnorm_affine: bool = False, epochs: int = 0
    ) -> "Backbone":
        """Leave some parameters out of training.

        Args:
            batchnorm_statistics: batch norms use their running statistics also in training, and keep them.
            batchnorm_affine: their scale and shift stay as they are.
            epochs: the first epochs, in which no parameter trains; statistics go on. See `set_epoch`.
        """
        self._keep_statistics = batchnorm_statistics
        self._frozen_epochs = epochs
        for module in self._batchnorms() if batchnorm_affine else ():
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
        return self.train(self.training)

    def set_epoch(self, epoch: int) -> bool:
        """Freeze what trains in the first epochs, which then run without a backward pass here, or let it train again.

        Args:
            epoch: the one that begins, 0 being the first.

        Returns:
            Whether other parameters need a gradient than before.
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


def blocks_in(network: nn.Module, *containers: str) -> list[nn.Module]:
    """The blocks of a network whose children are containers of them, the last with the children that follow.

    Args:
        network: with the containers in their order.
        containers: their names.

    Example:
        >>> network = nn.ModuleDict({"stem": nn.Linear(2, 2), "layer1": nn.Sequential(nn.Tanh(), nn.Tanh())})
        >>> [len(list(block.modules())) for block in blocks_in(network, "layer1")]
        [1, 2]
    """
    children = list(network.named_children())
    blocks = [block for name, child in children if name in containers for block in child.children()]
    end = 1 + max(index for index, (name, _) in enumerate(children) if name in containers)
    return [*blocks[:-1], nn.ModuleList([blocks[-1], *(child for _, child in children[end:])])]
